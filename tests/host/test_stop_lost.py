"""Stopping a run that is lost: nobody saw its end, and a stop invents none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from support.hostrun import HostRun, left_by_the_run, wait_until
from support.stopping import CHILD, stop


def lose(host: HostRun, plan: Any) -> Any:
    """Launch a run, kill its supervisor and its job with its child, and return its paths."""
    paths = host.launch(plan)
    host.wait_file("child")
    host.job(paths)
    wait_until(lambda: host.log(paths) == b"child up\n", "the pump has written it")
    host.kill_supervisor(paths)
    host.close()
    wait_until(lambda: host.state(plan)["state"] == "lost", "nothing of it lives")
    return paths


def test_a_stop_of_a_lost_run_invents_no_end_for_it(host: HostRun) -> None:
    """Nobody stopped it, and nobody knows when it died: a reboot must not become a stop on request."""
    plan = host.plan(host.python(CHILD))
    paths = lose(host, plan)
    events = sorted(Path(paths.events).iterdir())
    code, stdout = host.call("stop", {"run_id": plan["run_id"], "grace_s": 5, "force": False, "tell": True})
    *told, answer = map(json.loads, stdout.splitlines())
    assert code == 0
    assert [each["doing"] for each in told] == ["it is lost, neither supervisor nor job lives; looking what it left"]
    assert (answer["state"], answer["end_reason"], answer["was_over"]) == ("lost", None, True)
    assert (answer["gpus_clean"], answer["killed"], left_by_the_run(answer)) == (True, [], [])
    assert answer["message"].startswith("it was over before, and stays lost; what it left was looked at: ")
    assert not os.path.exists(paths.result)
    assert not os.path.exists(paths.summary)
    assert sorted(Path(paths.events).iterdir()) == events, "no word of an end, or of a stop"
    row = host.state(plan)
    assert (row["state"], row["end_reason"], row["ended"]) == ("lost", None, None)
    assert host.ask("ps", {})["leases"] == [], "its lease is given back all the same"
    assert host.log(paths) == b"child up\n"

    again = stop(host, plan)
    assert again == answer, "a second one changes nothing, and says so"


def test_a_second_stop_of_a_lost_run_looks_only_at_what_the_first_found(host: HostRun) -> None:
    """What is made in /dev/shm later is a later run's."""
    plan = host.plan(host.python(CHILD))
    lose(host, plan)
    assert stop(host, plan)["gpus_clean"] is True
    used, unused = (Path(f"/dev/shm/psm_{plan['run_id']}_{name}") for name in ("used", "unused"))
    try:
        unused.touch()
        request = {"lease_dir": str(host.lease_dir), "outputs": [], "confirmed": None}
        assert [each for each in host.ask("tidy", request)["actions"] if each["run_id"] == plan["run_id"]] == []
        with used.open("w"):  # of a file that nobody has open, any run on this machine that ends may make an end
            assert str(used) not in [left.get("path") for left in stop(host, plan)["leftovers"]]
    finally:
        used.unlink(missing_ok=True)
        unused.unlink(missing_ok=True)

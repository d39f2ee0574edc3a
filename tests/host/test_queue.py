"""Runs that wait for the lease: who is served, who is told what, and how to leave the queue."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun, wait_until

from remote_payload.host import lease
from remote_payload.host.lease import lease_folder
from remote_payload.host.liveness import identity
from remote_payload.host.queue import Turn

NOBODY = 65534
WAIT = {"limits": {"wait_for_lease": True, "stop_grace_s": 1.0}}


def hold(host: HostRun) -> dict[str, Any]:
    """Launch a run that holds the host until `release` exists."""
    code = "import os, time\nwhile not os.path.exists('release'):\n    time.sleep(0.02)"
    plan = host.plan(host.python(code))
    host.launch(plan)
    return plan


def test_a_waiting_run_is_queued_told_behind_whom_and_started_when_the_lease_is_free(host: HostRun) -> None:
    first = hold(host)
    second = host.plan(host.python("print('my turn')"), job=WAIT)
    confirmation = host.start(second)
    paths = host.paths(second)
    assert confirmation["outcome"] == "launched"
    assert confirmation["run"]["state"] == "queued"
    assert first["run_id"] in confirmation["detail"]["why"]
    assert confirmation["detail"]["holder"]["run_id"] == first["run_id"]
    assert host.state(second)["state"] == "queued"
    assert host.start(second)["outcome"] == "exists"
    assert host.read(paths.run)["job"] is None

    (host.folder / "release").touch()
    assert host.result(paths)["end_reason"] == "succeeded"
    assert host.log(paths) == b"my turn\n"
    states = [event["state"] for event in host.events(paths) if event["type"] == "state"]
    assert states[0] == "queued"
    assert states[-3:] == ["launching", "running", "stopping"]


def test_a_free_lease_is_not_waited_for(host: HostRun) -> None:
    plan = host.plan(host.python("print(1)"), job=WAIT)
    assert host.start(plan)["run"]["state"] == "launching"
    assert host.result(host.paths(plan))["end_reason"] == "succeeded"


def test_without_wait_it_is_refused_though_others_queue(host: HostRun) -> None:
    hold(host)
    host.start(host.plan(host.python("print(1)"), job=WAIT))
    confirmation = host.start(host.plan(host.python("print(1)")))
    assert (confirmation["outcome"], confirmation["result"]["end_reason"]) == ("refused", "lease-busy")
    (host.folder / "release").touch()


def test_stop_leaves_the_queue_and_starts_nothing(host: HostRun) -> None:
    hold(host)
    plan = host.plan(host.python("open('started', 'w')"), job=WAIT)
    host.start(plan)
    time.sleep(0.2)  # some time in the queue, which is none on the host
    request = {"run_id": plan["run_id"], "grace_s": 1, "force": False, "tell": True}
    *told, answer = map(json.loads, host.call("stop", request)[1].splitlines())
    assert [each["doing"] for each in told] == ["it waits in the queue, and has been asked to leave it"]
    assert (answer["state"], answer["end_reason"]) == ("finished", "stopped")
    assert "queued" in answer["message"]
    paths = host.paths(plan)
    assert (host.read(paths.result)["duration_s"], host.read(paths.summary)["timings"]["host_s"]) == (0.0, 0.0)
    third = host.plan(host.python("print('third')"), job=WAIT)
    host.start(third)
    (host.folder / "release").touch()
    assert host.result(host.paths(third))["end_reason"] == "succeeded"
    assert not (host.folder / "started").exists()


def test_a_killed_waiter_is_lost_and_does_not_block_those_behind_it(host: HostRun) -> None:
    hold(host)
    second, third = (host.plan(host.python("print(1)"), job=WAIT) for _ in range(2))
    host.start(second)
    host.start(third)
    host.kill_supervisor(host.paths(second))
    assert host.state(second)["state"] == "lost"
    (host.folder / "release").touch()
    assert host.result(host.paths(third))["end_reason"] == "succeeded"


def test_the_queue_is_served_in_order_of_arrival(host: HostRun) -> None:
    hold(host)
    plans = [host.plan(host.python(f"open('order', 'a').write('{number}')"), job=WAIT) for number in range(4)]
    for plan in plans:
        host.start(plan)
        supervisor = host.read(host.paths(plan).run)["supervisor"]["pid"]
        # Its thread lines up a moment after the word; the kernel lists who holds or waits for the queue's lock.
        line = f" {supervisor} "
        inode = f":{os.stat(host.lease_dir / 'host.lock.queue').st_ino} "
        wait_until(
            lambda line=line, inode=inode: any(
                line in lock and inode in lock for lock in Path("/proc/locks").read_text().splitlines()
            ),
            "it stands in line",
        )
    (host.folder / "release").touch()
    for plan in plans:
        assert host.result(host.paths(plan))["end_reason"] == "succeeded"
    assert (host.folder / "order").read_text() == "0123"


def test_turns_on_overlapping_gpus_do_not_lock_each_other_out(tmp_path: Path) -> None:
    folder = lease_folder(str(tmp_path / "lease"))
    first = Turn(folder, ["b", "a"])
    assert first.wait(20)
    second = Turn(folder, ["a", "c"])
    assert not second.wait(0.2)
    first.close()
    assert second.wait(20)
    second.close()


def test_a_hundred_races_for_the_lock_itself_give_one_holder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RETRY_S", 0.0)
    folder = lease_folder(str(tmp_path / "lease"))
    barrier = multiprocessing.get_context("fork").Barrier(2)
    results = multiprocessing.get_context("fork").SimpleQueue()

    def contend(number: int) -> None:
        for _ in range(100):
            claim = lease.Claim(f"20260101-000000-00000{number}", "race", "/", identity(os.getpid()))
            barrier.wait(60)
            try:
                held = lease.take(folder, ["gpu-a", "gpu-b"], claim, lambda: None)
            except lease.LeaseRefused:
                held = None
            results.put(held is not None)
            barrier.wait(60)  # both have tried before anybody lets go
            if held is not None:
                held.release(clean=True)
            barrier.wait(60)

    rivals = [multiprocessing.get_context("fork").Process(target=contend, args=(number,)) for number in range(2)]
    for rival in rivals:
        rival.start()
    outcomes = [results.get() for _ in range(200)]
    for rival in rivals:
        rival.join(60)
        assert rival.exitcode == 0
    assert all(sorted(outcomes[i : i + 2]) == [False, True] for i in range(0, 200, 2))


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_sees_who_holds_the_lease_since_when_and_that_it_beats() -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    host = HostRun(folder)
    try:
        plan = hold(host)
        other = folder / "other"
        other.mkdir()
        host.become(NOBODY)
        code, stdout = host.call("ps", {"workdir": str(other), "lease_dir": str(host.lease_dir)})
        document = json.loads(stdout)
        assert code == 0, stdout
        assert document["runs"] == []
        [held] = document["leases"]
        assert (held["run_id"], held["user"], held["state"]) == (plan["run_id"], "root", "held")
        assert held["alive"] == "alive"
        assert 0 <= held["heartbeat_age_s"] < 60
        assert held["since"]
    finally:
        host.close()
        shutil.rmtree(folder)


def test_the_lease_beats_while_the_job_runs(host: HostRun) -> None:
    hold(host)
    [before] = host.ask("ps", {})["leases"]
    wait_until(lambda: host.ask("ps", {})["leases"][0]["beat_s"] > before["beat_s"], "a second heartbeat")
    os.kill(before["process"]["pid"], signal.SIGTERM)

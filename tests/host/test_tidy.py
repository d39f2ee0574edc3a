"""Clearing up after dead runs: the plan, its digest, and that what is not ours stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun, wait_until

from remote_payload.host.liveness import read_stat


def tidy(host: HostRun, confirmed: str | None = None, **changes: Any) -> tuple[int, dict[str, Any]]:
    request = {"lease_dir": str(host.lease_dir), "outputs": [], "confirmed": confirmed, **changes}
    code, stdout = host.call("tidy", request)
    answer: dict[str, Any] = json.loads(stdout)
    return code, answer


def test_a_dead_supervisors_job_is_stopped_only_as_it_was_shown(host: HostRun) -> None:
    plan = host.plan(host.python("import time; time.sleep(600)"))
    paths = host.launch(plan)
    job = host.job(paths)
    assert tidy(host)[1]["actions"] == []  # it runs as it should
    host.kill_supervisor(paths)
    code, planned = tidy(host)
    (action,) = planned["actions"]
    assert (code, action["kind"], action["run_id"]) == (0, "stop", plan["run_id"])
    assert job["pid"] in [process["pid"] for process in action["processes"]]
    assert planned["done"] == []

    code, refused = tidy(host, "0" * 64)
    assert (code, refused["error"]["code"]) == (70, "tidy-changed")
    assert read_stat(job["pid"]) is not None

    code, done = tidy(host, planned["digest"])
    assert code == 0
    assert [each["kind"] for each in done["done"]] == ["stop"]
    assert (done["failed"], done["remaining"]) == ([], [])
    assert host.result(paths)["end_reason"] == "stopped"


def test_what_an_ended_run_left_running_is_ended_and_a_stranger_is_not(host: HostRun) -> None:
    plan = host.plan(host.python("pass"))
    host.run(plan)
    code = "import time; time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "CTL_RUN_ID": plan["run_id"]})
    stranger = subprocess.Popen(["VLLM::Worker", "600"], executable=shutil.which("sleep"))
    try:
        wait_until(lambda: tidy(host)[1]["actions"], "it is seen")
        planned = tidy(host)[1]
        (action,) = planned["actions"]
        assert (action["kind"], [process["pid"] for process in action["processes"]]) == ("kill", [left.pid])
        done = tidy(host, planned["digest"])[1]
        assert done["done"][0]["text"] == "1 processes ended"
        assert left.wait(30) != 0
        assert stranger.poll() is None
    finally:
        for process in (left, stranger):
            process.kill()
            process.wait()


def test_output_goes_only_if_its_run_failed_and_nobody_wants_it(host: HostRun, tmp_path: Path) -> None:
    root = tmp_path / "root"
    output = {"path": str(root / "out"), "root": str(root), "stale": "fail", "adopt": False}
    root.mkdir()
    write = f"import os; open({str(root / 'out' / 'hs_0.safetensors')!r}, 'w').write('x' * 9); os._exit(int(3))"
    listed = {**output, "digest": None, "entries": 0, "bytes": 0}
    plan = host.plan({"name": "clear", "kind": "clear"}, host.python(write), job={"outputs": [listed]})
    assert host.run(plan)["end_reason"] == "job-failed"
    assert tidy(host)[1]["actions"] == []  # an output that nobody asked about
    assert tidy(host, outputs=[{**output, "stale": "resume"}])[1]["actions"] == []
    (root / "out" / "notes.txt").write_text("a person's")
    assert tidy(host, outputs=[output])[1]["actions"] == []
    (root / "out" / "notes.txt").unlink()
    planned = tidy(host, outputs=[output])[1]
    (action,) = planned["actions"]
    assert (action["kind"], action["entries"], action["bytes"]) == ("output", 1, 9)
    assert "job-failed" in action["why"]
    done = tidy(host, planned["digest"], outputs=[output])[1]
    assert done["done"][0]["text"] == f"1 entries deleted from {root / 'out'}, 0 left"
    assert os.listdir(root / "out") == [".ctl-owner.json"]


def failed_output(host: HostRun, folder: Path) -> dict[str, Any]:
    """Have a run fail after it wrote one sample into `folder`; return the output as a playbook owns it."""
    output = {"path": str(folder), "root": str(folder.parent), "stale": "fail", "adopt": False}
    folder.parent.mkdir()
    write = f"import os; open({str(folder / 'hs_0.safetensors')!r}, 'w').write('x' * 9); os._exit(3)"
    owned = {**output, "digest": None, "entries": 0, "bytes": 0}
    plan = host.plan({"name": "clear", "kind": "clear"}, host.python(write), job={"outputs": [owned]})
    assert host.run(plan)["end_reason"] == "job-failed"
    assert [action["kind"] for action in tidy(host, outputs=[output])[1]["actions"]] == ["output"]
    return output


def test_output_into_which_another_run_writes_at_this_moment_stays(host: HostRun, tmp_path: Path) -> None:
    output = failed_output(host, tmp_path / "root" / "out")
    owned = {**output, "stale": "resume", "digest": None, "entries": 0, "bytes": 0}
    share = host.launch(host.plan(host.python("import time; time.sleep(600)"), job={"outputs": [owned]}))
    host.job(share)
    assert tidy(host, outputs=[output])[1]["actions"] == []


@pytest.mark.parametrize("known", [True, False], ids=["of this host", "of another host"])
def test_output_stays_if_a_run_that_did_not_fail_wrote_part_of_it(host: HostRun, tmp_path: Path, known: bool) -> None:
    output = failed_output(host, tmp_path / "root" / "out")
    plan = host.plan(host.python("pass"))
    if known:
        assert host.run(plan)["end_reason"] == "succeeded"
    ledger = tmp_path / "root" / "out" / ".ctl-ledger" / f"{plan['run_id']}.rank-0.jsonl"
    ledger.parent.mkdir()
    ledger.write_text("{}\n")
    assert tidy(host, outputs=[output])[1]["actions"] == []

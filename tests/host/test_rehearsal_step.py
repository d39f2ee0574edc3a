"""A step that says which end its failure is, and problems that a job reports as events."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from support.hostrun import HostRun

from remote_payload.host.errors import ProtocolError
from remote_payload.host.protocol import REFUSED, EndReason, check_plan

REPORT = """
import json, os
event = {"type": "problem", "code": "canary-boundary", "what": "boundary 4 is boundary 3", "why": "a shift",
         "fix": "f"}
folder = os.path.join(os.environ["CTL_RUN_DIR"], "events")
with open(os.path.join(folder, "rehearse.jsonl"), "a") as file:
    file.write(json.dumps({**event, "t": 1.0, "seq": 0}) + "\\n")
"""


def _rehearsal(host: HostRun, code: str) -> dict[str, Any]:
    return {**host.python(code, "rehearse"), "failure": "rehearsal-failed"}


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [("raise SystemExit(1)", 1, None), ("import os; os.abort()", None, signal.SIGABRT)],
)
def test_a_failed_rehearsal_refuses_the_run_before_the_job(
    host: HostRun, code: str, exit_code: int | None, number: int | None
) -> None:
    plan = host.plan(_rehearsal(host, code), host.python("open('started', 'w')"))
    result = host.run(plan)
    assert result["end_reason"] == "rehearsal-failed"
    assert EndReason(result["end_reason"]) in REFUSED
    assert (result["step"], result["exit_code"], result["signal"]) == ("rehearse", exit_code, number)
    assert not (host.folder / "started").exists()


def test_a_rehearsal_that_goes_well_is_timed_and_the_job_follows(host: HostRun) -> None:
    plan = host.plan(_rehearsal(host, "pass"), host.python("open('started', 'w')"))
    assert host.run(plan)["end_reason"] == "succeeded"
    assert (host.folder / "started").exists()
    summary = json.loads((host.workdir / "runs" / plan["run_id"] / "summary.json").read_text())
    assert summary["timings"]["rehearse_s"] > 0


def test_reported_problems_are_in_the_summary_before_the_end_itself(host: HostRun) -> None:
    plan = host.plan(_rehearsal(host, REPORT + "raise SystemExit(1)"))
    host.run(plan)
    summary = json.loads((host.workdir / "runs" / plan["run_id"] / "summary.json").read_text())
    first, last = summary["problems"]
    assert first == {
        "code": "canary-boundary", "what": "boundary 4 is boundary 3", "why": "a shift", "fix": "f"
    }  # fmt: skip
    assert last["code"] == "rehearsal-failed"


def test_a_failure_must_be_a_known_end(host: HostRun) -> None:
    plan = host.plan({**host.python("pass"), "failure": "no-such-end"})
    with pytest.raises(ProtocolError, match="no-such-end"):
        check_plan(plan)

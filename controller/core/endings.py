"""What the end of a run means for whoever waited for it: an error, and so an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.core.errors import CtlError, ExitCode, JobFailed, JobStopped, RefusedError
from remote_payload.host.protocol import REFUSED, EndReason, RunState

OVER = frozenset({RunState.FINISHED.value, RunState.LOST.value})
"""States that a run does not leave."""

LOST = "lost"
"""Code of the error, and of the problem in the summary, of a run of which nothing lives and no end is written."""


def lost_problem(run_id: str, *, written: int) -> dict[str, str]:
    """Return what a lost run's summary says of its end; `written` are the samples that its ledgers vouch for."""
    again = "start again"
    if written:
        again = "go on: the same command with `--stale resume` keeps what is written and adds the rest"
    return {
        "code": LOST,
        "what": "neither its supervisor nor its job is alive, and it left no result (a reboot, or both were killed)",
        "why": "",
        "fix": f"read what it wrote with `ctl logs {run_id}`, then {again}",
    }


def end_error(
    run_id: str,
    state: str,
    result: Mapping[str, Any] | None,
    problem: Mapping[str, Any] | None,
    *,
    last: str = "",
    written: int = 0,
) -> CtlError | None:
    """Map how a run ended to the error (and so the exit code) that belongs to it; None for success.

    Of a lost one `last` says what it was heard of last, and `written` how many samples it left.
    """
    if state == RunState.LOST.value:
        told = lost_problem(run_id, written=written)
        why = told["what"] + (f"; {last}" if last else "")
        return JobFailed(f"run {run_id} is lost", why=why, fix=told["fix"], code=LOST)
    if result is None:
        return None
    reason = result["end_reason"]
    if reason == EndReason.SUCCEEDED.value:
        return None
    why = str(problem["what"]) if problem and problem["what"] != result["message"] else ""
    fix = str(problem.get("fix") or "") if problem else ""
    if not fix and result.get("log_bytes") != 0:  # an earlier payload does not say how much was printed
        fix = f"read the whole log with `ctl logs {run_id}`"
    if reason in (EndReason.STOPPED.value, EndReason.CANCELLED.value):
        return JobStopped(f"run {run_id} was stopped", why=str(result["message"]), code=reason)
    kind = RefusedError if reason in {word.value for word in REFUSED} else JobFailed
    return kind(f"run {run_id} ended: {result['message']}", why=why, fix=fix, code=reason)


def exit_code(error: CtlError | None) -> ExitCode:
    return ExitCode.OK if error is None else ExitCode(error.exit_code)

"""What the end of a run means for whoever waited for it: an error, and so an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.core.errors import CtlError, ExitCode, JobFailed, JobStopped, RefusedError
from remote_payload.host.protocol import REFUSED, EndReason


def end_error(
    run_id: str, state: str, result: Mapping[str, Any] | None, problem: Mapping[str, Any] | None, last: str = ""
) -> CtlError | None:
    """Map how a run ended to the error (and so the exit code) that belongs to it; None for success.

    `last` says what a lost one was heard of last.
    """
    if state == "lost":
        return JobFailed(
            f"run {run_id} is lost",
            why="neither its supervisor nor its job is alive, and it left no result (a reboot, or both were killed)"
            + (f"; {last}" if last else ""),
            fix=f"read what it wrote with `ctl logs {run_id}`, then start again",
            code="lost",
        )
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

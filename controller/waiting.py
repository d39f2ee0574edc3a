"""What is said of a run that goes on: a wait for it was interrupted or too long, or its summary was asked for."""

from __future__ import annotations

from controller.core.errors import CtlError, ExitCode, UsageError


class Detached(KeyboardInterrupt):
    """Somebody interrupted the waiting for a run; the run goes on. The message says how to go back to it.

    It is a KeyboardInterrupt, so that the cells after an interrupted one are not run and no `except Exception`
    takes it for a failure.
    """

    def __init__(self, run_id: str, host: str) -> None:
        ways = (
            ("go back to it", f'run = controller.attach("{run_id}"); run.wait()'),
            ("stop it", "run.stop()"),
            ("in a terminal", f"ctl attach {run_id}"),
        )
        lines = (f"  {label:<16}{what}" for label, what in ways)
        super().__init__("\n".join((f"detached: run {run_id} goes on, on {host}", *lines)))

    def _render_traceback_(self) -> list[str]:
        """For IPython: the message, without the frames that were interrupted."""
        return str(self).splitlines()


class WaitTimeout(CtlError, TimeoutError):
    """A wait ended before the run did, which goes on and may be waited for again."""

    exit_code = ExitCode.DETACHED
    code = "wait-timeout"


def wait_timeout(
    run_id: str, standing: str, *, waited_s: float, timeout: float | None, patience_s: float
) -> WaitTimeout:
    """Return what to raise where a wait ended after `waited_s`: by its `timeout`, else for want of contact.

    `standing` is the run's last known state in words. All times are in seconds.
    """
    if timeout is not None and waited_s >= timeout:
        why, fix = (
            f"the timeout of {timeout:g} s has passed",
            "wait again with `run.wait()`, with more time or without a timeout",
        )
    elif waited_s >= patience_s:
        why = f"its host was out of reach for {patience_s:.0f} s"
        fix = "look at the network; then `run.wait()` goes on where this ended"
    else:
        why, fix = "`run.detach()` was called meanwhile", "`run.wait()` goes on where this ended"
    return WaitTimeout(
        f"run {run_id} had not ended after {waited_s:.0f} s, and goes on: it is {standing}",
        why=why, fix=f"{fix}; `run.stop()` ends the run",
    )  # fmt: skip


def no_summary(run_id: str, standing: str, fix: str) -> UsageError:
    """Return the error for a summary that is asked of a run which goes on, or is lost."""
    return UsageError(f"run {run_id} has no summary", why=f"it is {standing}", fix=fix, code="no-summary")

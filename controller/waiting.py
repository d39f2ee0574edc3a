"""What ends a wait for a run that goes on: an interrupt, or a time that has passed."""

from __future__ import annotations


class Detached(KeyboardInterrupt):
    """Somebody interrupted the waiting for a run; the run goes on. The message says how to go back to it.

    It is a KeyboardInterrupt, so that the cells after an interrupted one are not run and no `except Exception`
    takes it for a failure.
    """

    def __init__(self, run_id: str, host: str) -> None:
        super().__init__(
            f"detached: run {run_id} goes on, on {host}\n"
            f'  go back to it     run = controller.attach("{run_id}"); run.wait()\n'
            f"  stop it            run.stop()\n"
            f"  in a terminal      ctl attach {run_id}"
        )

    def _render_traceback_(self) -> list[str]:
        """For IPython: the message, without the frames that were interrupted."""
        return str(self).splitlines()

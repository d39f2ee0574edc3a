"""What `ctl stop` does, and what it says while it does: a job may take its whole grace to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from controller import lookup
from controller.core.endings import OVER
from controller.core.errors import CtlError, ExitCode, Interrupted
from controller.core.setting import typed
from controller.runfolder import UNKNOWN, RunFolder, find_run, going_on
from controller.ui.clean import clean
from controller.ui.formats import duration_text
from controller.ui.terminal import ask_yes_no, err_console, out_console, print_json, require_yes
from controller.workspace import load_workspace
from remote_payload.host.protocol import RunState

if TYPE_CHECKING:
    from rich.console import Console

    from controller.run import Run

HANDOVER_S = 10.0
"""A watch ends a moment after its run has; one that is without contact for longer than this is not waited for."""


class Said:
    """Prints how far a stop is, a line for each thing that happens, the first at once; without a console nothing.

    `state` is the last known word about the run: one that queues has no processes, and one that is unknown may queue.
    """

    asked = False
    """Whether the host has said that it is at it."""

    def __init__(
        self,
        console: Console | None,
        run_id: str,
        host: str,
        grace_s: float,
        *,
        state: str = RunState.RUNNING.value,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._clock, self._since = console, clock, clock()
        how = f"TERM to all its processes, KILL after {grace_s:g} s" if grace_s else "KILL to all its processes"
        if state in OVER:
            self._print(f"run {run_id} has ended: asking {host} whether it left anything")
        elif state == RunState.QUEUED.value:
            self._print(f"run {run_id} waits in the queue of {host}: taking it out")
        elif state == UNKNOWN:
            self._print(f"stopping run {run_id} on {host}")
        else:
            self._print(f"stopping run {run_id} on {host}: {how}")

    def doing(self, text: str) -> None:
        self.asked = True
        self._print(f"  {text}")

    def waiting(self) -> None:
        self._print(f"  still at it after {duration_text(self._clock() - self._since, running=True)}")

    def _print(self, text: str) -> None:
        if self._console is not None:
            self._console.print(clean(text), markup=False, soft_wrap=True)


def stop(run_id: str | None, host: str | None, *, grace_s: float, as_json: bool, sure: bool) -> ExitCode:
    """Stop a run; unless it is `sure` which one is meant, a person at a terminal is asked.

    Raises RefusedError (`confirmation-needed`: nobody is there to ask; `declined`), and Interrupted where a Ctrl-C
    ended the waiting, but not the stop.
    """
    workspace = load_workspace()
    # What was asked about is what is stopped, whatever has been launched since.
    wanted = run_id if sure else _confirmed(find_run(workspace.runs_dir, run_id), host)
    with lookup.open_run(workspace, wanted, host, ask=ask_yes_no) as run:
        ended = run.ended
        said = Said(None if as_json else err_console(), run.id, run.host, grace_s, state=_last_word(run))
        try:
            outcome = run.stop(grace_s=grace_s, telling=said)
        except KeyboardInterrupt:
            goes_on = f"{run.host} goes on stopping run {run.id}"
            raise Interrupted(
                f"interrupted: {goes_on if said.asked else f'run {run.id} may not have been asked to stop'}",
                fix=f"see how it ends with `ctl attach {run.id}`; `ctl stop {run.id}` may be repeated",
            ) from None
        said.doing("copying the rest of its log and records here")
        # The run is stopped all the same, and that is what was asked for.
        try:
            lookup.copy_what_is_new(run, handover_s=HANDOVER_S if outcome.state in OVER else 0.0)
        except CtlError as error:
            from controller.ui.errors import print_error

            print_error(error)
        except KeyboardInterrupt:
            said.doing(f"interrupted: `ctl attach {run.id}` copies the rest")
        # The last run may have ended while an earlier one goes on: that was not named, so it is not stopped. Whether
        # it had is the host's to say: here its end may not have been seen.
        over = run_id is None and (ended or outcome.was_over)
        others = [each.run_id for each in going_on(run.folder.path.parent) if each.run_id != run.id] if over else []
        summary: Mapping[str, Any] = run.summary or {}
        result: Mapping[str, Any] = run.folder.read("result.json") or {}
    record = {
        "schema_version": 1, "run_id": run.id, "state": outcome.state, "end_reason": outcome.end_reason,
        "gpus_clean": outcome.gpus_clean, "killed": outcome.killed, "leftovers": outcome.leftovers,
        "message": outcome.message, "others": others, "was_over": outcome.was_over, "ended": result.get("ended"),
        "last_stage": summary.get("last_stage"), "samples": summary.get("samples"),
    }  # fmt: skip
    if as_json:
        print_json(record)
    else:
        from controller.ui.stopped import print_stop

        untouched = outcome.had_ended and outcome.message == result.get("message")
        print_stop(out_console(), record, had_ended=outcome.had_ended, untouched=untouched)
    for other in others:
        words = f"it had ended before; of run {other} no end is known: ctl stop {other}"
        err_console().print(words, markup=False, soft_wrap=True)
    # "ctl stop RUN && ..." must not go on to a host on which the run still holds something.
    return ExitCode.UNEXPECTED if outcome.gpus_clean is False else ExitCode.OK


def _last_word(run: Run) -> str:
    """Return the state of a run as far as is known here; unknown only where it may wait in a queue."""
    limits = ((run.folder.read("plan.json") or {}).get("job") or {}).get("limits") or {}
    unknown = run.state == UNKNOWN and not limits.get("wait_for_lease")
    return RunState.RUNNING.value if unknown else run.state


def _confirmed(last: RunFolder, host: str | None) -> str:
    """Return the id of the last run, which nobody named, if a person says that it is meant. Raises RefusedError."""
    where = typed(host) or ((last.read("local.json") or {}).get("host") or {}).get("name")
    require_yes(
        f"stop run {last.run_id}{f' on host {where}' if where else ''}?",
        unattended="no run is named, and nobody is there to confirm which one is meant",
        why=f"nothing was stopped; the last run of this folder is {last.run_id}",
        fix=f"name the run: `ctl stop {last.run_id}`; or say `ctl stop --last`",
        declined="nothing was stopped",
    )
    return last.run_id

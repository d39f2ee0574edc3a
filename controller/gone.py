"""A run whose folder its host has no more: `ctl prune` deletes it there, once all of it is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from controller.core.errors import LaunchUnknown, RemoteFailed, UsageError
from controller.recorded import events
from controller.runfolder import RunFolder
from controller.stages.stop import StopOutcome
from remote_payload.host.protocol import RunState

RUN_GONE = "run-gone"
"""Code of the error that a host has no folder of a run whose end was never seen here."""

_NO_SUCH_RUN = "no-such-run"
"""The host's word that it has no folder of a run."""

PRUNED = "has no folder of the run any more (`ctl prune`): this is the copy that is here"


class RunPruned(Exception):
    """The host has no folder of a run that is known to be over. Never leaves this package's verbs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """How a run ended, by its copy. `gpus_clean` is never false: what left something, the host does not let go."""

    state: str
    end_reason: str | None
    gpus_clean: bool | str


@contextmanager
def noticed() -> Iterator[None]:
    """Raise RunPruned in place of the host's word that it has no such run."""
    try:
        yield
    except RemoteFailed as error:
        if error.code != _NO_SUCH_RUN:
            raise
        raise RunPruned from error


def last_word(folder: RunFolder, host: str) -> LastWord:
    """Return how the run ended.

    Raises UsageError (`run-gone`) where its end was never seen here, LaunchUnknown where its launch was not either.
    """
    result = folder.read("result.json")
    if result is not None:
        clean = True if result.get("gpus_clean") is True else "unknown"
        return LastWord(state=RunState.FINISHED.value, end_reason=str(result["end_reason"]), gpus_clean=clean)
    if _was_lost(folder):
        return LastWord(state=RunState.LOST.value, end_reason=None, gpus_clean="unknown")
    if (folder.read("local.json") or {}).get("status") == "unknown" and folder.read("run.json") is None:
        raise LaunchUnknown(
            f"{host} has no folder of run {folder.run_id}",
            why="its launch could not be confirmed, and has not arrived there so far",
            fix=f"look again in a minute, `ctl attach {folder.run_id}`; if there is still none, start a new one",
        )
    raise UsageError(
        f"{host} has no folder of run {folder.run_id}",
        why="its end was not seen here; the folder was deleted there, or the host's `workdir` is another than it was",
        fix=f"what was copied of it: `ctl logs {folder.run_id}`; what the host has: `ctl ps --host {host}`",
        code=RUN_GONE,
    )


def stopped(folder: RunFolder, host: str) -> StopOutcome:
    """Return what a stop of such a run comes to: it is over, and nothing was done. Raises as `last_word`."""
    word = last_word(folder, host)
    return StopOutcome(
        state=word.state, end_reason=word.end_reason, gpus_clean=word.gpus_clean, killed=[], leftovers=[],
        message=f"it had ended before, and {host} has deleted its folder since (`ctl prune`): nothing was stopped; "
        f"`ctl ps --host {host}` lists what runs there",
        was_over=True,
    )  # fmt: skip


def _was_lost(folder: RunFolder) -> bool:
    """Whether the host's last word about a run, as it was noted here, is that it was lost."""
    watched = [event for event in events(folder) if event.type == "stage" and event.get("name") == "watch"]
    said = [event.get("text") for event in watched if event.get("status") == "done"]
    return bool(said) and said[-1] == RunState.LOST.value

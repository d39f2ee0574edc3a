"""What `ctl logs` does: a run's log as it is, or the lines that are wanted of it, at once or as they come."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from controller import diagnosis, ending, lookup
from controller.core.errors import ExitCode, UsageError
from controller.core.loglines import Place, Selection
from controller.core.logs import parse_line
from controller.core.tracebacks import range_text
from controller.logreader import LogReader
from controller.run import Run
from controller.runfolder import ALREADY_WATCHED, find_run, list_runs
from controller.ui.clean import text as cleaned
from controller.ui.terminal import ask_yes_no, err_console
from controller.workspace import Workspace, load_workspace

POLL_S = 0.2
"""Between two looks for new lines: an eye notices no less, and the times of the lines have come by the next look."""

RETRY_S = 1.0
"""Between two attempts to take over the copying from another window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What `ctl logs` is asked for."""

    selection: Selection
    follow: bool = False
    tail: int | None = None
    problem: bool = False
    previous: bool = False


def logs(run_id: str | None, host: str | None, wanted: Wanted) -> ExitCode:
    """Write a log to stdout, raw: whoever pipes it gets what the job wrote, nothing folded or cleaned.

    Raises UsageError for a contradiction, and for times of a log that has none.
    """
    if wanted.problem and (wanted.follow or wanted.tail is not None or not wanted.selection.is_plain):
        raise UsageError("--problem prints what belongs to the problem, and no selection", fix="leave the others out")
    workspace = load_workspace()
    if wanted.previous:
        run_id = _previous(workspace, run_id)
    with lookup.open_run(workspace, run_id, host, ask=ask_yes_no) as run:
        if wanted.follow and not run.ended:
            code, wrote = _follow(run, wanted)
            if not wrote:
                _tell_ranks(run, wanted.selection.rank)
            return code
        if not run.ended:
            lookup.copy_or_say(run, "this is")
        lookup.mend(run)
        if wanted.problem:
            place, lines = diagnosis.problem_lines(run.folder) or (
                ending.no_problem(run.folder, run.state, paused=run.paused),
                [],
            )
            err_console().print(cleaned(place), soft_wrap=True)
            _write(lines)
        elif not _write(_held(LogReader(run.folder), wanted)):
            _tell_ranks(run, wanted.selection.rank)
    return ExitCode.OK


def _tell_ranks(run: Run, rank: int | None) -> None:
    """Say on stderr that the log holds nothing of a rank, and which it has: silence could also be a quiet rank."""
    if rank is None:
        return
    reader = LogReader(run.folder)
    lines = (parse_line(raw.decode(errors="replace")) for _, raw in chain(reader.lines(), reader.unfinished()))
    ranks = {line.rank for line in lines if line.rank is not None}
    if rank not in ranks:
        known = f"it has ranks {range_text(ranks)}" if ranks else "it names no ranks"
        err_console().print(f"no line of rank {rank} in the log of {run.id}: {known}", soft_wrap=True)


def _previous(workspace: Workspace, run_id: str | None) -> str:
    """Return the id of the run of this folder that was launched before `run_id`, or before the last one."""
    current = find_run(workspace.runs_dir, run_id)
    earlier = [run.run_id for run in list_runs(workspace.runs_dir) if run.run_id < current.run_id]
    launched = [
        name for name in earlier
        if ((workspace.runs_dir / name / "run.json").is_file() or (workspace.runs_dir / name / "log").is_dir())
    ]  # fmt: skip
    if not launched:
        raise UsageError(
            f"no run of this folder was launched before {current.run_id}",
            fix=f"leave out `--previous` to read {current.run_id} itself",
            code="run-unknown",
        )
    return launched[-1]


def _held(reader: LogReader, wanted: Wanted) -> Iterable[bytes]:
    """Return what is wanted of all that is held of the log, to its unfinished line: the whole, or the last lines."""
    if wanted.selection.is_plain and wanted.tail is None:
        return (data for _, data in reader.pieces())
    shown = _chain(_shown(reader, reader.lines(), wanted.selection), reader, wanted.selection)
    return shown if wanted.tail is None else deque(shown, maxlen=wanted.tail)


def _chain(shown: Iterator[bytes], reader: LogReader, selection: Selection) -> Iterator[bytes]:
    yield from shown
    yield from _shown(reader, reader.unfinished(), selection)


def _shown(reader: LogReader, lines: Iterable[tuple[Place | None, bytes]], selection: Selection) -> Iterator[bytes]:
    index = reader.times() if selection.needs_times else None
    for place, raw in lines:
        if index is not None and not index and place is not None:
            raise UsageError(
                "the times of this log are not known",
                why="it was written by a version of ctl that did not note them",
                fix="leave out --since, --until and --timestamps; vLLM's own lines hold their times",
                code="no-times",
            )
        line = selection.shown(raw, index.at(place) if index is not None and place is not None else None)
        if line is not None:
            yield line


def _follow(run: Run, wanted: Wanted) -> tuple[ExitCode, bool]:
    """Write until the run ends; return the exit code, and whether anything was written."""
    reader, copier = LogReader(run.folder), _Copier(run)
    selection, seen = wanted.selection, reader.sizes()
    wrote = False
    copier.start()
    try:
        if wanted.tail is not None:
            copier.join(RETRY_S)  # time for a first copy: the last lines are those of the host, not of yesterday
            seen = reader.sizes()
            copier.join(POLL_S)
            wrote |= _write(deque(_shown(reader, reader.lines(seen), selection), maxlen=wanted.tail))
        while True:
            over = not copier.is_alive()
            # What was there at the last look: the times of its lines have come since.
            upto, seen = (None if over else seen), reader.sizes()
            if selection.is_plain and wanted.tail is None:
                wrote |= _write(data for _, data in reader.pieces(upto))
            elif over or not selection.needs_times or reader.times():
                wrote |= _write(_shown(reader, reader.lines(upto), selection))
            if over:
                wrote |= _write(_shown(reader, reader.unfinished(), selection))
                return copier.outcome(), wrote
            copier.join(POLL_S)
    except KeyboardInterrupt:
        return ExitCode.DETACHED, True
    finally:
        copier.leave()


class _Copier(threading.Thread):
    """Copies a run from its host until it has ended, or waits while another window does so."""

    def __init__(self, run: Run) -> None:
        super().__init__(name="ctl-copy", daemon=True)
        self._run = run
        self._error: Exception | None = None
        self._ended = False
        self._leaving = threading.Event()

    def run(self) -> None:
        while not self._ended and not self._leaving.is_set():
            try:
                self._ended = self._run.watch().ended
                return
            except UsageError as error:
                if error.code != ALREADY_WATCHED:
                    self._error = error
                    return
                self._ended = self._run.ended
                self._leaving.wait(RETRY_S)
            except Exception as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
                self._error = error
                return

    def leave(self) -> None:
        """End the copying; the run goes on."""
        self._leaving.set()
        while self.is_alive():  # a watch that begins at this moment forgets that it was asked to end
            self._run.detach()
            self.join(POLL_S)

    def outcome(self) -> ExitCode:
        if self._error is not None:
            raise self._error
        return ExitCode.OK if self._ended else ExitCode.DETACHED


def _write(pieces: Iterable[bytes]) -> bool:
    """Write to stdout as it is, and return whether there was anything."""
    raw = sys.stdout.buffer
    wrote = False
    for piece in pieces:
        raw.write(piece)
        wrote = True
    raw.flush()
    return wrote

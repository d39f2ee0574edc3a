"""Read what there is of a failed run, a run folder or any log file, and have `core.triage` name the cause."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from controller.core.endings import lost_problem
from controller.core.errors import UsageError
from controller.core.events import parse_event
from controller.core.laststage import last_stage
from controller.core.logs import parse_line, worker_tracebacks
from controller.core.runview import RunView
from controller.core.state import reduce
from controller.core.tracebacks import FoldedFailure
from controller.core.triage import Ending, PlacedLine, Triage, place_lines, triage
from controller.core.triage_entry import is_told
from controller.runfolder import RunFolder
from remote_payload.host.layout import RunPaths
from remote_payload.host.protocol import EndReason
from remote_payload.host.summary import build_lost_summary

LOG_LIMIT = 16 << 20
"""Bytes read of a log, from its end: a failure is there, and these 100,000 lines take two or three seconds."""

_BLOCK_BYTES = 1 << 20

LINES_AROUND = 15

EVENTS_SUFFIX = ".jsonl"

UNTRIAGED = frozenset({EndReason.SUCCEEDED.value, EndReason.STOPPED.value, EndReason.CANCELLED.value})
"""Ends that have no cause to look for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was read, and the cause; None where there is no sign of a failure."""

    files: tuple[Path, ...]
    failures: tuple[FoldedFailure, ...] = ()
    triage: Triage | None = None


def diagnose_run(folder: RunFolder) -> Diagnosis:
    """Triage a run from its events, its result and its log, as far as they are held here."""
    view = view_of(folder)
    result = folder.read("result.json") or {}
    ending = Ending(
        # result.json comes last of all: while a dashboard asks, the event may be all that there is.
        end_reason=str(result.get("end_reason") or (view.end.end_reason if view.end else "")),
        signal=view.end.signal if view.end else None,
        message=str(result.get("message") or (view.end.message if view.end else "")),
        oom_killed=result.get("oom_killed") is True,
    )
    # A declared gap holds no line that could be evidence.
    files = [part for part in folder.mirror.log_parts() if isinstance(part, Path)]
    if ending.end_reason in UNTRIAGED:
        return Diagnosis(files=tuple(files))
    lines = [*_stream(files, "log/"), *_kernel_lines(view)]
    failures = _failures(view, lines)
    return Diagnosis(files=tuple(files), failures=failures, triage=triage(lines, failures, ending))


def diagnose_files(paths: Sequence[Path]) -> Diagnosis:
    """Triage logs that may come from anywhere, each a stream of its own; a run folder stands for its events and log.

    A file `*.jsonl` is taken for events, which come before the logs beside it. Raises UsageError for what cannot be
    read.
    """
    if len(paths) == 1 and (folder := run_folder(paths[0])) is not None:
        return diagnose_run(folder)
    lines: list[PlacedLine] = []
    view = RunView()
    try:
        view = _view([path for path in paths if path.suffix == EVENTS_SUFFIX])
        for path in paths:
            lines += _stream([path], "") if path.suffix != EVENTS_SUFFIX else []
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename}", why=error.strerror or str(error),
            fix="name logs of vLLM; or one run: its folder, its id, or a part of that", code="log-unreadable",
        ) from error  # fmt: skip
    lines += _kernel_lines(view)
    failures = _failures(view, lines)
    ending = (
        Ending(end_reason=view.end.end_reason, signal=view.end.signal, message=view.end.message) if view.end else None
    )
    return Diagnosis(files=tuple(paths), failures=failures, triage=triage(lines, failures, ending))


def ended_badly(folder: RunFolder) -> bool:
    """Whether a run is known here to have failed, or to be lost."""
    result = folder.read("result.json")
    return folder.is_lost if result is None else result.get("end_reason") not in UNTRIAGED


def run_folder(path: Path) -> RunFolder | None:
    """Return the run whose folder this is, here or on its host; None of anything else.

    That of a run that printed nothing, or was never launched, has no log.
    """
    is_run = path.is_dir() and any((path / name).exists() for name in ("log", "events", "plan.json", "result.json"))
    return RunFolder(path.resolve()) if is_run else None


def with_triage(summary: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Return a run's summary with what its events and its log tell of an end that was no success.

    `triage` is a record of `core.triage`, null where nothing failed; `last_stage` one of `core.laststage`, null for
    a success and where no step had begun.
    """
    reason = summary.get("end_reason")
    found = None if reason in UNTRIAGED else diagnose_run(folder).triage
    stage = None if reason == EndReason.SUCCEEDED.value else last_stage(view_of(folder))
    return {**summary, "triage": found.record() if found else None, "last_stage": stage.record() if stage else None}


def lost_summary(folder: RunFolder) -> dict[str, Any] | None:
    """Return the summary of a run that is lost, from what is held here; None where its plan or its record is not.

    The host writes none for it: nobody saw its end.
    """
    plan, run = folder.read("plan.json"), folder.read("run.json")
    if plan is None or run is None:
        return None
    document = build_lost_summary(RunPaths(str(folder.path)), plan, run)
    problem = lost_problem(folder.run_id, written=written_samples(document))
    return {**document, "problems": [*document["problems"], problem]}


def written_samples(summary: Mapping[str, Any] | None) -> int:
    """Return how many samples a summary says that its run wrote; 0 where it says nothing of samples."""
    samples = (summary or {}).get("samples")
    written = samples.get("written") if isinstance(samples, Mapping) else None
    return written if isinstance(written, int) else 0


def view_of(folder: RunFolder) -> RunView:
    """Return the state of a run that all events lead to which are held here."""
    return _view(sorted((folder.path / "events").glob(f"*{EVENTS_SUFFIX}")))


def problem_lines(folder: RunFolder) -> tuple[str, list[bytes]] | None:
    """Return the place of a run's problem, and the raw lines of its log from before the traceback to after it.

    None if the run has none that is known. Where the log does not show it there are no lines, and a sentence on the
    problem in place of its place.
    """
    found = diagnose_run(folder).triage
    if found is None:
        return None
    quote = next((each for each in found.evidence if each.line), None)
    if quote is None:
        what = f"{found.what}: {found.exception}" if found.exception else found.what
        return f"{what}; the log does not show it: `ctl summary {folder.run_id}` does", []
    # vLLM puts other processes' lines between those of a traceback, so some more are shown than it has.
    first = max(0, quote.line - 1 - found.traceback.count("\n") - LINES_AROUND)
    lines = (folder.path / quote.segment).read_bytes().splitlines(keepends=True)
    place = f"{folder.path / quote.segment}:{quote.line}: {found.what}"
    return place, lines[first : quote.line + LINES_AROUND]


def _view(paths: Sequence[Path]) -> RunView:
    """Reduce the events of all writers, by time: clocks of one host agree, and each writer's own order is kept."""
    events = [
        event for path in paths for event in map(parse_event, path.read_bytes().splitlines()) if event is not None
    ]
    view = RunView()
    for event in sorted(events, key=lambda event: event.t):
        view = reduce(view, event)
    return view


def _failures(view: RunView, lines: Sequence[PlacedLine]) -> tuple[FoldedFailure, ...]:
    """Return the exceptions of the events and, where those only tell of another process, what the log holds first.

    A process of vLLM that fails before the capture is in it, as its engine core does, reports no event.
    """
    if any(not is_told(each.first) for each in view.exceptions):
        return view.exceptions
    known = {each.first.cause for each in view.exceptions}
    logged = worker_tracebacks(placed.line for placed in lines)
    return (*(each for each in logged if each.first.cause not in known), *view.exceptions)


def _kernel_lines(view: RunView) -> list[PlacedLine]:
    """Return what the host's kernel said about the failure, as the supervisor picked it out by time."""
    return [
        PlacedLine(line=parse_line(notice.text), segment=f"events/{notice.writer}.jsonl", number=0)
        for notice in view.notices
        if notice.code == "kernel"
    ]


def _stream(files: Sequence[Path], prefix: str) -> list[PlacedLine]:
    """Return the lines of one stream cut into files; of a very long one its end, with the right numbers."""
    room = LOG_LIMIT
    segments: list[tuple[str, bytes]] = []
    first = 1
    for path in reversed(files):
        name = f"{prefix}{path.name}" if prefix else str(path)
        with open(path, "rb") as stream:
            before = max(0, os.fstat(stream.fileno()).st_size - room)
            passed = _line_ends(stream, before)
            data = stream.read(room)
        if before:
            cut = data.find(b"\n") + 1
            first = passed + (1 if cut else 0) + 1
            segments.append((name, data[cut:]))
            break
        segments.append((name, data))
        room -= len(data)
    return place_lines(reversed(segments), first)


def _line_ends(stream: BinaryIO, size: int) -> int:
    """Count the line feeds in the next `size` bytes, of which there may be more than there is memory."""
    count = 0
    while size > 0 and (block := stream.read(min(size, _BLOCK_BYTES))):
        count += block.count(b"\n")
        size -= len(block)
    return count

"""Bytes of a job's output to lines for the screen.

The raw bytes are mirrored elsewhere and are never changed; what happens here is for reading only. Control characters
stay in the text: the user interface cleans them, because only it knows where the text goes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from controller.core.tracebacks import Failure, FoldedFailure, collect, fold

LINE_CAP = 8 << 10
"""Bytes kept of a line. vLLM dumps its scheduler state on one line of any length; no screen shows more."""


class Level(StrEnum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line. `text` is the message alone; `raw` is the whole line as logged, without its line end.

    `source` is the process as vLLM names it ("" if the line has no prefix), `rank` its tensor-parallel rank,
    `place` the `file.py:LINE` that logged it. `progress` marks a progress bar, of which only the last state is
    left; `partial` a line whose end has not arrived yet.
    """

    raw: str
    text: str
    source: str = ""
    pid: int | None = None
    rank: int | None = None
    level: Level | None = None
    time: str = ""
    place: str = ""
    progress: bool = False
    partial: bool = False


_PROCESS = r"\((?P<source>[A-Za-z][\w.-]*)(?: rank=(?P<of>\d+))? pid=(?P<pid>\d+)\) ?"  # rank=: before 0.11
_RECORD = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d (?P<time>\d\d:\d\d:\d\d) \[(?P<place>[^\]\s]+)\] ?"
_PREFIX = re.compile(_PROCESS)
_VLLM = re.compile(_RECORD)
_INSERTED = re.compile(rf"(?:{_PROCESS})?{_RECORD}")
_GLOG = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:)?\[(?P<level>[IWEF])\d{4} (?P<time>\d\d:\d\d:\d\d)\S* (?P<place>[^\]]+)\]"
)
_PYTHON = re.compile(r"\d{4}-\d\d-\d\d (?P<time>\d\d:\d\d:\d\d)\S* - (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) - ")
_WARNINGS = re.compile(r"\S+:\d+: \w*Warning: ")
_RANK = re.compile(r"_TP(\d+)|^VllmWorker-(\d+)$")

_LEVELS = {
    **{level.value: level for level in Level},
    "CRITICAL": Level.ERROR,
    "I": Level.INFO,
    "W": Level.WARNING,
    "E": Level.ERROR,
    "F": Level.ERROR,
}


def parse_line(raw: str) -> LogLine:
    """Recognise the prefixes of vLLM, glog (torch), Python's logging and its warnings; never fails."""
    source, pid, rank, text = "", None, None, raw
    if prefix := _PREFIX.match(raw):
        source, pid, text = prefix["source"], int(prefix["pid"]), raw[prefix.end() :]
        rank = int(prefix["of"]) if prefix["of"] else rank_of(source)
    line = LogLine(raw=raw, text=text, source=source, pid=pid, rank=rank)
    if record := _VLLM.match(text):
        return replace(
            line,
            text=text[record.end() :],
            level=_LEVELS[record["level"]],
            time=record["time"],
            place=record["place"],
        )
    if record := _GLOG.match(text):
        return replace(
            line,
            rank=int(record["rank"]) if record["rank"] else rank,
            level=_LEVELS[record["level"]],
            time=record["time"],
            place=record["place"],
            text=text[record.end() :].lstrip(),
        )
    if record := _PYTHON.match(text):
        return replace(line, level=_LEVELS[record["level"]], time=record["time"], text=text[record.end() :])
    return replace(line, level=Level.WARNING) if _WARNINGS.match(text) else line


class LogFolder:
    """Splits a byte stream into lines and folds what a carriage return overwrote. Memory is bounded by LINE_CAP.

    The lines do not depend on how the bytes are cut into pieces.
    """

    def __init__(self) -> None:
        self._segment = bytearray()  # since the last line end or carriage return
        self._segment_size = 0
        self._shown: tuple[bytes, int] | None = None  # the last finished segment of this line and its full size
        self._prefix = b""
        self._overwritten = False

    def feed(self, data: bytes) -> list[LogLine]:
        """Take the next bytes and return the lines that they complete."""
        lines: list[LogLine] = []
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._take(piece)
            lines += self._finish()
        self._take(rest)
        return lines

    @property
    def partial(self) -> LogLine | None:
        """The line under way, for a progress bar that has no end yet; None if there is nothing to show."""
        shown = self._current()
        return replace(self._line(*shown), partial=True) if shown and shown[0].strip() else None

    def close(self) -> list[LogLine]:
        """Return the unfinished last line, if any."""
        return self._finish() if self._current() else []

    def _take(self, piece: bytes) -> None:
        """Add bytes without a line feed."""
        *finished, rest = piece.split(b"\r")
        for segment in finished:
            self._extend(segment)
            self._keep_segment()
        self._extend(rest)

    def _extend(self, data: bytes) -> None:
        self._segment += data[: max(0, LINE_CAP - len(self._segment))]
        self._segment_size += len(data)

    def _keep_segment(self) -> None:
        """A carriage return: what came before it stays on show until something is written over it."""
        segment = bytes(self._segment)
        if segment.strip():
            if self._shown is None:
                prefix = _PREFIX.match(segment[:256].decode(errors="replace"))
                self._prefix = segment[: len(prefix[0].encode())] if prefix else b""
            self._overwritten = self._overwritten or self._shown is not None
            self._shown = (segment, self._segment_size)
        elif self._shown is None:
            self._overwritten = True  # a bar that starts by returning to the line's start
        self._segment.clear()
        self._segment_size = 0

    def _current(self) -> tuple[bytes, int, bool] | None:
        """Return what is on show: (bytes, size before the cap, whether it wrote over something)."""
        segment = bytes(self._segment)
        if self._shown is None:
            return (segment, self._segment_size, self._overwritten) if segment else None
        if segment.strip():
            return segment, self._segment_size, True
        return *self._shown, self._overwritten

    def _finish(self) -> list[LogLine]:
        line = self._line(*(self._current() or (b"", 0, False)))
        self._segment.clear()
        self._segment_size = 0
        self._shown, self._prefix, self._overwritten = None, b"", False
        # A bar leaves the cursor on its line, and the next record of any process is written behind it.
        inserted = _INSERTED.search(line.text, 1) if line.progress else None
        if inserted is None:
            return [line]
        bar = line.text[: inserted.start()].rstrip()
        return [replace(line, raw=bar, text=bar), parse_line(line.text[inserted.start() :])]

    def _line(self, kept: bytes, size: int, overwritten: bool) -> LogLine:
        text, used = codecs.utf_8_decode(kept, "replace", size == len(kept))
        if size > len(kept):
            text += f"… +{size - used} bytes"
        prefix = self._prefix.decode(errors="replace")
        if overwritten and prefix and not text.startswith(prefix):
            text = prefix + text
        return replace(parse_line(text), progress=overwritten)


@dataclass(slots=True)
class _Record:
    """Consecutive lines of one process that belong together: a log record, or what it printed without a prefix."""

    key: tuple[object, ...]
    source: str
    rank: int | None
    multi_line: bool
    lines: list[str]
    announced: bool = False
    """Its source is from multiprocessing's announcement, which speaks of the one traceback that follows it."""


_DIED = re.compile(r"Process (\S+):\s*$")
_SOURCE = re.compile(r"\s+(?!File \")\S")
"""An indented line that is no frame: what `warnings` shows below a warning."""


def worker_tracebacks(lines: Iterable[LogLine]) -> tuple[FoldedFailure, ...]:
    """Pull the tracebacks out of a vLLM log, for a job that wrote no `exception` event.

    Lines are joined per process, so that interleaved ranks come apart. The first failing rank is first, equal
    tracebacks are folded, and those that vLLM logged as mere warnings are left out.
    """
    records: list[_Record] = []
    current: dict[tuple[str, int | None], _Record] = {}  # by process
    warned: set[tuple[str, int | None]] = set()  # processes whose last line was a warning of Python's own
    for line in lines:
        owner = (line.source, line.pid)
        if line.progress or line.level not in (None, Level.ERROR):
            if line.level is Level.WARNING and not line.place:
                warned.add(owner)
            continue
        if owner in warned:
            warned.discard(owner)
            if line.level is None and _SOURCE.match(line.text):
                continue  # the source line of the warning: behind a traceback it would pass for its message
        key = (line.level, line.time, line.place)
        record = current.get(owner)
        # multiprocessing announces an uncaught exception by the name of its process, often without our prefix
        died = _DIED.match(line.text)
        if died or record is None or record.key != key:
            source = line.source or (died[1] if died else "")
            rank = line.rank if line.source else rank_of(source)
            record = _Record(key=key, source=source, rank=rank, multi_line=line.level is not None, lines=[])
            record.announced = bool(died) and not line.source
            records.append(record)
            current[owner] = record
        record.lines.append(line.text.rstrip())
    failures: list[Failure] = []
    for record in records:
        found = collect(record.lines, record.source, record.rank, multi_line=record.multi_line)
        later = [replace(each, source="", rank=None) for each in found[1:]] if record.announced else found[1:]
        failures += [*found[:1], *later]
    return fold(failures)


_LONE = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): (?P<message>\S.*)")


def lone_exceptions(lines: Iterable[LogLine]) -> tuple[FoldedFailure, ...]:
    """Return the exceptions that processes of vLLM logged as an error in one line, the nearest the cause first.

    For a log of which the frames are missing; where there is a traceback its last line is among these, too.
    """
    failures = []
    for line in lines:
        found = _LONE.fullmatch(line.text.rstrip()) if line.source and line.level in (None, Level.ERROR) else None
        if found is not None:
            failures.append(
                Failure(
                    source=line.source, rank=line.rank, exc_type=found["type"], message=found["message"],
                    traceback=line.text.rstrip(),
                )
            )  # fmt: skip
    return fold(failures)


def rank_of(source: str) -> int | None:
    """Return the tensor-parallel rank in a process's name: 3 for `Worker_TP3` and `VllmWorker-3`."""
    found = _RANK.search(source)
    return int(found[1] or found[2]) if found else None

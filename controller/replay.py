"""Plays a recorded run folder through a view, at the times that things had then.

Events carry their time. The log has the times that the host's pump noted; a run of an earlier payload has none, and
there a line has the time in its own prefix, or that of the line before it.
"""

from __future__ import annotations

import calendar
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from controller.core.errors import UsageError
from controller.core.events import Event, parse_event
from controller.core.loglines import Place, TimeIndex
from controller.core.state import in_order
from controller.logreader import LogReader
from controller.runfolder import RunFolder

AFTER_END_S = 60.0
"""What was recorded later, such as an attach on the next day, is no part of how the run went."""

QUARTER_S = 900
"""Time zones differ by multiples of it; prefixes are in the host's."""

HALT_S = 0.1
"""Within this time a key that halts, goes on or leaves is obeyed."""

_STAMP = re.compile(rb"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) \[")
"""As in vLLM's prefix, `INFO 11-29 19:37:24 [core.py:114]`: no year and no time zone."""

_ENDS = re.compile(rb"[^\r\n]*[\r\n]|[^\r\n]+$")
"""Pieces of a log: a line, or a state of a progress bar."""

_STAMP_BYTES = 80
"""A stamp is looked for at the start of a line: the process's name and the level come before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event or lines of the log, and when it happened, in seconds since the epoch by its writer's clock."""

    t: float
    event: Event | None = None
    log: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A run as its folder holds it, in order."""

    run: str
    host: str
    moments: tuple[Moment, ...]

    @property
    def begin(self) -> float:
        return self.moments[0].t

    @property
    def seconds(self) -> float:
        """How long the run took."""
        return self.moments[-1].t - self.begin


class Sink(Protocol):
    def event(self, event: Event) -> None: ...

    def log(self, data: bytes) -> None: ...


class Player:
    """Hands out a recording and is the clock of the view that shows it.

    `speed` is how many recorded seconds pass in one; 0 does not wait at all. Not safe for threads but for `toggle`.
    """

    def __init__(self, recording: Recording, *, speed: float, at_s: float) -> None:
        self._recording = recording
        self._speed = speed
        self._target = recording.begin + at_s
        self._now = recording.begin
        self._since = time.monotonic()
        self._caught_up = False
        self.halted = False

    def now(self) -> float:
        """Return the recorded time of this moment, in seconds since the epoch; the end is never passed."""
        if self.halted or not self._caught_up:
            return self._now
        passed = self._now + (time.monotonic() - self._since) * self._speed
        return min(passed, max(self._now, self._recording.moments[-1].t))

    def toggle(self) -> None:
        """Halt, or go on."""
        self._now, self._since = self.now(), time.monotonic()
        self.halted = not self.halted

    def play(
        self,
        sink: Sink,
        *,
        left: Callable[[], bool],
        until: float = math.inf,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """Feed `sink` until the recording ends or comes to `until`, or `left` says that nobody watches any more."""
        for moment in self._recording.moments:
            if moment.t > until:
                break
            if not self._speed or moment.t <= self._target:
                self._now = moment.t
            elif not self._caught_up:
                self._start()
            while self._caught_up and moment.t > self.now():
                if left():
                    return
                wait(HALT_S if self.halted else min(HALT_S, max(0.001, (moment.t - self.now()) / self._speed)))
            if moment.event is not None:
                sink.event(moment.event)
            else:
                sink.log(moment.log)
        self._start()

    def _start(self) -> None:
        self._now = max(self._now, self._target)
        self._since = time.monotonic()
        self._caught_up = self._speed > 0


def load(folder: RunFolder) -> Recording:
    """Read a run folder. Raises UsageError if it holds no events."""
    events = [
        event
        for path in sorted((folder.path / "events").glob("*.jsonl"))
        for event in map(parse_event, path.read_bytes().splitlines())
        if event is not None
    ]
    if not events:
        raise UsageError(
            f"{folder.path} holds no events to replay",
            why="a run folder has events/*.jsonl",
            fix="name a run of `ctl-runs/`, or the path of a run folder",
            code="no-recording",
        )
    end = max((event.t for event in events if event.type == "end"), default=None)
    ordered = [(t, event) for t, event in in_order(events) if end is None or t <= end + AFTER_END_S]
    jobs = [t for t, event in ordered if event.type in ("step", "phase")]
    begin, last = (jobs or [ordered[0][0]])[0], ordered[-1][0]
    moments = [Moment(t=t, event=event) for t, event in ordered]
    # The end comes last: what the job printed is not shown after it, whatever its prefix says.
    moments += [Moment(t=min(t, end or last), log=data) for t, data in _log(folder, begin)]
    moments.sort(key=lambda each: (each.t, each.event is not None and each.event.type == "end"))
    first = ordered[0][1]
    return Recording(run=first.run, host=first.host, moments=tuple(moments))


def open_folder(find: Callable[[str | None], RunFolder], run: str | None) -> RunFolder:
    """Return the folder of a run id, or of the path of a recorded folder. Raises UsageError."""
    path = Path(run) if run else None
    if path is not None and (path / "events").is_dir():
        return RunFolder(path.resolve())
    return find(run)


def parse_at(text: str, seconds: float) -> float:
    """Return a place in a recording of `seconds`, written as `90`, `90s`, `12m`, `1h`, `40%`, or `end`.

    Raises UsageError.
    """
    if text == "end":
        return seconds
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|%)?", text)
    if found is None or (found[2] == "%" and float(found[1]) > 100):
        raise UsageError(f"--at {text!r} is no place in a run", fix="write for example 90s, 12m, 1h, 40% or end")
    scale = {"m": 60.0, "h": 3600.0, "%": seconds / 100}.get(found[2] or "s", 1.0)
    return min(seconds, float(found[1]) * scale)


def _log(folder: RunFolder, begin: float) -> Iterator[tuple[float, bytes]]:
    """Yield the log with its times, what came at one time together; `begin` is when the job began."""
    reader = LogReader(folder)
    times = reader.times()
    placed = _noted(reader, times, begin) if times else _stamped(reader, begin)
    for t, pieces in groupby(placed, key=lambda each: each[0]):
        yield t, b"".join(data for _, data in pieces)


def _noted(reader: LogReader, times: TimeIndex, begin: float) -> Iterator[tuple[float, bytes]]:
    """Yield pieces with the times that the host's pump noted."""
    t = begin
    for place, data in reader.pieces():
        offset = 0
        for piece in _ENDS.findall(data):
            noted = None if place is None else times.at((place[0], place[1] + offset))
            t = max(t, noted or t)
            offset += len(piece)
            yield t, piece


def _stamped(reader: LogReader, begin: float) -> Iterator[tuple[float, bytes]]:
    """Yield pieces with the times of their prefixes.

    The states of a progress bar have none: they are spread over the time until the next line that has one.
    """
    zone_s: float | None = None
    t, bars = begin, list[bytes]()
    for piece in (piece for _, line in _whole_lines(reader) for piece in _ENDS.findall(line)):
        stamp = _STAMP.search(piece, 0, _STAMP_BYTES)
        at = _seconds(stamp, begin) if stamp is not None else None
        if at is None:
            if piece.endswith(b"\r") or bars:
                bars.append(piece)
            else:
                yield t, piece
            continue
        if zone_s is None:
            zone_s = round((at - begin) / QUARTER_S) * QUARTER_S
        until = max(t, at - zone_s)
        for index, bar in enumerate(bars):
            yield t + (until - t) * index / len(bars), bar
        t, bars = until, []
        yield t, piece
    for bar in bars:
        yield t, bar


def _whole_lines(reader: LogReader) -> Iterator[tuple[Place | None, bytes]]:
    yield from reader.lines()
    yield from reader.unfinished()


def _seconds(stamp: re.Match[bytes], begin: float) -> float | None:
    """Return a stamp as if it were in UTC, in the year that brings it nearest to `begin`."""
    month, day, hour, minute, second = map(int, stamp.groups())
    year = time.gmtime(begin).tm_year
    try:
        times = [calendar.timegm((each, month, day, hour, minute, second)) for each in (year - 1, year, year + 1)]
    except ValueError:
        return None  # no date: something of the job's own that looks like one
    return min(times, key=lambda each: abs(each - begin))

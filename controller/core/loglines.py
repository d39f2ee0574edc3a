"""Which lines of a job's log are wanted, and when each was printed.

The host's log pump notes at most once a second where the log stood (`log/times.jsonl`), so a time is right to a
second, by the host's clock, whatever the job prints itself.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from controller.core.errors import UsageError
from controller.core.logs import LogLine, parse_line
from controller.core.values import parse_seconds

Place = tuple[int, int]
"""A byte of the log: number of its segment, offset in it. Places sort as the bytes came."""


class TimeIndex:
    """When the bytes of a log were printed; made from the lines of times.jsonl, each {"t", "segment", "offset"}."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._places: list[Place] = []
        self._times: list[float] = []
        for line in lines:
            try:
                record = json.loads(line)
                place, t = (int(record["segment"]), int(record["offset"])), float(record["t"])
            except (ValueError, KeyError, TypeError):
                continue  # cut off: its writer was killed, or it is still under way
            if not self._places or place >= self._places[-1]:
                self._places.append(place)
                self._times.append(t)

    def __bool__(self) -> bool:
        return bool(self._places)

    def at(self, place: Place) -> float | None:
        """Return the time, in seconds since the epoch, of the byte at `place`; None where none was noted before."""
        index = bisect.bisect_right(self._places, place) - 1
        return self._times[index] if index >= 0 else None

    def parts(self, place: Place, data: bytes) -> Iterator[tuple[float | None, bytes]]:
        """Yield bytes of one segment that begin at `place` with their times, cut where one was noted."""
        segment, begin = place
        first, behind = (bisect.bisect_right(self._places, (segment, begin + each)) for each in (0, len(data) - 1))
        cuts = [begin, *(offset for _, offset in self._places[first:behind]), begin + len(data)]
        for start, end in pairwise(cuts):
            yield self.at((segment, start)), data[start - begin : end - begin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What `ctl logs` prints. Times are in seconds since the epoch; None selects everything."""

    since: float | None = None
    until: float | None = None
    rank: int | None = None
    search: re.Pattern[str] | None = None
    timestamps: bool = False
    prefix: bool = False

    @property
    def needs_times(self) -> bool:
        return self.timestamps or self.since is not None or self.until is not None

    @property
    def is_plain(self) -> bool:
        """Whether the log is wanted as it is, byte for byte."""
        return self == Selection()

    def shown(self, raw: bytes, t: float | None) -> bytes | None:
        """Return a line (with its end, if it has one) as it is to be printed, None if it is not wanted."""
        if self.since is not None and (t is None or t < self.since):
            return None
        if self.until is not None and (t is None or t > self.until):
            return None
        text = raw.decode(errors="replace")
        line = parse_line(text) if self.rank is not None or self.prefix else None
        if self.rank is not None and (line is None or line.rank != self.rank):
            return None
        if self.search is not None and not self.search.search(text):
            return None
        return b"".join([*self._before(t, line), raw])

    def _before(self, t: float | None, line: LogLine | None) -> Iterator[bytes]:
        if self.timestamps:
            stamp = "-" if t is None else datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            yield f"{stamp:<20} ".encode()
        if self.prefix and line is not None:
            yield f"[{line.source or 'job'}] ".encode()


def parse_span(text: str, now: float) -> float:
    """Return the moment that `text` (`5m`, `1h30m`) ago was. Raises UsageError."""
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"`{text}` is not a duration", fix="write text like 90s, 5m, 1h30m") from error
    if not isinstance(seconds, float):
        raise UsageError(f"`{text}` is not a duration", fix="write text like 90s, 5m, 1h30m")
    return now - seconds


def parse_moment(text: str) -> float:
    """Return seconds since the epoch of an ISO 8601 time, local where it names no zone. Raises UsageError."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UsageError(f"`{text}` is not a time", fix="write for example 2026-11-29T21:45:00Z") from error


def parse_pattern(text: str) -> re.Pattern[str]:
    """Return a regular expression; without a capital letter in it, case does not count. Raises UsageError."""
    try:
        return re.compile(text, 0 if text != text.lower() else re.IGNORECASE)
    except re.error as error:
        raise UsageError(
            f"`{text}` is not a regular expression", why=str(error), fix=f"try `--search '{re.escape(text)}'`"
        ) from error

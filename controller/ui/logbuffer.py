"""The end of a job's log as a screen needs it: bounded, and parsed only where it is shown.

A job may print 10,000 lines a second, of which a screen shows fifty, four times. So lines are kept as the bytes that
came, and turned into `LogLine`s on their way to a frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from controller.core.logs import LINE_CAP, LogFolder, LogLine, parse_line

LINES_KEPT = 20_000
"""Two seconds of the worst log, and hours of an ordinary one; the whole log is in the run folder."""

BYTES_KEPT = 8 << 20
"""For logs of long lines."""

_RANK = re.compile(rb"Worker(?:_TP|-| rank=)(\d+)")
"""As in vLLM's prefixes: `(Worker_TP3 pid=...)`, `(VllmWorker-3 pid=...)`, `(VllmWorker rank=3 pid=...)`."""

_PREFIX_BYTES = 40
"""A rank is looked for at the start of a line: its text may quote other ranks."""

_SHARDS = re.compile(rb"checkpoint shards:[^\r\n]*?\|\s*(\d+)/(\d+)")
"""vLLM's bar: `Loading safetensors checkpoint shards:  40% Completed | 25/62 [...]`; tqdm may draw a bar between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """What a frame shows of a log: the lines, how many kept ones follow them, and how many there were in all."""

    lines: tuple[LogLine, ...] = ()
    below: int = 0
    total: int = 0


class LogBuffer:
    """Takes the bytes of a log and hands out pages. Not safe for threads: its owner has the lock."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._dropped = 0
        self._rest = b""
        self.signs: dict[int, float] = {}
        """When each rank last wrote, by the clock of whoever feeds."""
        self.shards: tuple[int, int] | None = None
        """Checkpoint shards loaded and their total, from the latest bar."""

    @property
    def total(self) -> int:
        """Complete lines so far, with those that are no longer kept."""
        return self._dropped + len(self._lines)

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes, which came at `now` (seconds since the epoch)."""
        if under_way := _RANK.search(self._rest, 0, _PREFIX_BYTES):
            self.signs[int(under_way[1])] = now  # a progress bar has its prefix only at its beginning
        if b"Worker" in data:
            self.signs.update((int(rank), now) for rank in set(_RANK.findall(data)))
        if (at := data.rfind(b"checkpoint shards:")) >= 0 and (bar := _SHARDS.search(data, at)):
            self.shards = int(bar[1]), int(bar[2])
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = _short(rest)
        kept = [piece if len(piece) <= LINE_CAP else _short(piece) for piece in whole]
        self._lines += kept
        self._size += sum(map(len, kept))
        if len(self._lines) > 2 * LINES_KEPT or self._size > 2 * BYTES_KEPT:
            self._trim()

    def page(
        self, count: int, *, end: int | None = None, skip: int = 0, needle: str = "", rank: int | None = None
    ) -> LogPage:
        """Return up to `count` matching lines: the last ones before line number `end`, less `skip` of them.

        `needle` is looked for in the raw line, whatever its case; `rank` takes the lines of one worker. Without
        `end` the unfinished line counts as well.
        """
        found: list[LogLine] = []
        passed = 0
        if end is None and self._rest and _matches(self._rest, needle.encode().lower(), rank) and not skip:
            folder = LogFolder()
            folder.feed(self._rest)
            found += [folder.partial] if folder.partial else []
        for raw in self._backwards(end, needle.encode().lower(), rank):
            passed += 1
            if passed <= skip:
                continue
            found += reversed(_parse(raw))
            if len(found) >= count:
                break
        return LogPage(
            lines=tuple(reversed(found[:count])),
            below=max(0, self.total - (self.total if end is None else end)) + min(skip, passed),
            total=self.total,
        )

    def _backwards(self, end: int | None, needle: bytes, rank: int | None) -> Iterator[bytes]:
        stop = len(self._lines) if end is None else min(len(self._lines), max(0, end - self._dropped))
        for index in range(stop - 1, -1, -1):
            raw = self._lines[index]
            if _matches(raw, needle, rank):
                yield raw

    def _trim(self) -> None:
        """Give up the older half, so that the cost of it is spread over as many lines."""
        while len(self._lines) > LINES_KEPT or self._size > BYTES_KEPT:
            half = max(1, len(self._lines) // 2)
            self._size -= sum(map(len, self._lines[:half]))
            del self._lines[:half]
            self._dropped += half


def _matches(raw: bytes, needle: bytes, rank: int | None) -> bool:
    if rank is not None:
        found = _RANK.search(raw, 0, _PREFIX_BYTES)
        if found is None or int(found[1]) != rank:
            return False
    return not needle or needle in raw.lower()


def _parse(raw: bytes) -> list[LogLine]:
    if b"\r" in raw:
        return LogFolder().feed(raw + b"\n")
    if len(raw) > LINE_CAP:
        raw = raw[:LINE_CAP]
    return [parse_line(raw.decode(errors="replace"))]


def _short(piece: bytes) -> bytes:
    """Bound one line. Of a bar that overwrites itself, its beginning (with the prefix) and its last states count."""
    if len(piece) <= LINE_CAP:
        return piece
    first, *states = piece.split(b"\r")
    if not states:
        return piece[:LINE_CAP]
    return b"\r".join([first[:LINE_CAP], *(state[:LINE_CAP] for state in states[-2:])])

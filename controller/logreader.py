"""Reads a run's log from its local copy, from the beginning on, as it grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from controller.core.loglines import Place, TimeIndex
from controller.runfolder import RunFolder
from remote_payload.host.layout import LOG_TIMES

BLOCK_BYTES = 1 << 20

LONGEST_LINE_BYTES = 1 << 24
"""16 MiB. A job may print for hours without a line feed (a progress bar, binary data), and the whole log would be one
line in memory."""


class LogReader:
    """One reader's place in a log. What was read once is not read again."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._segment, self._offset = 0, 0
        self._told: set[int] = set()
        self._rest = b""
        self._rest_place: Place | None = None

    def sizes(self) -> dict[int, int]:
        """Return the bytes held of each segment."""
        paths = (self._folder.path / "log").glob("*.log")
        return {int(path.stem): path.stat().st_size for path in paths}

    def pieces(self, upto: Mapping[int, int] | None = None) -> Iterator[tuple[Place | None, bytes]]:
        """Yield what is new, in blocks, with the place of each; None is that of a line about missing bytes.

        `upto` bounds it to what `sizes` said at some time.
        """
        mirror = self._folder.mirror
        limits = self.sizes() if upto is None else upto
        gaps = mirror.gaps()
        for number in sorted(limits.keys() | gaps.keys()):
            if number >= self._segment:
                yield from self._segment_pieces(number, limits.get(number, 0))
            if number in gaps and number not in self._told and (line := mirror.gap_line(gaps[number])):
                self._told.add(number)
                yield None, line

    def lines(self, upto: Mapping[int, int] | None = None) -> Iterator[tuple[Place | None, bytes]]:
        """Yield the lines that are complete, with their ends and places; the unfinished one waits for its end.

        Of a line that grows longer than LONGEST_LINE_BYTES, what there is of it passes for one.
        """
        for place, data in self.pieces(upto):
            if place is None:
                yield from self.unfinished()
                yield None, data
                continue
            segment, offset = place
            for line in _split(data):
                if self._rest_place is None:
                    self._rest_place = (segment, offset)
                self._rest += line
                offset += len(line)
                if line.endswith(b"\n") or len(self._rest) > LONGEST_LINE_BYTES:
                    yield from self.unfinished()

    def unfinished(self) -> Iterator[tuple[Place | None, bytes]]:
        """Yield the line that has no end yet, if there is one: for the end of the log."""
        if self._rest:
            yield self._rest_place, self._rest
        self._rest, self._rest_place = b"", None

    def times(self) -> TimeIndex:
        """Return when which part of the log was printed, as far as it is known here."""
        path = self._folder.path / "log" / LOG_TIMES
        return TimeIndex(path.read_bytes().splitlines() if path.is_file() else ())

    def _segment_pieces(self, number: int, size: int) -> Iterator[tuple[Place, bytes]]:
        if number > self._segment:
            self._segment, self._offset = number, 0
        if size <= self._offset:
            return
        with open(self._folder.path / "log" / f"{number:06d}.log", "rb") as stream:
            stream.seek(self._offset)
            while self._offset < size and (data := stream.read(min(BLOCK_BYTES, size - self._offset))):
                place = (number, self._offset)
                self._offset += len(data)
                yield place, data


def _split(data: bytes) -> list[bytes]:
    """Split at line feeds alone: a carriage return is part of a progress bar's line."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    return [*lines[:-1], lines[-1][:-1]] if lines[-1] != b"\n" else lines[:-1]

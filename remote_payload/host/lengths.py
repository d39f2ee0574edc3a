"""How many tokens a data set holds: all of it where it is small, else an estimate with its error.

A line is drawn by a random place in the file, so long lines come in proportion to their length. The mean of tokens
per byte over such lines, times the bytes, is then an unbiased estimate of all tokens, also of a file that is sorted
by length (Hansen and Hurwitz, 1943: sampling with probability proportional to size).
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from typing import IO, Any, Callable, Dict, List, NamedTuple, Optional

Count = Callable[[bytes], List[int]]
"""Returns the tokens of each sample that a line gives; [] for a line that gives none."""

DRAWS = 600
"""An error of a few per cent where lengths spread over a factor of ten."""

SEED = 5
"""The same file gives the same estimate."""

CONFIDENCE = 1.96
"""Standard errors on each side that hold 95 % of a normal distribution."""

LINE_LIMIT = 64 << 20
STEP = 1 << 16


class Lengths(NamedTuple):
    """`tokens` and `samples` of the lines in question; `error`: half of the 95 % interval in tokens, 0 if exact."""

    samples: int
    tokens: int
    error: int
    looked_at: int  # lines
    longest: int  # tokens of the longest sample that was seen
    how: str  # "all", "sampled", "first" (records of a store that only reads in order) or "bound" (by its bytes)

    def to_dict(self) -> Dict[str, Any]:
        return self._asdict()


def measure(
    path: str, count: Count, *, max_samples: Optional[int], whole_below: int, seconds: float
) -> Optional[Lengths]:
    """Measure the first `max_samples` lines (None: all) of a file of lines.

    All of them if they take fewer than `whole_below` bytes, else DRAWS or as many as `seconds` allow. None if not one
    could be read in that time. Raises OSError.
    """
    deadline = time.monotonic() + seconds
    with open(path, "rb") as file:
        end, known = _end_of_lines(file, max_samples, os.path.getsize(path))
        if end <= whole_below:
            found = _measure_all(file, count, max_samples, end, deadline)
            if found is not None:
                return found
        sampled = _measure_some(file, count, end, deadline)
    if sampled is None or max_samples is None or known:
        return sampled
    # Where the first lines end is not known, so the mean of the whole file stands for them.
    share = min(1.0, max_samples / sampled.samples) if sampled.samples else 1.0
    return sampled._replace(
        samples=round(sampled.samples * share),
        tokens=round(sampled.tokens * share),
        error=round(sampled.error * share),
    )


def count_ids(max_seq_len: int, over_long: str) -> Count:
    """Return the Count of records with `input_ids`, cut or skipped as the job does."""

    def count(line: bytes) -> List[int]:
        try:
            record = json.loads(line)
        except ValueError:
            return []
        ids = record.get("input_ids") if isinstance(record, dict) else None
        length = len(ids) if isinstance(ids, list) else 0
        if not length or (length > max_seq_len and over_long == "skip"):
            return []
        return [min(length, max_seq_len)]

    return count


COUNTED = 1 << 28
"""256 MiB: the first lines are looked for up to here; counting on would take longer than the rest of the probe."""


def _end_of_lines(file: IO[bytes], lines: Optional[int], size: int) -> "tuple[int, bool]":
    """Return the place after so many lines, and whether it was found; else the file's size."""
    if lines is None:
        return size, True
    file.seek(0)
    place = 0
    while place < COUNTED:
        block = file.read(1 << 20)
        if not block:
            return size, True
        found = block.count(b"\n")
        if found >= lines:
            at = -1
            for _ in range(lines):
                at = block.index(b"\n", at + 1)
            return place + at + 1, True
        lines -= found
        place += len(block)
    return size, False


def _measure_all(
    file: IO[bytes], count: Count, max_samples: Optional[int], end: int, deadline: float
) -> Optional[Lengths]:
    file.seek(0)
    lengths: List[int] = []
    looked = 0
    while file.tell() < end or (max_samples is not None and len(lengths) < max_samples):
        line = file.readline(LINE_LIMIT)
        if not line:
            break
        if time.monotonic() > deadline:
            return None
        looked += 1
        lengths += count(line) if line.strip() else []
    lengths = lengths[:max_samples]
    return Lengths(len(lengths), sum(lengths), 0, looked, max(lengths, default=0), "all")


def _measure_some(file: IO[bytes], count: Count, end: int, deadline: float) -> Optional[Lengths]:
    generator = random.Random(SEED)  # noqa: S311 - a sample, not a secret
    per_byte: List[float] = []
    samples_per_byte: List[float] = []
    longest = 0
    while len(per_byte) < DRAWS and (time.monotonic() < deadline or not per_byte):
        line = _line_at(file, generator.randrange(end))
        lengths = count(line)
        longest = max([longest, *lengths])
        per_byte.append(sum(lengths) / len(line))
        samples_per_byte.append(len(lengths) / len(line))
    if len(per_byte) < 2:
        return None
    mean = sum(per_byte) / len(per_byte)
    variance = sum((value - mean) ** 2 for value in per_byte) / (len(per_byte) - 1)
    return Lengths(
        samples=round(end * sum(samples_per_byte) / len(samples_per_byte)),
        tokens=round(end * mean),
        error=math.ceil(end * CONFIDENCE * math.sqrt(variance / len(per_byte))),
        looked_at=len(per_byte),
        longest=longest,
        how="sampled",
    )


def _line_at(file: IO[bytes], place: int) -> bytes:
    """Return the whole line, its end included, that holds the byte at `place`."""
    start = place
    while start > 0:
        step = min(STEP, start)
        file.seek(start - step)
        at = file.read(step).rfind(b"\n")
        if at >= 0:
            start = start - step + at + 1
            break
        start -= step
        if place - start > LINE_LIMIT:
            break
    file.seek(start)
    return file.readline(LINE_LIMIT) or b"\n"

"""What a run's ledger comes to: the values behind the charts of its samples, in a report or on a terminal.

Pure and bounded: however many samples there are, a chart gets at most as many points as it can show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controller.core.ledger import Fate, LedgerLine

WORST = (Fate.MISSING, Fate.FAILED, Fate.SKIPPED, Fate.WRITTEN)
"""A cell that stands for several samples shows the first of these that any of them met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What became of every sample, by index. A cell stands for `per_cell` samples and shows the worst of them."""

    counts: Mapping[Fate, int]
    cells: tuple[Fate, ...]
    per_cell: int


def manifest(
    lines: Mapping[int, LedgerLine], indexes: range, bad: Iterable[int] = (), *, most: int = 1500
) -> Manifest:
    """Return the fate of each of `indexes` in at most `most` cells.

    `bad` are samples whose files were found to be wrong afterwards, whatever the ledger says of them.
    """
    wrong = set(bad)
    fates = [_fate(lines.get(index), index in wrong) for index in indexes]
    per_cell = max(1, -(-len(fates) // most))
    cells = []
    for start in range(0, len(fates), per_cell):
        seen = set(fates[start : start + per_cell])
        cells.append(next(fate for fate in WORST if fate in seen))
    counts = Counter(fates)
    return Manifest(counts={fate: counts[fate] for fate in Fate}, cells=tuple(cells), per_cell=per_cell)


def _fate(line: LedgerLine | None, wrong: bool) -> Fate:
    if line is None:
        return Fate.MISSING
    return Fate.FAILED if wrong and line.fate is Fate.WRITTEN else line.fate


@dataclass(frozen=True, slots=True, kw_only=True)
class NormMap:
    """Mean L2 norm by state and bucket of consecutive samples, weighted by tokens.

    `rows[state][bucket]` is a norm, NaN where a sample of the bucket holds a NaN or an infinite value, None where
    the bucket holds no such state. `first[bucket]` is its first sample's index.
    """

    boundaries: tuple[int, ...]
    first: tuple[int, ...]
    last: int
    rows: tuple[tuple[float | None, ...], ...]

    @property
    def finite(self) -> list[float]:
        return [value for row in self.rows for value in row if value is not None and math.isfinite(value)]

    @property
    def broken(self) -> int:
        """Cells that hold a value that is not finite."""
        return sum(value is not None and not math.isfinite(value) for row in self.rows for value in row)


def norm_map(lines: Iterable[LedgerLine], *, most: int = 120) -> NormMap | None:
    """Return the norms of all written samples in at most `most` buckets, None if there are none."""
    written = sorted((line for line in lines if line.states), key=lambda line: line.index)
    if not written:
        return None
    boundaries = sorted({state.boundary for line in written for state in line.states})
    place = {boundary: row for row, boundary in enumerate(boundaries)}
    size = -(-len(written) // most)
    buckets = [written[start : start + size] for start in range(0, len(written), size)]
    rows: list[list[float | None]] = [[None] * len(buckets) for _ in boundaries]
    for column, bucket in enumerate(buckets):
        totals = [[0.0, 0.0] for _ in boundaries]  # tokens, norm * tokens
        broken = set()
        for line in bucket:
            for state in line.states:
                row = place[state.boundary]
                if state.nan or state.inf:
                    broken.add(row)
                if state.norm is not None:
                    totals[row][0] += line.tokens
                    totals[row][1] += state.norm * line.tokens
        for row, (tokens, total) in enumerate(totals):
            if row in broken:
                rows[row][column] = math.nan
            elif tokens:
                rows[row][column] = total / tokens
    return NormMap(
        boundaries=tuple(boundaries),
        first=tuple(bucket[0].index for bucket in buckets),
        last=written[-1].index,
        rows=tuple(map(tuple, rows)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Samples by their number of tokens: bin i holds those of `[i * width, (i + 1) * width)` tokens."""

    width: int
    counts: tuple[int, ...]
    limit: int | None
    """max_seq_len: where longer samples were cut or skipped; None if it is not known."""
    truncated: int

    @property
    def samples(self) -> int:
        return sum(self.counts)


def lengths(lines: Iterable[LedgerLine], limit: int | None, truncated: int, *, most: int = 60) -> Lengths | None:
    """Return a histogram of at most `most` bins of a round width, up to the longest sample; None without samples.

    The bins do not reach to `limit`: where it is far off, all samples would fall into one bin.
    """
    tokens = [line.tokens for line in lines if line.fate is Fate.WRITTEN]
    if not tokens:
        return None
    width = _round_up(-(-(max(tokens) + 1) // most))
    counts = Counter(count // width for count in tokens)
    bins = tuple(counts[number] for number in range(max(counts) + 1))
    return Lengths(width=width, counts=bins, limit=limit, truncated=truncated)


def _round_up(value: int) -> int:
    """Return the next of 1, 2, 4, 5, 8, 10, 20, ...: a width that a person can count in."""
    scale = 1
    while True:
        for step in (1, 2, 4, 5, 8):
            if step * scale >= value:
                return step * scale
        scale *= 10

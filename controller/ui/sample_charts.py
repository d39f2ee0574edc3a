"""The norm map and the histogram of lengths on a terminal; a report draws the same values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from controller.core.figures import Lengths, NormMap
from controller.ui.charts import bar, level
from controller.ui.clean import Encodable
from controller.ui.formats import count_text, plural
from controller.ui.glyphs import UNICODE, glyphs_for

LABEL = 12
"""Cells of the column that names a row; as wide as the summary's own."""

MAP_CELLS = 60
BAR_CELLS = 40
RANGE_CELLS = 26
"""Kept for the lowest and the highest norm behind a row; a narrow terminal has the map alone."""

MAP_LEAST = 16
BINS = 12
"""Rows of the histogram at most."""

NOT_FINITE = "X"
"""In place of a norm; told by its letter as well as its colour."""


def map_cells(width: int) -> int:
    """Return how many cells a row of the norm map may have on a terminal of `width` cells."""
    room = width - LABEL - RANGE_CELLS
    return min(MAP_CELLS, room) if room >= MAP_LEAST else max(1, min(MAP_CELLS, width - LABEL))


def print_sample_charts(console: Console, norms: NormMap | None, lengths: Lengths | None) -> None:
    """Print what is there of both, under a run's summary; `norms` has at most `map_cells` of the console."""
    width = console.width
    plain = glyphs_for(console.encoding) is not UNICODE
    if norms is not None:
        console.print(Encodable(Group(Text(""), norm_rows(norms, width, plain=plain))))
    if lengths is not None:
        console.print(Encodable(Group(Text(""), length_rows(lengths, width, plain=plain))))


def norm_rows(figures: NormMap, width: int, *, plain: bool = False) -> RenderableType:
    """Return a row for each state, a cell for each bucket of samples, height by the logarithm of its mean norm."""
    known = [value for value in figures.finite if value > 0]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    words = "by boundary, samples from left to right"
    words = words if LABEL + len(words) <= width else "by boundary"
    rows = [Text.assemble((f"  {'norms':<{LABEL - 2}}", "dim"), (words, "dim"))]
    for boundary, values in sorted(zip(figures.boundaries, figures.rows, strict=True), reverse=True):
        row = Text(f"{boundary:>{LABEL - 2}}  ")
        for value in values:
            row.append_text(_cell(value, low, high, plain))
        finite = [value for value in values if value is not None and math.isfinite(value)]
        ends = "  " + (f"{min(finite):.3g} to {max(finite):.3g}" if finite else "no finite norm")
        if row.cell_len + len(ends) <= width:
            row.append(ends, style="dim")
        rows.append(row)
    per = f"samples 0 to {count_text(figures.last)} in {plural(len(figures.first), 'cell')}"
    scale = f"log scale {low:.3g} to {high:.3g}, {per}" if known else per
    notes = [Text(scale, style="dim")]
    if figures.broken:
        notes.append(Text.assemble((NOT_FINITE, "bold magenta"), (" holds NaN or infinite values", "dim")))
    return Group(*rows, *(Padding(note, (0, 0, 0, LABEL)) for note in notes))


def length_rows(figures: Lengths, width: int, *, plain: bool = False) -> RenderableType:
    """Return a row for each range of lengths, and a line where `max_seq_len` cuts.

    Ranges side by side that no sample falls into are one row; before the shortest sample there is none.
    """
    rows = [Text.assemble((f"  {'lengths':<{LABEL - 2}}", "dim"), ("samples by their tokens", "dim"))]
    most = max(figures.counts)
    highest = count_text(len(figures.counts) * figures.width)
    labels = max(LABEL, 2 * len(highest) + 2)
    cells = max(1, min(BAR_CELLS, width - labels - len(count_text(most)) - 1))
    drawn = False
    for numbers in _ranges(figures.counts):
        first, count = numbers[0] * figures.width, figures.counts[numbers[0]]
        if figures.limit is not None and not drawn and figures.limit < first:
            rows.append(_limit_row(figures, width, plain))
            drawn = True
        last = (numbers[-1] + 1) * figures.width - 1
        label = count_text(first) if first == last else f"{count_text(first)}-{count_text(last)}"
        filled, _ = bar(count / most, cells, ascii_only=plain)
        rows.append(
            Text.assemble(f"{label:>{LABEL - 1}} ", (filled, "cyan"), f" {count_text(count)}" if count else "")
        )
    if figures.limit is not None and not drawn:
        rows.append(_limit_row(figures, width, plain))
    return Group(*rows)


def _ranges(counts: Sequence[int]) -> list[range]:
    """Return the numbers of the bins that share a row: each of those with samples, and the empty ones between two."""
    rows = []
    for filled, numbers in groupby(range(len(counts)), key=lambda number: counts[number] > 0):
        run = list(numbers)
        if filled:
            rows += [range(number, number + 1) for number in run]
        elif rows:
            rows.append(range(run[0], run[-1] + 1))
    return rows


def _limit_row(figures: Lengths, width: int, plain: bool) -> Text:
    words = f"max_seq_len {count_text(figures.limit)}, {plural(figures.truncated, 'sample')} cut"
    rule = ("-" if plain else "╌") * min(6, max(0, (width - LABEL - len(words) - 2) // 2))
    if LABEL + len(words) > width:
        words = f"max_seq_len {count_text(figures.limit)}"
    return Text.assemble(" " * LABEL, (f"{rule} {words} {rule}".strip(), "yellow"))


def _cell(value: float | None, low: float, high: float, plain: bool) -> Text:
    if value is None:
        return Text(" ")
    if not math.isfinite(value):
        return Text(NOT_FINITE, style="bold magenta")
    share = 0.0 if value <= low or high <= low else math.log(value / low) / math.log(high / low)
    return Text(level(100 * share, ascii_only=plain), style="cyan")

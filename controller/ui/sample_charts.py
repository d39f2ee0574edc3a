"""The norm map and the histogram of lengths on a terminal; a report draws the same values."""

from __future__ import annotations

import math

from rich.console import Console, Group, RenderableType
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
BINS = 12
"""Rows of the histogram at most."""

NOT_FINITE = "X"
"""In place of a norm; told by its letter as well as its colour."""


def print_sample_charts(console: Console, norms: NormMap | None, lengths: Lengths | None) -> None:
    """Print what is there of both, under a run's summary."""
    plain = glyphs_for(console.encoding) is not UNICODE
    if norms is not None:
        console.print(Encodable(Group(Text(""), norm_rows(norms, plain=plain))))
    if lengths is not None:
        console.print(Encodable(Group(Text(""), length_rows(lengths, plain=plain))))


def norm_rows(figures: NormMap, *, plain: bool = False) -> RenderableType:
    """Return a row for each state, a cell for each bucket of samples, height by the logarithm of its mean norm."""
    known = [value for value in figures.finite if value > 0]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    rows = [Text.assemble((f"  {'norms':<{LABEL - 2}}", "dim"), ("by boundary, samples from left to right", "dim"))]
    for boundary, values in sorted(zip(figures.boundaries, figures.rows, strict=True), reverse=True):
        row = Text(f"{boundary:>{LABEL - 2}}  ")
        for value in values:
            row.append_text(_cell(value, low, high, plain))
        finite = [value for value in values if value is not None and math.isfinite(value)]
        row.append("  " + (f"{min(finite):.3g} to {max(finite):.3g}" if finite else "no finite norm"), style="dim")
        rows.append(row)
    per = f"samples 0 to {count_text(figures.last)} in {plural(len(figures.first), 'cell')}"
    scale = f"log scale {low:.3g} to {high:.3g}, {per}" if known else per
    rows.append(Text(" " * LABEL + scale, style="dim"))
    if figures.broken:
        rows.append(
            Text.assemble(" " * LABEL, (NOT_FINITE, "bold magenta"), (" holds NaN or infinite values", "dim"))
        )
    return Group(*rows)


def length_rows(figures: Lengths, *, plain: bool = False) -> RenderableType:
    """Return a row for each range of lengths, and a line where `max_seq_len` cuts."""
    rows = [Text.assemble((f"  {'lengths':<{LABEL - 2}}", "dim"), ("samples by their tokens", "dim"))]
    most = max(figures.counts)
    drawn = False
    for number, count in enumerate(figures.counts):
        first = number * figures.width
        if figures.limit is not None and not drawn and figures.limit < first:
            rows.append(_limit_row(figures, plain))
            drawn = True
        label = f"{count_text(first)}-{count_text(first + figures.width - 1)}"
        filled, _ = bar(count / most, BAR_CELLS, ascii_only=plain)
        rows.append(
            Text.assemble(f"{label:>{LABEL - 1}} ", (filled, "cyan"), f" {count_text(count)}" if count else "")
        )
    if figures.limit is not None and not drawn:
        rows.append(_limit_row(figures, plain))
    return Group(*rows)


def _limit_row(figures: Lengths, plain: bool) -> Text:
    rule = ("-" if plain else "╌") * 6
    words = f"max_seq_len {count_text(figures.limit)}, {plural(figures.truncated, 'sample')} cut"
    return Text.assemble(" " * LABEL, (f"{rule} {words} {rule}", "yellow"))


def _cell(value: float | None, low: float, high: float, plain: bool) -> Text:
    if value is None:
        return Text(" ")
    if not math.isfinite(value):
        return Text(NOT_FINITE, style="bold magenta")
    share = 0.0 if value <= low or high <= low else math.log(value / low) / math.log(high / low)
    return Text(level(100 * share, ascii_only=plain), style="cyan")

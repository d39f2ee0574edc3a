"""Tables that fit a narrow terminal: what is copied from one stays whole, and what is worth least is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
"""Cells between two columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column: its title, how much it is worth (0: it is never left out), and how it may be narrowed."""

    title: str
    worth: int = 0
    least: int | None = None
    """Cells to which long values may be wrapped; None keeps each on one line, as an id has to be."""
    most: int | None = None
    """Cells from which on a value is wrapped however wide the terminal is: one long value widens no other row."""
    right: bool = False


def fitting(columns: Sequence[Column], rows: Sequence[Sequence[Text]], console: Console) -> Table:
    """Return a table without lines of those columns that the console is wide enough for, worth most first."""
    kept = list(range(len(columns)))
    while sum(_needed(columns[each], rows, each) + GAP for each in kept) - GAP > console.width:
        spare = [each for each in kept if columns[each].worth]
        if not spare:
            break
        kept.remove(min(spare, key=lambda each: columns[each].worth))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for each in kept:
        column = columns[each]
        table.add_column(
            column.title, overflow="fold", no_wrap=column.least is None,
            max_width=column.most if console.is_terminal else None,  # a pipe has a line for each row
            justify="right" if column.right else "left",
        )  # fmt: skip
    for row in rows:
        table.add_row(*(row[each] for each in kept))
    return table


def _needed(column: Column, rows: Sequence[Sequence[Text]], index: int) -> int:
    widest = max([len(column.title), *(row[index].cell_len for row in rows)])
    return widest if column.least is None else min(widest, max(column.least, len(column.title)))

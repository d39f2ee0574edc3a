"""What a command's files hold, in a table: equal ones counted together, as the verify step found them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from controller.ui.clean import Encodable, clean, text
from controller.ui.formats import bytes_text, count_text, plural

TENSORS_SHOWN = 8
"""Of each group; all are in `ctl summary --json`."""


def survey_rows(survey: Mapping[str, Any]) -> Iterable[tuple[str, Text]]:
    """Yield the rows of a summary that tell of a survey: amounts, what could not be read, NaN in which sample."""
    amount = f"{plural(int(survey.get('files') or 0), 'file')}, {bytes_text(survey.get('bytes'))}"
    if survey.get("records"):
        amount += f", {count_text(survey['records'])} records"
    yield "files", Text(amount)
    if survey.get("other_files"):
        yield "others", Text(f"{count_text(survey['other_files'])} of other kinds, not looked into")
    for unread in survey.get("unread") or ():
        why = clean(unread.get("why"))
        yield (
            "not read",
            Text(f"{count_text(unread.get('files'))} {clean(unread.get('kind'))}: {why}", style="yellow"),
        )
    for damaged in (survey.get("damaged") or ())[:TENSORS_SHOWN]:
        yield "damaged", Text(f"{clean(damaged.get('path'))}: {clean(damaged.get('why'))}", style="bold red")
    nan = survey.get("nan") or {}
    if nan.get("files"):
        sample = f"in {count_text(nan['values'])} values of {nan['files']:,} of {nan['of_files']:,} files"
        bad = bool(nan.get("nan") or nan.get("inf"))
        words = f"{count_text(nan['nan'])} NaN, {count_text(nan['inf'])} Inf {sample}"
        yield "sampled", Text(words + (f", first in {clean(nan['first'])}" if bad and nan.get("first") else ""),
                              style="bold red" if bad else "")  # fmt: skip


def print_groups(console: Console, survey: Mapping[str, Any]) -> None:
    """Print one block for each group of equal files: how many, and the tensors that each holds."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for name in ("FILES", "LIKE", "TENSOR", "DTYPE", "SHAPE", "TIMES"):
        table.add_column(name, justify="right" if name in ("FILES", "TIMES") else "left", overflow="fold")
    for group in survey.get("groups") or ():
        rows = list(group.get("tensors") or ())
        for number, row in enumerate(rows[:TENSORS_SHOWN] or [{}]):
            head = (count_text(group["files"]), clean(group["example"])) if number == 0 else ("", "")
            table.add_row(
                text(head[0], "bold"), text(head[1]), text(row.get("name") or ""), text(row.get("dtype") or ""),
                Text(_shape(row)), Text(count_text(row["count"]) if row else ""),
            )  # fmt: skip
        left = len(rows) - TENSORS_SHOWN + int(group.get("tensors_left_out") or 0)
        if left > 0:
            table.add_row("", "", Text(f"and {left} more", style="dim"), "", "", "")
    if table.row_count:
        console.print()
        console.print(Encodable(table))


def _shape(row: Mapping[str, Any]) -> str:
    sizes = row.get("shape") or ()
    words = ("-".join(map(str, size)) if isinstance(size, list) else str(size) for size in sizes)
    return " x ".join(words)

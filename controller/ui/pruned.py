"""Screens of `ctl prune`: what may go, what stays and why, and what went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from controller.ui.clean import text
from controller.ui.columns import Column, fitting
from controller.ui.formats import bytes_text
from controller.ui.glyphs import glyphs_for


def print_prunable(console: Console, host: str, shown: Mapping[str, Any]) -> None:
    """Print every folder that may go with its size, then what is kept for a reason of its own."""
    rows = shown["runs"]
    if rows:
        console.print(Text.assemble("run folders to be deleted on ", (text(host).plain, "bold"), ":"))
        lines = [
            [
                text(row["run_id"]), text(row["name"] or "-"), text(row["ended"] or "-"),
                text("its deletion was cut off" if row["unfinished"] else row["end_reason"] or row["state"]),
                Text(f"{row['entries']:,}"), Text(bytes_text(row["bytes"])),
            ]
            for row in rows
        ]  # fmt: skip
        console.print(fitting(_COLUMNS, lines, console))
    else:
        console.print(Text.assemble("no run folder to delete on ", (text(host).plain, "bold")))
    for each in shown["kept"]:
        console.print(text(f"  kept: {each['run_id']}: {each['why']}", "dim"), soft_wrap=True)


_COLUMNS = (
    Column(title="run"),
    Column(title="name", worth=1, least=12),
    Column(title="ended", worth=4),
    Column(title="how", worth=3, least=12),
    Column(title="entries", worth=2, right=True),
    Column(title="size", right=True),
)


def print_pruned(console: Console, document: Mapping[str, Any]) -> None:
    """Print what was deleted, as the host found it gone afterwards."""
    sign = Text(glyphs_for(console.encoding).ok, style="bold green")
    count = len(document["deleted"])
    amount = f"{count:,} run {'folder' if count == 1 else 'folders'}, {bytes_text(document['deleted_bytes'])}"
    console.print(Text.assemble(sign, " ", (text(document["host"]).plain, "bold"), f": {amount} deleted, and gone"))

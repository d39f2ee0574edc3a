"""Screens of `ctl prune`: what may go, what stays and why, and what went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from controller.ui.clean import clean, text
from controller.ui.columns import Column, fitting
from controller.ui.formats import bytes_text, plural
from controller.ui.glyphs import glyphs_for

NAMED = 12
"""Runs named of those that stay for one reason; the JSON has all of them."""


def folders_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return `3 run folders (1.20 MiB)`; one whose size is not known counts as nothing."""
    return f"{plural(len(runs), 'run folder')} ({bytes_text(sum(each.get('bytes') or 0 for each in runs))})"


def print_prunable(console: Console, host: str, shown: Mapping[str, Any]) -> None:
    """Print every folder that may go with its size and the total, then what stays, by reason."""
    rows, kept = shown["runs"], shown["kept"]
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
        console.print(Text(f"{folders_text(rows)} in all", style="bold"))
    else:
        console.print(Text.assemble("no run folder to delete on ", (text(host).plain, "bold")))
    if kept:
        console.print(Text(f"kept, because it may be needed: {folders_text(kept)}"))
    for why, runs in by_reason(kept):
        console.print(Padding(text(f"{plural(len(runs), 'run')}: {why}", "dim"), (0, 0, 0, 2), expand=False))
        more = f" and {len(runs) - NAMED:,} more" if len(runs) > NAMED else ""
        console.print(Padding(Text(clean(", ".join(runs[:NAMED])) + more, style="dim"), (0, 0, 0, 6), expand=False))


def by_reason(kept: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (reason, run ids), the reason of the most runs first; RUN stands in it for the id of each."""
    found: dict[str, list[str]] = {}
    for each in kept:
        found.setdefault(each["why"].replace(each["run_id"], "RUN"), []).append(each["run_id"])
    return sorted(found.items(), key=lambda item: -len(item[1]))


_COLUMNS = (
    Column(title="run"),
    Column(title="name", worth=1, least=12),
    Column(title="ended", worth=4),
    Column(title="how", worth=3, least=12),
    Column(title="entries", worth=2, right=True),
    Column(title="size", right=True),
)


def print_pruned(console: Console, document: Mapping[str, Any]) -> None:
    """Print what was deleted, as the host found it gone afterwards, and how much that freed."""
    sign = Text(glyphs_for(console.encoding).ok, style="bold green")
    amount = (
        f"{plural(len(document['deleted']), 'run folder')} deleted, {bytes_text(document['deleted_bytes'])} freed"
    )
    console.print(Text.assemble(sign, " ", (text(document["host"]).plain, "bold"), f": {amount}"))

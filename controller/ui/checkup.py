"""Screens of `ctl preflight`: several hosts side by side, how long the look took, and what can be cleared up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from controller.ui.clean import text
from controller.ui.formats import bytes_text
from controller.ui.glyphs import glyphs_for
from controller.ui.tables import FindingLike

LEVELS = ("ok", "warn", "fail")
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
SLOWEST_SHOWN = 3

KINDS = {
    "stop": "stop the dead run",
    "kill": "end processes left by run",
    "shm": "delete shared memory of run",
    "output": "delete unfinished output of run",
}


def print_side_by_side(console: Console, found: Mapping[str, Sequence[FindingLike]]) -> None:
    """Print a row for each code and a column for each host: the worst level, with how many of it there are."""
    glyphs = glyphs_for(console.encoding)
    signs = {"ok": glyphs.ok, "warn": glyphs.warn, "fail": glyphs.fail}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check")
    for host in found:
        table.add_column(text(host))
    codes = dict.fromkeys(finding.code for findings in found.values() for finding in findings)
    for code in codes:
        cells = []
        for findings in found.values():
            levels = [str(finding.level) for finding in findings if finding.code == code]
            if not levels:
                cells.append(Text("-", style="dim"))
                continue
            worst = max(levels, key=LEVELS.index)
            count = levels.count(worst)
            cells.append(Text(f"{signs[worst]} {worst}" + (f" x{count}" if count > 1 else ""), style=STYLES[worst]))
        table.add_row(text(code), *cells)
    console.print(table)


def print_took(console: Console, seconds: float, sections: Mapping[str, float]) -> None:
    """Print how long the look took, and what it waited for longest."""
    slowest = ", ".join(f"{name} {took:.1f} s" for name, took in list(sections.items())[:SLOWEST_SHOWN])
    console.print(Text(f"  looked at in {seconds:.1f} s side by side: {slowest}", style="dim"))


def print_tidy_plan(
    console: Console, host: str, actions: Sequence[Mapping[str, Any]], strangers: Sequence[Mapping[str, str]]
) -> None:
    """Print everything that will be stopped or deleted, then what stays because it is not ours, and whose it is."""
    console.print(Text.assemble(("host ", "dim"), (text(host).plain, "bold")))
    if not actions:
        console.print(text("  nothing was left by a dead run of ctl"))
    for action in actions:
        console.print(text(f"  {KINDS[action['kind']]} {action['run_id']}", "bold"))
        console.print(text(f"    {action['why']}", "dim"), soft_wrap=True)
        for process in action["processes"]:
            console.print(text(f"    process {process['pid']} ({process['comm']})"))
        for path in action["files"]:
            console.print(text(f"    {path}"), soft_wrap=True)
        if action["path"]:
            amount = f"{action['entries']:,} entries, {bytes_text(action['bytes'])}"
            console.print(text(f"    {action['path']}: {amount}: {', '.join(action['examples'])}"), soft_wrap=True)
    if strangers:
        console.print(text("  left alone, because it is not ours:", "bold"))
    for each in strangers:
        console.print(text(f"    {each['what']}"), soft_wrap=True)
        console.print(text(f"      of {each['whose']}", "dim"), soft_wrap=True)


def print_tidied(console: Console, answer: Mapping[str, Any]) -> None:
    """Print what was done, what could not be, and what is left by a second look."""
    for each in answer["done"]:
        console.print(text(f"  done: {each['text']}"), soft_wrap=True)
    for each in answer["failed"]:
        console.print(text(f"  failed: {KINDS[each['kind']]} {each['run_id']}: {each['text']}", "bold red"))
    left = answer["remaining"]
    told = f"{len(left)} of it are still there" if left else "nothing of it is left"
    console.print(text(f"  looked again: {told}", "bold red" if left else "green"))

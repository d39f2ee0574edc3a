"""Screens of `ctl preflight`: several hosts side by side, how long the look took, and what can be cleared up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from controller.core.errors import CtlError, ExitCode, UsageError
from controller.ui.clean import text
from controller.ui.errors import print_error
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


def print_side_by_side(
    console: Console,
    found: Mapping[str, Sequence[FindingLike]],
    errors: Mapping[str, CtlError],
    *,
    order: Sequence[str],
) -> None:
    """Print a row for each code and a column for each host: the worst level, with how many of it there are.

    The column of a host that was not looked at says why in its first row: nothing was found, which is not "in order".
    """
    glyphs = glyphs_for(console.encoding)
    signs = {"ok": glyphs.ok, "warn": glyphs.warn, "fail": glyphs.fail}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", overflow="fold")
    for host in order:
        table.add_column(text(host), overflow="fold")
    if errors:
        looked = Text(f"{glyphs.ok} ok", style=STYLES["ok"])
        words = {
            host: Text(f"{glyphs.fail} {_unseen(error)}", style=STYLES["fail"]) for host, error in errors.items()
        }
        table.add_row("looked at", *(words.get(host, looked) for host in order))
    codes = dict.fromkeys(finding.code for findings in found.values() for finding in findings)
    for code in codes:
        cells = []
        for host in order:
            levels = [str(finding.level) for finding in found.get(host, ()) if finding.code == code]
            if not levels:
                cells.append(Text("" if host in errors else "-", style="dim"))
                continue
            worst = max(levels, key=LEVELS.index)
            count = levels.count(worst)
            cells.append(Text(f"{signs[worst]} {worst}" + (f" x{count}" if count > 1 else ""), style=STYLES[worst]))
        table.add_row(text(code), *cells)
    console.print(table)


def print_unseen(console: Console, host: str, error: CtlError) -> None:
    """Print why a host was not looked at, under its name."""
    console.print(Text.assemble(("host ", "dim"), (text(host).plain, "bold")))
    print_error(error, console)


def _unseen(error: CtlError) -> str:
    if isinstance(error, UsageError):
        return "configuration"
    return "unreachable" if error.exit_code is ExitCode.CONNECT else "not looked at"


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

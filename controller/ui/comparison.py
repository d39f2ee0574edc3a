"""Two runs for a person: what is different, before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from controller.ui.clean import Encodable, clean, text

TITLES = {"plan": "plan", "versions": "versions", "outcome": "how it ended", "figures": "figures"}

NOTHING = "-"
"""What one of the two runs has not."""


def print_comparison(console: Console, document: Mapping[str, Any]) -> None:
    """Print the document of `ctl diff --json`."""
    first, second = document["runs"]
    _print(console, Text.assemble((clean(first), "bold"), "  to  ", (clean(second), "bold")))
    for run_id, ended in zip(document["runs"], document["ended"], strict=True):
        if not ended:
            _print(console, text(f"  {run_id} has not ended, as far as is known here", "yellow"))
    if document["same"]:
        _print(console, Text("  no difference"))
    for section, title in TITLES.items():
        changes = document["changes"][section]
        if not changes:
            continue
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for _ in range(5):
            table.add_column(overflow="fold")  # a value that is cut cannot be compared
        for change in changes:
            table.add_row("", text(change["key"], "dim"), text(_value(change["before"])), "→", _after(change))
        _print(console, Text(""))
        _print(console, Text(title, style="bold"))
        _print(console, table)


def _after(change: Mapping[str, Any]) -> Text:
    shown = text(_value(change["after"]), "bold")
    if "ratio" in change:
        shown.append(f"  ({(change['ratio'] - 1) * 100:+.1f} %)", style="cyan")
    return shown


def _value(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _print(console: Console, what: Text | Table) -> None:
    console.print(Encodable(what), soft_wrap=isinstance(what, Text))

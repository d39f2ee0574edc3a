"""Shares of an extraction, joined, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from controller.ui.clean import clean


def print_merged(console: Console, merged: Mapping[str, Any]) -> None:
    """Print what `core.shares.merge` found."""
    for run in merged["runs"]:
        number, count = run["shard"]
        text = f"  {clean(run['run_id'])}  {clean(run['host'])}  shard {number}/{count}  {run['written']:,} samples"
        console.print(Text(text))
    sign, style = ("complete", "green") if merged["complete"] else ("incomplete", "red")
    least = "" if merged["counted"] else "at least "
    counts = f"{merged['written']:,} of {least}{merged['records']:,} records written, {merged['skipped']:,} skipped"
    console.print(Text.assemble((sign, style), f": {counts}, {merged['tokens']:,} tokens"))
    if merged["holes"]:
        ranges = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in merged["hole_ranges"])
        console.print(Text(f"  holes: {merged['holes']:,} ({ranges})"))
    if merged["doubles"]:
        doubles = ", ".join(str(double["index"]) for double in merged["double_samples"])
        console.print(Text(f"  doubles: {merged['doubles']:,} ({doubles})"))
    if merged["differing"]:
        console.print(Text(f"  doubles of different text: {', '.join(map(str, merged['differing']))}"))

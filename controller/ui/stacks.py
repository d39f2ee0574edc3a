"""The stacks of a run's processes, ranks first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from controller.ui.clean import Encodable, clean, clean_block


def print_stacks(console: Console, processes: Sequence[Mapping[str, Any]]) -> None:
    """Print each process's stacks; ranks that stand in the same place are told once."""
    seen: dict[str, str] = {}
    for process in processes:
        who = f"rank {process['rank']}" if process.get("rank") is not None else str(process.get("process"))
        head = Text.assemble((clean(who), "bold"), (f"  process {process.get('pid')}", "dim"))
        if process.get("error"):
            _write(console, head)
            _write(console, Text(f"  {clean(process['error'])}", style="yellow"))
            continue
        body = _body(str(process.get("stacks") or ""))
        same = seen.setdefault(body, who)
        _write(console, head if same == who else Text.assemble(head, f": as {clean(same)}"))
        if same == who:
            _write(console, Text("\n".join(f"  {line}" for line in clean_block(body).splitlines())))


def _body(stacks: str) -> str:
    """Leave out py-spy's head, which names the process and its arguments."""
    lines = stacks.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("Thread ")), 0)
    return "\n".join(lines[start:])


def _write(console: Console, line: Text) -> None:
    console.print(Encodable(line), soft_wrap=True)

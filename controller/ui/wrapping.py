"""Prose that a narrow terminal breaks between words, while what is copied from it stays in one piece.

A terminal wraps a long line wherever it ends, and copies it whole all the same. A line feed of ours would be copied:
so none is ever put into a command, which stands between backticks.
"""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.console import Console

_PIECES = re.compile(r"(?:`[^`\n]*`|[^\s`]|`)+")
"""Words, and what stands between backticks, with all that clings to them."""

_LIKE_A_COMMAND = re.compile(r"[/=]|(?:^|\s)-|\bctl ")


def wrapped(value: str, console: Console, indent: int) -> str:
    """Return text that begins at cell `indent`, with line feeds where a terminal's width asks for them.

    No blank is put before the new lines. Where nothing draws a margin, in a file or a pipe, nothing is wrapped.
    """
    if not console.is_terminal:
        return value
    room = max(1, console.width - indent)
    return "\n".join(_lines(line, room) for line in value.split("\n"))


def wrapped_advice(value: str, console: Console, indent: int) -> str:
    """Return the same of a text that may be a command as it stands: without backticks such a one is left alone."""
    if "`" not in value and _LIKE_A_COMMAND.search(value):
        return value
    return wrapped(value, console, indent)


def _lines(line: str, room: int) -> str:
    if cell_len(line) <= room:
        return line
    lead = line[: len(line) - len(line.lstrip())]
    lines, current = [], ""
    for piece in _PIECES.findall(line):
        longer = f"{current} {piece}" if current else lead + piece
        if current and cell_len(longer) > room:
            lines.append(current)
            longer = lead + piece
        current = longer
    return "\n".join([*lines, current])

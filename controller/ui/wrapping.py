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


_GAP = re.compile(r"(?<=\S)\s{2,}(?=\S)")
"""Between what a row of a page is about, and what it says of it."""

BESIDE_LEAST = 24
"""Cells; where less is left beside what a row is about, what it says of it stands below."""


def wrapped_page(value: str, console: Console) -> str:
    """Return a page of paragraphs and indented rows of two columns that a narrow terminal breaks between words.

    Where every line fits, and in a file or a pipe, it stays as it is.
    """
    lines = value.split("\n")
    if not console.is_terminal or max(map(cell_len, lines)) <= console.width:
        return value
    pieces: list[str] = []  # paragraphs and rows, each on one line
    for before, line in zip(["", *lines], lines, strict=False):
        lead = _lead(line)
        gap = _GAP.search(pieces[-1]) if pieces else None
        goes_on = bool(line and before) and (lead == 0 == _lead(before) or (gap is not None and lead == gap.end()))
        if goes_on:
            pieces[-1] += " " + line.strip()
        else:
            pieces.append(line)
    return "\n".join(each for piece in pieces for each in _row(piece, console.width))


def _lead(line: str) -> int:
    return len(line) - len(line.lstrip())


def _row(piece: str, width: int) -> list[str]:
    if cell_len(piece) <= width:
        return [piece]
    gap, lead = _GAP.search(piece), _lead(piece)
    if gap is None:
        # A command is copied whole; the lines of a paragraph begin where its first does.
        return [piece] if piece.lstrip().startswith("ctl ") else _hung(piece.strip(), " " * lead, width)
    head, said = piece[: gap.start()], piece[gap.end() :]
    if width - gap.end() < BESIDE_LEAST:
        return [head, *_hung(said, " " * (lead + 4), width)]
    first, *rest = _hung(said, " " * gap.end(), width)
    return [piece[: gap.end()] + first.lstrip(), *rest]


def _hung(value: str, indent: str, width: int) -> list[str]:
    return [indent + line for line in _lines(value, max(1, width - len(indent))).split("\n")]

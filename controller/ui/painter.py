"""Puts frames on a terminal by rewriting only the lines that changed, below what was printed before.

The frame is drawn at the cursor, not in the alternate screen, so that the last one stays in the scrollback. Widths
are exact and nothing wraps; after a change of size the screen is cleared, because terminals disagree about what they
do with old lines then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TextIO

from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

CURSOR_OFF, CURSOR_ON = "\x1b[?25l", "\x1b[?25h"
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"
SYNC_ON, SYNC_OFF = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronized output: a frame appears at once. Terminals that do not know it ignore it."""
ERASE_LINE_END, ERASE_BELOW, CLEAR = "\x1b[K", "\x1b[J", "\x1b[H\x1b[J"
RESET = "\x1b[0m"


class Painter:
    """Owns the lines of the frame. Not safe for threads: its owner has the lock."""

    def __init__(self, stream: TextIO, *, colour: bool = True) -> None:
        self._stream = stream
        self._colour = colour
        self._shown: list[str] = []
        self._size: tuple[int, int] | None = None

    def paint(self, lines: Sequence[Text], size: tuple[int, int]) -> None:
        """Show `lines`, each at most `size[0]` cells wide and in all fewer than `size[1]`."""
        fresh = [ansi(line) if self._colour else line.plain for line in lines]
        out = [SYNC_ON, CURSOR_OFF, WRAP_OFF]
        if self._size not in (None, size):
            out.append(CLEAR)
            self._shown = []
        elif self._shown:
            # A frame that is all there is may have scrolled: rows are counted from where the cursor rests.
            out.append(f"\r\x1b[{len(self._shown)}A")
        self._size = size
        for index, line in enumerate(fresh):
            if index >= len(self._shown) or line != self._shown[index]:
                # Erased first: after a line of full width the cursor stands on its last cell, which would go too.
                out.append(f"{ERASE_LINE_END}{line}")
            out.append("\r\n")
        if len(fresh) < len(self._shown):
            out.append(ERASE_BELOW)
        out += [WRAP_ON, SYNC_OFF]
        self._shown = fresh
        self._write("".join(out))

    def leave(self) -> None:
        """Let the last frame stay, and give the cursor back below it."""
        self._write(RESET + WRAP_ON + CURSOR_ON)
        self._shown = []
        self._size = None

    def wipe(self) -> None:
        """Take the frame off the screen, and give the cursor back where it began."""
        up = f"\r\x1b[{len(self._shown)}A{ERASE_BELOW}" if self._shown else ""
        self._write(up + RESET + WRAP_ON + CURSOR_ON)
        self._shown = []
        self._size = None

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def ansi(line: Text) -> str:
    """Return a line with the terminal's own sixteen colours, at a tenth of the cost of rich's rendering.

    Spans may overlap; where they do, the later one wins what both say.
    """
    plain = line.plain
    if not line.spans:
        return f"{_sgr((str(line.style),))}{plain}{RESET}" if line.style else plain
    edges = sorted(
        {0, len(plain), *(min(edge, len(plain)) for span in line.spans for edge in (span.start, span.end))}
    )
    pieces = []
    base = str(line.style)
    for start, end in pairwise(edges):
        styles = [str(span.style) for span in line.spans if span.start <= start and span.end >= end]
        codes = _sgr((base, *styles))
        pieces.append(f"{codes}{plain[start:end]}{RESET}" if codes else plain[start:end])
    return "".join(pieces)


@lru_cache(maxsize=256)
def _sgr(styles: tuple[str, ...]) -> str:
    style = Style.combine([Style.null(), *(Style.parse(each) for each in styles)])
    marked = style.render("x", color_system=ColorSystem.STANDARD)
    return marked.partition("x")[0]

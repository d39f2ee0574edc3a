"""Remote text made harmless: the one place through which every string from a host passes to a terminal.

Log lines, process names, file names and error messages are written by others. Escape sequences could move the
cursor, set the clipboard (OSC 52) or the title, bidirectional controls could show a path as another, and square
brackets are markup to rich. Printable Unicode stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

_SEQUENCES = re.compile(
    r"""
      (?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])      # OSC, DCS, SOS, PM, APC: up to their terminator or the line's end
      [^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?
    | (?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?            # CSI
    | \x1b[ -/]*[0-~]?                             # all other escapes
    """,
    re.VERBOSE,
)

# C0 and C1 controls, the line and paragraph separators, bidirectional controls, lone surrogates, invisible marks.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)

TAB = "    "


def clean_block(value: object) -> str:
    """Return text of several lines without any control sequence; line feeds stay, tabs become spaces."""
    text = str(value).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROLS.sub("", _SEQUENCES.sub("", text)).replace("\t", TAB)


def clean(value: object) -> str:
    """Return text for one line: as `clean_block`, with line feeds turned into spaces."""
    return clean_block(value).replace("\n", " ")


def text(value: object, style: str = "") -> Text:
    """Return remote text for rich, taken literally: `[red]` and `:smile:` are shown as written."""
    return Text(clean(value), style=style)


@dataclass(frozen=True, slots=True)
class Encodable:
    """A renderable limited to what the console's encoding can write: `?` stands for the rest, cell by cell."""

    renderable: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        encoding = options.encoding
        for segment in console.render(self.renderable, options):
            if segment.control or _fits(segment.text, encoding):
                yield segment
            else:
                yield Segment("".join(_replaced(segment.text, encoding)), segment.style)


def _replaced(value: str, encoding: str) -> Iterator[str]:
    for character in value:
        yield character if _fits(character, encoding) else "?" * cell_len(character)


def _fits(value: str, encoding: str) -> bool:
    try:
        value.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True

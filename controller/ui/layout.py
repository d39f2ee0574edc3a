"""What the parts of a frame share."""

from __future__ import annotations

from rich.text import Text

LABEL = 9
"""Cells of the column that names a row."""

BAR_MAX = 80
"""Cells; a longer bar says no more, and draws the eye from the figures behind it."""


def spread(left: Text, right: Text, width: int) -> Text:
    """Put one text at each end of a line; the left one gives way."""
    space = width - right.cell_len
    left.truncate(max(0, space - 1), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, space - left.cell_len), right)

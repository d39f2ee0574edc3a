"""Small pictures in text. Pure functions; nothing is ever scaled to its own maximum, so that pictures compare."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇"
"""Without the full block: rows that stand close together would melt into one surface."""

_BLOCKS_ASCII = "_.:-=+#"


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """Return the last `width` values on a fixed scale of 0 to 100, the newest on the right.

    Exactly `width` cells: blank where there is no history yet, `·` where a value is missing. Values outside the
    scale are drawn at its ends.
    """
    blocks = _BLOCKS_ASCII if ascii_only else _BLOCKS
    gap = "." if ascii_only else "·"
    shown = values[-width:] if width > 0 else ()
    cells = [gap if value is None else blocks[_level(value, len(blocks))] for value in shown]
    return "".join(cells).rjust(width)


def level(value: float, *, ascii_only: bool = False) -> str:
    """Return one cell whose height is `value` on a scale of 0 to 100."""
    blocks = _BLOCKS_ASCII if ascii_only else _BLOCKS
    return blocks[_level(value, len(blocks))]


def bar(fraction: float | None, width: int, *, ascii_only: bool = False) -> tuple[str, str]:
    """Return the (filled, rest) of a horizontal bar, together `width` cells; None draws it empty."""
    share = min(1.0, max(0.0, fraction or 0.0))
    count = round(share * width)
    full, rest = ("=", "-") if ascii_only else ("━", "─")
    return full * count, rest * (width - count)


def _level(value: float, levels: int) -> int:
    return min(levels - 1, max(0, int(value / 100 * levels)))

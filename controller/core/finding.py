"""The verdict of one check, and the words that all checks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"  # the run is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was seen, why it matters, and what to type or change. `code` is stable, kebab-case, and documented.

    `allowed`: a failure that somebody allowed by its code; its level is then a warning.
    """

    level: Level
    code: str
    what: str
    why: str = ""
    fix: str = ""
    allowed: bool = False


def passed(code: str, what: str) -> Finding:
    return Finding(level=Level.OK, code=code, what=what)


def warned(code: str, what: str, *, why: str = "", fix: str = "") -> Finding:
    return Finding(level=Level.WARN, code=code, what=what, why=why, fix=fix)


def failed(code: str, what: str, *, why: str = "", fix: str = "") -> Finding:
    return Finding(level=Level.FAIL, code=code, what=what, why=why, fix=fix)


def section(report: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the data of a section of a probe report; None if it is absent or failed."""
    result = report["sections"].get(name)
    return result["data"] if result and result["ok"] else None


def size(count: int) -> str:
    """Return bytes for a person: `594.2 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age(seconds: float | None) -> str:
    """Return a duration for a person in its largest unit: `3 h`."""
    if seconds is None:
        return "unknown time"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def some(items: list[str], limit: int = 5) -> str:
    """Join at most `limit` items, and say how many more there are."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")


def span(seconds: float) -> str:
    """Return a duration for a person in its two largest units: `3 h 10 min`."""
    whole = round(seconds)
    for large, unit, small, lower in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"

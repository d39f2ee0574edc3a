"""Signs that carry meaning, with plain substitutes for terminals that cannot write them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    ok: str
    warn: str
    fail: str
    skip: str
    dot: str
    separator: str
    gutter: str
    rule: str
    ellipsis: str
    degree: str
    spinner: str


UNICODE = Glyphs(
    ok="✓",
    warn="!",
    fail="✗",
    skip="○",
    dot="●",
    separator=" · ",
    gutter="│",
    rule="─",
    ellipsis="…",
    degree="°C",
    spinner="⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏",
)

ASCII = Glyphs(
    ok="+",
    warn="!",
    fail="x",
    skip="o",
    dot="*",
    separator=" | ",
    gutter="|",
    rule="-",
    ellipsis="...",
    degree="C",
    spinner="|/-\\",
)


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return UNICODE where `encoding` can write all of it, else ASCII."""
    try:
        "".join((UNICODE.ok, UNICODE.fail, UNICODE.rule, UNICODE.spinner)).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE

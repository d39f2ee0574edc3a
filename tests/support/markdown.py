"""What tests need to know of a Markdown page: its headings, links, fenced blocks and mentions of commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHELL = ("console", "sh", "bash", "shell")
"""Info strings of blocks that hold commands."""

_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_MARKER = re.compile(r"<!--\s*(not run|setup):\s*(.+?)\s*-->")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$")
_SPAN = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `markers` are those of the comment right above it: `not run: WHY`, `setup: NAME`."""

    page: Path
    line: int
    info: str
    text: str
    markers: dict[str, str]

    @property
    def commands(self) -> list[str]:
        """Its lines without prompts and comments."""
        lines = (line.strip().removeprefix("$ ").partition("   #")[0].strip() for line in self.text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield a page's fenced blocks."""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        start, indent = number, len(fence[1])
        number += 1
        body = []
        while lines[number].strip() != "```":
            body.append(lines[number][indent:])
            number += 1
        above = lines[start - 1] if start else ""
        yield Block(
            page=page,
            line=start + 1,
            info=fence[2],
            text="\n".join(body) + "\n",
            markers=dict(_MARKER.findall(above)),
        )
        number += 1


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    kept, inside = [], False
    for line in page.read_text().splitlines():
        if _FENCE.match(line) or (inside and line.strip() == "```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = (_HEADING.match(line) for line in prose(page).splitlines())
    return {_slug(heading[1]) for heading in headings if heading}


def spans(page: Path) -> list[str]:
    """Return what stands between backticks, with the line ends inside as spaces."""
    return [" ".join(span.split()) for span in _SPAN.findall(prose(page))]


def indented_commands(page: Path, programs: tuple[str, ...]) -> list[str]:
    """Return lines of indented code that begin with one of `programs`."""
    lines = (line for line in prose(page).splitlines() if line.startswith("    "))
    return [line.strip() for line in lines if line.strip().partition(" ")[0] in programs]


def _slug(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.replace(" ", "-")

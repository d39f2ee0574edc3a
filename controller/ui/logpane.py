"""The job's log: its newest lines, or those around a place where a person has stopped it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from rich.text import Text

from controller.core.logs import Level, LogLine
from controller.ui.clean import clean
from controller.ui.formats import count_text
from controller.ui.glyphs import Glyphs
from controller.ui.keymap import UiState
from controller.ui.layout import LABEL
from controller.ui.logbuffer import LogPage

WIDE = 90
"""Columns from which on a line has its time of day."""

PageOf = Callable[[int], LogPage]
"""Returns the lines of the log that fill a number of rows, as `UiState` chooses them."""

_STYLES = {Level.WARNING: "yellow", Level.ERROR: "red", Level.DEBUG: "dim", Level.INFO: "", None: ""}


def log_lines(page_of: PageOf, state: UiState, width: int, room: int, glyphs: Glyphs, *, keys: bool) -> list[Text]:
    """Return a title and the log below it, in `room` lines; nothing where there is no log or no room."""
    if room < 2:
        return []
    page = page_of(room - 1)
    if not page.total and not page.lines and not keys:
        return []
    shown: list[Text] = []
    for entry in page.lines:
        shown += _rows(entry, width) if state.wrap else [_row(entry, width)]
    return [_title(page, state, width, glyphs, keys=keys), *shown[-(room - 1) :]]


def _title(page: LogPage, state: UiState, width: int, glyphs: Glyphs, *, keys: bool) -> Text:
    words: list[tuple[str, str]] = []
    if state.frozen is not None:
        words.append((f"paused, {count_text(page.below)} below", "bold yellow"))
    if state.rank is not None:
        words.append((f"rank {state.rank}", "bold cyan"))
    if state.typing:
        words.append((f"filter: {clean(state.needle)}_", "bold cyan"))
    elif state.needle:
        words.append((f"filter: {clean(state.needle)}", "bold cyan"))
    if not page.lines and (state.needle or state.rank is not None):
        words.append(("no line matches", "yellow"))
    if state.wrap:
        words.append(("wrapped", "cyan"))
    title = Text.assemble((" log ", "dim"), (glyphs.rule, "dim"))
    for text, style in words:
        title.append(f" {text} ", style=style).append(glyphs.rule, style="dim")
    hint = " ? help " if keys else ""
    fill = width - title.cell_len - len(hint) - 2
    return title.append(glyphs.rule * max(0, fill) + hint + (glyphs.rule if hint else ""), style="dim")


def _row(entry: LogLine, width: int) -> Text:
    head, text, style = _parts(entry, width)
    return Text.assemble((head, "dim"), (text[:width], style))


def _rows(entry: LogLine, width: int) -> list[Text]:
    head, text, style = _parts(entry, width)
    pieces = textwrap.wrap(text, max(10, width - LABEL - 1), replace_whitespace=False) or [""]
    first = Text.assemble((head, "dim"), (pieces[0], style))
    return [first, *(Text.assemble(" " * LABEL, (piece, style)) for piece in pieces[1:])]


def _parts(entry: LogLine, width: int) -> tuple[str, str, str]:
    head = " " + _short(entry.source).ljust(LABEL - 1)
    if width >= WIDE and entry.time:
        head += entry.time + " "
    return head, clean(entry.text), _STYLES[entry.level]


def _short(source: str) -> str:
    """Shorten a process name to the label column: `Worker_TP3` to `TP3`, `EngineCore` to `engine`."""
    known = {"EngineCore": "engine", "MainProcess": "main", "Worker": "worker"}
    short = known.get(source, source.removeprefix("Worker_").replace("VllmWorker-", "TP"))
    return clean(short)[: LABEL - 2]

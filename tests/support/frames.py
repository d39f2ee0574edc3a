"""A frame of the dashboard as plain lines."""

from __future__ import annotations

from typing import Any

from support.recorded import START

from controller.core.runview import RunView
from controller.ui.board import Snapshot
from controller.ui.frame import render
from controller.ui.glyphs import UNICODE, Glyphs
from controller.ui.keymap import UiState
from controller.ui.logbuffer import LogBuffer, LogPage


def screen(
    view: RunView,
    log: bytes,
    width: int,
    height: int,
    *,
    now: float = START + 643.5,
    quiet_s: float = 0.0,
    glyphs: Glyphs = UNICODE,
    state: UiState | None = None,
    keys: bool = True,
    **known: Any,
) -> list[str]:
    buffer = LogBuffer()
    buffer.feed(log, now)
    shot = Snapshot(view=view, now=now, host_now=now, quiet_s=quiet_s, failures=view.exceptions, **known)
    chosen = state or UiState()

    def page_of(count: int) -> LogPage:
        return buffer.page(count, end=chosen.frozen, skip=chosen.skip, needle=chosen.needle, rank=chosen.rank)

    lines = render(shot, width, height, page_of=page_of, state=chosen, glyphs=glyphs, keys=keys)
    return [line.plain.rstrip() for line in lines]

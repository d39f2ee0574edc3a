"""One frame of the dashboard, as a pure function of what is known and of the terminal's size.

What matters most is drawn first and never gives way: the state, the stages and what the one at work does, the
progress, failures. GPUs shrink from rows to a grid to one line; the log takes what is left. Colours are the
terminal's own sixteen, and nothing is told by colour alone.
"""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text

from controller.ui.board import Snapshot
from controller.ui.failurepanel import cause_lines, failure_lines, message_lines
from controller.ui.formats import broken_off
from controller.ui.gauges import gpu_lines
from controller.ui.glyphs import UNICODE, Glyphs
from controller.ui.header import header
from controller.ui.keymap import Pane, UiState
from controller.ui.logbuffer import LogPage
from controller.ui.logpane import PageOf, log_lines
from controller.ui.overlays import bottom_line, help_lines, trace_pane
from controller.ui.progresslines import ROOMY_WIDTH, progress_lines, quiet_line
from controller.ui.stagelines import stage_lines, told_by_progress, work_line

LOG_MIN = 3
"""Title and lines that the log keeps before GPUs give way."""

ROOMY_HEIGHT = 26
"""Lines from which on parts are set apart, and columns have names."""


def no_log(count: int) -> LogPage:
    """Return an empty log."""
    return LogPage()


def render(
    shot: Snapshot,
    width: int,
    height: int,
    *,
    page_of: PageOf = no_log,
    state: UiState | None = None,
    glyphs: Glyphs = UNICODE,
    keys: bool = False,
    replay: bool = False,
    runs: int = 1,
    ends_in_s: float | None = None,
    closing: bool = False,
    last: bool = False,
) -> list[Text]:
    """Return a frame of at most `height` lines of at most `width` cells.

    `page_of` gives the log, `state` what a person has chosen to see, `keys` whether there are keys to speak of;
    `ends_in_s` is how many seconds are left of a view whose run has ended. `last`: it is the last frame,
    which stays; `closing`: and after it a failure is told whole.
    """
    if last:
        shot = replace(shot, view=broken_off(shot.view))
    state = state or UiState()
    bottom = bottom_line(shot.view, state, ends_in_s) if keys else []
    room = height - len(bottom)
    top = header(shot.view, width, shot.now, glyphs)
    if state.pane is Pane.HELP:
        lines = [*top, *help_lines(width, room - len(top), replay=replay, runs=runs)]
    elif state.pane is Pane.LOG:
        lines = [*top[:1], *log_lines(page_of, state, width, room - 1, glyphs, keys=keys)]
    elif state.pane is Pane.TRACE:
        lines = [*top[:1], *trace_pane(shot.failures, state.trace_top, width, room - 1, glyphs)]
    else:
        lines = _board(shot, width, room, top, page_of, state, glyphs, keys=keys, replay=replay, closing=closing)
    lines = [*lines[:room], *bottom]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis" if glyphs is UNICODE else "crop")
    return lines


def _board(
    shot: Snapshot,
    width: int,
    height: int,
    top: list[Text],
    page_of: PageOf,
    state: UiState,
    glyphs: Glyphs,
    *,
    keys: bool,
    replay: bool,
    closing: bool,
) -> list[Text]:
    view = shot.view
    if closing and view.end is not None:
        shot = replace(shot, cause=None, failures=())
    roomy = height >= ROOMY_HEIGHT
    top = [*top, *stage_lines(shot, width, glyphs)]
    progress = progress_lines(view, width, glyphs, roomy=roomy and width >= ROOMY_WIDTH)
    if roomy or not progress or not told_by_progress(view):
        top += work_line(shot, width, glyphs)
    work = [*progress, *quiet_line(shot)]
    messages = message_lines(view, glyphs, refused=replay)
    cause = cause_lines(shot.cause, width, glyphs) if not shot.failures or (shot.cause or {}).get("known") else []
    room = height - len(top) - len(work) - len(messages) - len(cause)
    space = max(LOG_MIN, room - LOG_MIN) // (1 if view.end else 2)
    failures = [*cause, *failure_lines(shot.failures, width, space, glyphs, keys=keys)]
    room -= len(failures) - len(cause)
    # After the end the last sample is stale, and would contradict what was measured since.
    gpus = [] if view.end is not None else gpu_lines(shot, width, room - LOG_MIN, glyphs, titles=roomy)
    room -= len(gpus)
    sections = [part for part in (top, gpus, work, messages, failures) if part]
    spacing = roomy and room - LOG_MIN >= 2 * len(sections)
    lines: list[Text] = []
    for section in sections:
        if spacing and lines:
            lines.append(Text(""))
            room -= 1
        lines += section
    return lines + log_lines(page_of, state, width, room, glyphs, keys=keys)

"""What lies over the dashboard: the help, the whole traceback, and the line at the bottom that asks or answers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from controller.core.runview import RunView
from controller.core.tracebacks import FoldedFailure
from controller.ui.clean import clean
from controller.ui.failurepanel import trace_lines
from controller.ui.glyphs import Glyphs
from controller.ui.keymap import BINDINGS, UiState
from controller.ui.layout import spread

KEY_CELLS = 16


def help_lines(width: int, room: int, *, replay: bool, runs: int) -> list[Text]:
    """Return what every key does, in `room` lines; rows that do not fit are left out from the end."""
    lines = [Text(" keys", style="bold")]
    for keys, does, group in BINDINGS:
        if group == "replay" and not replay:
            continue
        names = keys.split()
        shown = keys if len(keys) <= KEY_CELLS - 1 else f"{names[0]} ... {names[-1]}"
        lines.append(Text.assemble((f"   {shown.ljust(KEY_CELLS)}", "bold cyan"), does))
    if runs > 1:
        lines.append(Text.assemble((f"   {'1-9, enter'.ljust(KEY_CELLS)}", "bold cyan"), "open a run of the table"))
    lines += [Text.assemble((f"   {'Ctrl-C'.ljust(KEY_CELLS)}", "bold cyan"), "detach; before the launch: give up")]
    lines.append(Text(" any key closes this", style="dim"))
    return lines[: max(1, room - 1)] + lines[-1:] if len(lines) > room else lines


def trace_pane(failures: Sequence[FoldedFailure], top: int, width: int, room: int, glyphs: Glyphs) -> list[Text]:
    """Return `room` lines of all tracebacks from line `top` on, below a title that says which."""
    lines = trace_lines(failures, width, glyphs)
    top = max(0, min(top, trace_end(failures, width, room, glyphs)))
    shown = lines[top : top + room - 1]
    where = f" lines {top + 1}-{top + len(shown)} of {len(lines)} "
    title = spread(Text(" traceback", style="bold red"), Text(f"arrows scroll, t closes {where}", style="dim"), width)
    return [title, *shown]


def trace_end(failures: Sequence[FoldedFailure], width: int, room: int, glyphs: Glyphs) -> int:
    """Return the furthest line that the pane may begin at."""
    return max(0, len(trace_lines(failures, width, glyphs)) - (room - 1))


def bottom_line(view: RunView, state: UiState, ends_in_s: float | None) -> list[Text]:
    """Return the question that waits for an answer, the answer to the last key, or how long the view stays."""
    if state.confirming:
        question = f" stop run {clean(view.run)} on {clean(view.host)}? y stops it, any other key does not"
        return [Text(question, style="bold yellow")]
    if state.said:
        return [Text(f" {clean(state.said)}", style="bold")]
    if ends_in_s is not None:
        return [Text(f" leaving in {ends_in_s:.0f} s; any key stays", style="bold")]
    return []

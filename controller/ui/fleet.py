"""Several runs at once: a row each, one of which can be opened."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from controller.core.laststage import last_stage
from controller.core.runview import Contact, at_work
from controller.ui.board import Snapshot
from controller.ui.charts import bar
from controller.ui.clean import clean
from controller.ui.formats import (
    Ending,
    amount_text,
    bytes_text,
    count_text,
    duration_text,
    end_word,
    ending_of,
    is_paused,
    left_text,
    number_text,
    pause_seconds,
    state_text,
)
from controller.ui.gauges import mean_util
from controller.ui.glyphs import UNICODE, Glyphs
from controller.ui.header import sign_of
from controller.ui.keymap import UiState
from controller.ui.stagelines import spinner

BAR, NARROW_BAR = 12, 6
NARROW = 100
"""Columns below which the bar is short, so that how many of how many, and the time left, have room."""

STATE = 12
"""Cells of a row's bar and of its state."""

NUMBERED = 9
"""Rows that a digit opens; the arrows reach all."""


def fleet_lines(shots: Sequence[Snapshot], state: UiState, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Return a table of runs in at most `height` lines; where it is too long, the part around the cursor."""
    lines = [_summary(shots, width), Text("")]
    room = max(1, height - len(lines) - 1)
    first = max(0, min(state.chosen - room // 2, len(shots) - room))
    hosts = max((len(clean(shot.view.host)) for shot in shots), default=4)
    for number, shot in enumerate(shots[first : first + room], start=first):
        lines.append(
            _row(number, shot, chosen=number == state.chosen, host_cells=min(20, hosts), width=width, glyphs=glyphs)
        )
    hidden = len(shots) - min(len(shots), room)
    if hidden:
        lines.append(Text(f"   {hidden} more: up and down", style="dim"))
    return lines


def _summary(shots: Sequence[Snapshot], width: int) -> Text:
    ended = [shot for shot in shots if shot.view.end is not None]
    endings = [ending_of(shot.view.end.end_reason) for shot in ended if shot.view.end]
    count = {ending: endings.count(ending) for ending in Ending}
    words = [f"{len(shots)} runs", f"{len(shots) - len(ended)} under way"]
    if paused := sum(is_paused(shot.view) for shot in shots):
        words[-1] += f" ({paused} paused)"
    if ended:
        words.append(f"{count[Ending.WELL]} succeeded")
    if count[Ending.STOPPED]:
        words.append(f"{count[Ending.STOPPED]} stopped")
    line = Text(" " + ", ".join(words), style="bold")
    if failed := count[Ending.BADLY]:
        line.append(f", {failed} failed", style="bold red")
    hint = "number or arrows and enter open one, d detaches"
    return line.append("  " + hint, style="dim") if line.cell_len + len(hint) + 3 <= width else line


def _row(number: int, shot: Snapshot, *, chosen: bool, host_cells: int, width: int, glyphs: Glyphs) -> Text:
    view, progress = shot.view, shot.view.progress
    sign, style = sign_of(view, glyphs)
    stage = at_work(view)
    state = clean(state_text(view) if view.end is None else end_word(view.end.end_reason))
    if view.end is None and view.contact is not Contact.CONNECTED:
        state, style = "out of reach", "yellow"
    elif is_paused(view):
        state = "paused"  # what it waits for stands where others have the time left
    elif view.end is None and stage is not None:
        state = clean(stage.name)
        sign = spinner(shot.now, glyphs)
    line = Text.assemble(
        (" > " if chosen else "   ", "bold cyan"),
        ((f"{number + 1} " if number < NUMBERED else "  "), "dim"),
        (f"{sign} ", style),
        (clean(view.host)[:host_cells].ljust(host_cells) + " ", "bold" if chosen else ""),
        (state[:STATE].ljust(STATE + 1), style),
    )
    cells = BAR if width >= NARROW else NARROW_BAR
    if progress is not None:
        filled, rest = bar(progress.fraction, cells, ascii_only=glyphs is not UNICODE)
        share = "" if progress.fraction is None else f"{progress.fraction * 100:.0f} %"
        line.append_text(Text.assemble((filled, "cyan"), (rest, "bright_black"), (share.rjust(6), "bold")))
    else:
        line.append(duration_text(view.elapsed_s(shot.now), running=True).ljust(cells + 6), style="dim")
    for text, cells, shade in _details(shot, narrow=width < NARROW):
        # What does not fit is left out; its place is kept where a later row may have it.
        if line.cell_len + max(cells, len(text)) > width:
            break
        line.append(text.ljust(cells), style=shade)
    return line


def _details(shot: Snapshot, *, narrow: bool) -> list[tuple[str, int, str]]:
    """Return what a row says beyond its state, the most wanted first: text, cells, style."""
    view, progress = shot.view, shot.view.progress
    running = view.end is None
    use = None
    if running and view.samples:
        latest = view.samples[-1]
        use = mean_util(latest.gpus) if latest.gpus else latest.cpu_percent
    rate = view.tokens_per_s if running else view.tokens_per_s_overall
    count = ""
    if progress is not None:
        count = f"  {amount_text(progress.done, progress.unit)}"
        count += "" if progress.total is None else f"/{amount_text(progress.total, progress.unit)}"
    failed = f"  {count_text(progress.failed)} failed" if progress and progress.failed else ""
    return [
        (failed, 0, "bold red"),
        (count, 13, ""),
        (_time_text(shot, narrow=narrow), 20 if narrow else 27, ""),
        (f"  {count_text(rate)} tokens/s" if rate is not None else "", 20, ""),
        (f"  {number_text(use, '%')} used" if use is not None else "", 12, ""),
        (f"  {bytes_text(progress.bytes)}" if progress is not None else "", 11, ""),
        (f"  {clean(view.run)}", 0, "dim"),
    ]


def _time_text(shot: Snapshot, *, narrow: bool) -> str:
    """Return the time left; where that is not known, how long its stage takes; of an end, the stage it came in."""
    view = shot.view
    if (waited := pause_seconds(view, shot.host_now)) is not None:
        return f"  disk full {duration_text(waited, running=True)}"
    if left := left_text(view):
        return "  " + (left.replace(" to last sample", " to last") if narrow else left)
    ended = last_stage(view) if view.end is not None else None
    if ended is not None:
        return f"  in {clean(ended.phase or ended.step)}" + (
            "" if ended.seconds is None else f", {duration_text(ended.seconds)}"
        )
    stage = at_work(view)
    if view.end is not None or stage is None or stage.started is None:
        return ""
    now = shot.now if stage in view.stages else shot.host_now
    return f"  for {duration_text(now - stage.started, running=True)}"

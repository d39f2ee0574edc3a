"""How far the samples are, what they came to, how fast, and whether the disk holds what is still to come."""

from __future__ import annotations

from rich.text import Text

from controller.core.runview import ProgressView, RunView, Status
from controller.ui.board import Snapshot
from controller.ui.charts import bar
from controller.ui.clean import clean
from controller.ui.formats import (
    Ending,
    amount_text,
    bytes_text,
    count_text,
    duration_text,
    ending_of,
    left_text,
)
from controller.ui.glyphs import UNICODE, Glyphs
from controller.ui.layout import BAR_MAX, LABEL

QUIET_SHOWN_S = 60.0
"""Silence is mentioned from here on: loading shards and compiling graphs are often quiet for half a minute."""

ROOMY_WIDTH = 90
"""Columns from which on the disk has a line of its own."""


_SHADES = {Ending.WELL: "cyan", Ending.STOPPED: "yellow", Ending.BADLY: "red"}


def progress_lines(view: RunView, width: int, glyphs: Glyphs, *, roomy: bool) -> list[Text]:
    """Return the bar, the figures and the disk; where there is little room the disk is one of the figures.

    A disk that will be full before the last sample always has its line.
    """
    progress = view.progress
    if progress is None:
        return []
    short = _disk_too_small(view)
    own_line = view.disk_free is not None and view.end is None and (roomy or short)
    lines = [_bar(view, progress, width, glyphs)]
    if figures := _figures(view, progress, width, glyphs, disk=not own_line):
        lines.append(Text.assemble(" " * LABEL, Text(glyphs.separator).join(figures)))
    if own_line:
        lines.append(_disk(view, glyphs, short=short))
    return lines


def quiet_line(shot: Snapshot) -> list[Text]:
    """Return a line on a silence that lasts."""
    view = shot.view
    if shot.quiet_s < QUIET_SHOWN_S or view.end is not None or not view.state:
        return []
    line = Text(" " * LABEL + f"no output for {duration_text(shot.quiet_s, running=True)}", style="yellow")
    if view.phase is not None and view.phase.status is Status.STARTED:
        line.append(f"; {clean(view.phase.name)} is under way", style="yellow")
    return [line]


def _bar(view: RunView, progress: ProgressView, width: int, glyphs: Glyphs) -> Text:
    done = amount_text(progress.done, progress.unit)
    figures = f"{done}/{amount_text(progress.total, progress.unit)}"
    if progress.total is None:
        figures = f"{done} so far"
    elif progress.fraction is not None:
        figures += f"  {progress.fraction * 100:.0f} %"
    left = left_text(view)
    tail = Text("  " + figures + " ", style="bold")
    if left:
        tail.append(f"  {left} ", style="")
    cells = min(BAR_MAX, max(4, width - LABEL - tail.cell_len - 1))
    filled, rest = bar(progress.fraction, cells, ascii_only=glyphs is not UNICODE)
    shade = "cyan" if view.end is None else _SHADES[ending_of(view.end.end_reason)]
    return Text.assemble(
        (f" {clean(progress.unit)}"[: LABEL - 1].ljust(LABEL), "dim"),
        (filled, shade),
        (rest, "bright_black"),
        tail,
    )


def _figures(view: RunView, progress: ProgressView, width: int, glyphs: Glyphs, *, disk: bool) -> list[Text]:
    """What the samples came to. On a narrow terminal some give way; skipped and failed never do.

    Before the first sample it has come to nothing, which the bar says.
    """
    running = view.end is None
    now = view.tokens_per_s if running and progress.has_tokens else None
    begun = progress.done > 0 or progress.tokens > 0
    written = progress.bytes > 0 or (progress.unit == "samples" and begun)
    speed = view.bytes_per_s if running and (written or progress.unit == "bytes") else None
    # What a command says beside its count, a loss for example, stands first.
    figures = {
        **{f"value {name}": f"{clean(name)} {clean(value)}" for name, value in progress.values.items()},
        "now": "" if now is None else f"{count_text(now)} tokens/s",
        "speed": "" if speed is None else f"{bytes_text(speed)}/s",
        "overall": "",
        "tokens": f"{count_text(progress.tokens)} tokens" if progress.has_tokens and begun else "",
        "bytes": bytes_text(progress.bytes) if written and progress.unit != "bytes" else "",
        "disk": f"disk {bytes_text(view.disk_free)} left" if disk and running and view.disk_free is not None else "",
        "skipped": f"{count_text(progress.skipped)} skipped" if progress.skipped else "",
        "failed": f"{count_text(progress.failed)} failed" if progress.failed else "",
    }
    if view.tokens_per_s_overall is not None and progress.has_tokens:
        figures["overall"] = f"{count_text(view.tokens_per_s_overall)}{'' if figures['now'] else ' tokens/s'} overall"
    optional = ["overall", "tokens", "disk", "bytes", "speed"]
    while LABEL + len(glyphs.separator.join(filter(None, figures.values()))) > width and optional:
        figures[optional.pop(0)] = ""
    styles = {"skipped": "yellow", "failed": "bold red"}
    return [Text(figure, style=styles.get(name, "")) for name, figure in figures.items() if figure]


def _disk(view: RunView, glyphs: Glyphs, *, short: bool) -> Text:
    still = _still_to_write(view)
    # Where all that is to come has room, or where it cannot be known, the rate of the past foretells nothing.
    full = view.disk_full_s if _disk_too_small(view) or (view.progress and view.progress.total is None) else None
    parts = [f"{'too little room: ' if short else ''}{bytes_text(view.disk_free)} left"]
    if still is not None:
        parts.append(f"{bytes_text(still)} still to write")
    if full is not None:
        parts.append(f"full in {duration_text(full)} at this rate")
    return Text.assemble(
        (" disk".ljust(LABEL), "dim"), (glyphs.separator.join(parts), "bold yellow" if short else "")
    )


def _still_to_write(view: RunView) -> float | None:
    """Bytes of the samples that are not done yet, if they are like those that are.

    None if none are, where that is not known, and where no more are to come.
    """
    progress = view.progress
    if progress is None or view.cut_off or progress.total is None or not progress.done or not progress.bytes:
        return None
    return max(0, progress.total - progress.done) * progress.bytes / progress.done or None


def _disk_too_small(view: RunView) -> bool:
    still = _still_to_write(view)
    return still is not None and view.disk_free is not None and still > view.disk_free

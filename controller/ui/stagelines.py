"""The stages of a run side by side with their times, and what the one at work does."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from controller.core.runview import CAPTURING, RunView, StageView, Status, at_work
from controller.ui.board import Snapshot
from controller.ui.charts import bar
from controller.ui.clean import clean
from controller.ui.formats import duration_text, is_paused, pause_seconds
from controller.ui.glyphs import UNICODE, Glyphs
from controller.ui.layout import BAR_MAX, LABEL
from remote_payload.host.codes import STOPPING

SPIN_HZ = 4

_STYLES = {Status.STARTED: "bold", Status.DONE: "", Status.FAILED: "bold red", Status.SKIPPED: "dim"}
_GLYPH_STYLES = {Status.STARTED: "cyan", Status.DONE: "green", Status.FAILED: "bold red", Status.SKIPPED: "dim"}

_DOES = {
    "connect": "opening the connection",
    "push": "sending the payload",
    "preflight": "looking at the host; nothing is changed",
    "confirm": "waiting for an answer",
    "launch": "waiting for the supervisor's word",
    "recheck": "looking at the GPUs once more",
    "rehearse": "trying everything on a model cut from this one",
    "clear": "clearing the output folder of what was shown",
    "claim": "marking the output folder as this run's",
    "command": "the command runs",
    "verify": "reading back what was written",
    "data": "reading the data set",
    "load": "loading the weights, then compiling",
    "probe": "one short sample, to see what the model gives",
    "canary": "comparing captured states with a reference",
    "capture": "capturing hidden states",
    "drain": "writing what is still in memory",
    "canary-end": "comparing states once more at the end",
}

_IN_SHORT = {"load": "loading the weights"}
"""The same where the line would be too long for it."""

_COUNTED = ("capture", "command")
"""Stages that are nothing but what the row of the progress counts."""

_LAST = ("drain", "canary-end")
"""The phases of the driver after which, one by one, nothing is left but to end."""


def stage_lines(shot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    """Return a line for the controller, the supervisor and the driver each, as far as they have begun."""
    view = shot.view
    spin = spinner(shot.now, glyphs)
    rows = (
        ("ctl", view.own_stages, shot.now),
        ("host", view.steps, shot.host_now),
        ("job", view.phases, shot.host_now),
    )
    return [
        _flow(label, stages, width, at if view.ended is None else None, spin, glyphs)
        for label, stages, at in rows
        if stages
    ]


def told_by_progress(view: RunView) -> bool:
    """Whether the row of the progress says all that `work_line` would: how far the stage at work is, how long yet.

    It does not of a load, of a pause or of an end, whatever was counted before.
    """
    stage = at_work(view)
    return stage is not None and stage.name in _COUNTED and not is_paused(view) and not view.cut_off


def work_line(shot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    """Return a line on the innermost stage at work: what it does, how far, and how long it usually takes.

    On a narrow terminal the first is shortened, and gives way at last: the stage's name stands above.
    """
    stage = at_work(shot.view)
    if stage is None or shot.view.end is not None:
        return []
    waited = pause_seconds(shot.view, shot.host_now)
    if waited is not None:
        text = f"waiting for room on the disk{glyphs.separator}for {duration_text(waited, running=True)}"
        return [Text.assemble((f" {glyphs.warn} now".ljust(LABEL) + text, "yellow"))]
    head = f" {spinner(shot.now, glyphs)} now".ljust(LABEL)
    if shot.view.cut_off:
        told = [notice.text for notice in shot.view.notices if notice.code == STOPPING]
        return [Text.assemble((head, "cyan"), clean(told[-1]) if told else "ending the processes of the run")]
    if stage.fraction is not None:
        return [_bar(head, stage, shot, width, glyphs)]
    parts = [_DOES.get(stage.name, clean(stage.name))]
    last = shot.view.phases[-1] if shot.view.phases else None
    if stage.name == "extract" and last and last.name in _LAST and last.status is Status.DONE:
        parts = ["shutting down the engine"]  # of which the driver tells no phase
    if stage.name == "load" and shot.shards is not None:
        parts.append(f"{shot.shards[0]} of {shot.shards[1]} shards")
    # Earlier runs took their time for all samples, of which a resumed one captures what is left.
    unlike = stage.name in CAPTURING and shot.view.kept > 0
    if (usual := shot.usual.get(stage.name)) is not None and not unlike:
        parts.append(f"usually {duration_text(usual)}")
    if LABEL + len(glyphs.separator.join(parts)) > width:
        parts[0] = _IN_SHORT.get(stage.name, parts[0])
    if len(parts) > 1 and LABEL + len(glyphs.separator.join(parts)) > width:
        del parts[0]
    return [Text.assemble((head, "cyan"), glyphs.separator.join(parts))]


def _bar(head: str, stage: StageView, shot: Snapshot, width: int, glyphs: Glyphs) -> Text:
    """Draw how far a stage is, and how long it takes at this pace."""
    fraction = stage.fraction or 0.0
    tail = f"  {fraction * 100:.0f} %"
    if stage.started is not None and 0 < fraction < 1:
        tail += f"  {duration_text((shot.now - stage.started) * (1 - fraction) / fraction)} left"
    cells = min(BAR_MAX, max(4, width - LABEL - cell_len(tail) - 1))
    filled, rest = bar(fraction, cells, ascii_only=glyphs is not UNICODE)
    return Text.assemble((head, "cyan"), (filled, "cyan"), (rest, "bright_black"), (tail, "bold"))


def spinner(now: float, glyphs: Glyphs) -> str:
    """Return the frame of the spinner at `now`."""
    return glyphs.spinner[int(now * SPIN_HZ) % len(glyphs.spinner)]


def _flow(label: str, stages: Sequence[StageView], width: int, now: float | None, spin: str, glyphs: Glyphs) -> Text:
    """Draw stages side by side; where the row is too long, those that went well are counted instead."""
    head = Text.assemble((f" {label}".ljust(LABEL), "dim"))
    parts = [_stage(stage, now, spin, glyphs) for stage in stages]
    for folded in range(len(parts)):
        row = head.copy()
        if folded:
            seconds = sum(stage.seconds or 0.0 for stage in stages[:folded])
            row.append_text(
                Text.assemble((glyphs.ok, "green"), f" {folded} done ", (duration_text(seconds), "dim"), "  ")
            )
        row.append_text(Text("  ").join(parts[folded:]))
        if row.cell_len <= width or stages[folded].status not in (Status.DONE, Status.SKIPPED):
            break
    told = [stage for stage in stages if stage.status in (Status.STARTED, Status.FAILED) and stage.text]
    if told:
        row.append("  " + clean(told[-1].text), style="dim")
    return row


def _stage(stage: StageView, now: float | None, spin: str, glyphs: Glyphs) -> Text:
    sign = {Status.STARTED: spin, Status.DONE: glyphs.ok, Status.FAILED: glyphs.fail, Status.SKIPPED: glyphs.skip}
    glyph = sign[stage.status]
    seconds = stage.seconds
    running = stage.status is Status.STARTED
    style = _GLYPH_STYLES[stage.status]
    if (stage.name, stage.status) == ("confirm", Status.FAILED):
        glyph, style = glyphs.warn, "bold yellow"  # somebody said no, and nothing went wrong
    if running and now is None:
        # The run has ended: nothing turns any more, and a stop has come to what it was for.
        over = Status.DONE if stage.name == "stop" else Status.SKIPPED
        glyph, style = sign[over], _GLYPH_STYLES[over]
    elif running and now is not None and stage.started is not None:
        seconds = now - stage.started
    part = Text.assemble((glyph, style), " ", (clean(stage.name), _STYLES[stage.status]))
    if seconds is not None:
        part.append(" " + duration_text(seconds, running=running), style="" if running else "dim")
    return part

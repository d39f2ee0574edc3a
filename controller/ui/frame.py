"""One frame of the dashboard, as a pure function of what is known and of the terminal's size.

What matters most is drawn first and never gives way: the state, the stages, the progress, failures. GPUs shrink
from rows to a grid to one line; the log takes what is left. Colours are the terminal's own sixteen, and nothing is
told by colour alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from controller.core.logs import Level, LogLine
from controller.core.runview import Contact, ProgressView, RunView, StageView, Status
from controller.core.tracebacks import FoldedFailure
from controller.ui.charts import bar
from controller.ui.clean import clean, clean_block
from controller.ui.formats import bytes_text, count_text, duration_text, gpus_clean_text, plural, state_text
from controller.ui.gauges import gpu_lines
from controller.ui.glyphs import UNICODE, Glyphs

QUIET_SHOWN_S = 60.0
"""Silence is mentioned from here on: loading shards and compiling graphs are often quiet for half a minute."""

MESSAGES = 3
"""Warnings shown at a time; all are in the run folder."""

MESSAGE_LINES = 4
"""Of an exception's message; it is shown whole at the end."""

LOG_MIN = 4
"""Rule and lines that the log keeps before GPUs give way."""

BAR_MAX = 80
"""Cells; a longer bar says no more, and draws the eye from the figures behind it."""

LABEL = 9
"""Cells of the column that names a row."""

_STYLES = {Status.STARTED: "bold", Status.DONE: "", Status.FAILED: "bold red", Status.SKIPPED: "dim"}
_GLYPH_STYLES = {Status.STARTED: "cyan", Status.DONE: "green", Status.FAILED: "bold red", Status.SKIPPED: "dim"}


def render(
    view: RunView,
    log_tail: Sequence[LogLine],
    width: int,
    height: int,
    now: float,
    *,
    quiet_s: float = 0.0,
    host_behind_s: float = 0.0,
    glyphs: Glyphs = UNICODE,
) -> RenderableType:
    """Return a frame of at most `height` lines of at most `width` cells.

    `now` is seconds since the epoch on this machine, `host_behind_s` how much the host's clock is behind it,
    `quiet_s` the seconds since the job last wrote anything.
    """
    spin = glyphs.spinner[int(now * 4) % len(glyphs.spinner)]
    host_now = now - host_behind_s
    top = [
        *_header(view, width, now, glyphs),
        *_stage_lines(view, width, now, host_now, spin, glyphs),
    ]
    work = [*_progress(view, width, glyphs), *_quiet(view, quiet_s)]
    messages = _messages(view, glyphs)
    room = height - len(top) - len(work) - len(messages)
    failures = _failures(view.exceptions, width, max(LOG_MIN, room - LOG_MIN) // (1 if view.end else 2), glyphs)
    room -= len(failures)
    # After the end the last sample is stale, and would contradict what was measured since.
    gpus = [] if view.end is not None else gpu_lines(view.samples, width, room - LOG_MIN, LABEL, glyphs)
    room -= len(gpus)
    sections = [part for part in (top, gpus, work, messages, failures) if part]
    spacing = room - LOG_MIN >= 2 * len(sections) and height >= 26
    lines: list[Text] = []
    for section in sections:
        if spacing and lines:
            lines.append(Text(""))
            room -= 1
        lines += section
    lines += _log(log_tail, width, room, glyphs)
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis" if glyphs is UNICODE else "crop")
    return Group(*lines[:height])


def _header(view: RunView, width: int, now: float, glyphs: Glyphs) -> list[Text]:
    style = "cyan"
    sign = glyphs.dot
    if view.end is not None:
        succeeded = view.end.end_reason == "succeeded"
        style, sign = ("green", glyphs.ok) if succeeded else ("red", glyphs.fail)
    elif view.state in ("orphaned", "lost"):
        style = "yellow"
    left = Text.assemble(" ", (sign, f"bold {style}"), " ", (clean(state_text(view)), f"bold {style}"))
    if view.contact is not Contact.CONNECTED and view.end is None:
        left.append(" when last seen", style="dim")
    lines = [_spread(left, Text(duration_text(view.elapsed_s(now), running=True) + " ", style="bold"), width)]
    names = [clean(part) for part in (view.playbook, view.host and f"on {view.host}") if part]
    lines.append(_spread(Text("   " + " ".join(names)), Text(clean(view.run) + " ", style="dim"), width))
    if view.contact is not Contact.CONNECTED and view.end is None:
        since = "" if view.contact_since is None else f" for {duration_text(now - view.contact_since, running=True)}"
        words = "host out of reach" if view.contact is Contact.LOST else "reconnecting"
        lines.append(
            Text.assemble(
                " ", (f"{glyphs.warn} {words}{since}", "bold yellow"), ("; the run goes on without us", "yellow")
            )
        )
        if view.contact_text:
            lines.append(Text("   " + clean(view.contact_text), style="dim"))
    if view.end is not None:
        known = [clean(view.end.message), gpus_clean_text(view.end)]
        lines.append(Text("   " + glyphs.separator.join(part for part in known if part)))
    return lines


def _stage_lines(view: RunView, width: int, now: float, host_now: float, spin: str, glyphs: Glyphs) -> list[Text]:
    rows = (("ctl", view.stages, now), ("host", view.steps, host_now), ("job", view.phases, host_now))
    return [
        _flow(label, stages, width, at if view.ended is None else None, spin, glyphs)
        for label, stages, at in rows
        if stages
    ]


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
    if running and now is None:
        glyph = glyphs.skip  # the run has ended: nothing turns any more
    elif running and now is not None and stage.started is not None:
        seconds = now - stage.started
    part = Text.assemble((glyph, _GLYPH_STYLES[stage.status]), " ", (clean(stage.name), _STYLES[stage.status]))
    if seconds is not None:
        part.append(" " + duration_text(seconds, running=running), style="" if running else "dim")
    return part


def _progress(view: RunView, width: int, glyphs: Glyphs) -> list[Text]:
    progress = view.progress
    if progress is None:
        return []
    figures = f"{count_text(progress.done)}/{count_text(progress.total)}"
    if progress.total is None:
        figures = f"{count_text(progress.done)} so far"
    elif progress.fraction is not None:
        figures += f"  {progress.fraction * 100:.0f} %"
    eta = view.eta_s if view.end is None and progress.fraction != 1.0 else None
    tail = Text("  " + figures + " ", style="bold")
    if eta is not None:
        tail.append(f"  {duration_text(eta)} left ", style="")
    cells = min(BAR_MAX, max(4, width - LABEL - tail.cell_len - 1))
    filled, rest = bar(progress.fraction, cells, ascii_only=glyphs is not UNICODE)
    well = view.end is None or view.end.end_reason == "succeeded"
    first = Text.assemble(
        (f" {clean(progress.unit)}"[: LABEL - 1].ljust(LABEL), "dim"),
        (filled, "cyan" if well else "red"),
        (rest, "bright_black"),
        tail,
    )
    return [first, _figures(view, progress, width, glyphs)]


def _figures(view: RunView, progress: ProgressView, width: int, glyphs: Glyphs) -> Text:
    """What the samples came to. On a narrow terminal some give way; skipped and failed never do."""
    now = view.tokens_per_s if view.end is None else None
    figures = {
        "now": "" if now is None else f"{count_text(now)} tokens/s",
        "overall": "",
        "tokens": f"{count_text(progress.tokens)} tokens",
        "bytes": bytes_text(progress.bytes),
        "skipped": f"{count_text(progress.skipped)} skipped" if progress.skipped else "",
        "failed": f"{count_text(progress.failed)} failed" if progress.failed else "",
    }
    if view.tokens_per_s_overall is not None:
        figures["overall"] = f"{count_text(view.tokens_per_s_overall)}{'' if figures['now'] else ' tokens/s'} overall"
    optional = ["tokens", "overall", "bytes"]
    while LABEL + len(glyphs.separator.join(filter(None, figures.values()))) > width and optional:
        figures[optional.pop(0)] = ""
    styles = {"skipped": "yellow", "failed": "bold red"}
    parts = [Text(figure, style=styles.get(name, "")) for name, figure in figures.items() if figure]
    return Text.assemble(" " * LABEL, Text(glyphs.separator).join(parts))


def _quiet(view: RunView, quiet_s: float) -> list[Text]:
    if quiet_s < QUIET_SHOWN_S or view.end is not None or not view.state:
        return []
    line = Text(" " * LABEL + f"no output for {duration_text(quiet_s, running=True)}", style="yellow")
    if view.phase is not None and view.phase.status is Status.STARTED:
        line.append(f"; {clean(view.phase.name)} is under way", style="yellow")
    return [line]


def _messages(view: RunView, glyphs: Glyphs) -> list[Text]:
    """Findings that are not ok and warnings, failures first, then the latest."""
    found = [(finding.level, finding.what, finding.fix) for finding in view.findings if finding.level != "ok"]
    found += [("warn", notice.text, "") for notice in view.notices if notice.level == "warn"]
    found.sort(key=lambda each: each[0] != "fail")
    fails = [each for each in found if each[0] == "fail"]
    warnings = [each for each in found if each[0] != "fail"]
    shown = (fails + warnings[::-1])[:MESSAGES]
    lines = []
    for level, what, fix in shown:
        sign, style = (glyphs.fail, "bold red") if level == "fail" else (glyphs.warn, "bold yellow")
        lines.append(Text.assemble(" ", (sign, style), " ", clean(what)))
        if level == "fail" and fix:
            lines.append(Text("   fix: " + clean(fix), style="dim"))
    if len(found) > len(shown):
        lines.append(Text(f"   {len(found) - len(shown)} more in the run folder", style="dim"))
    return lines


def _failures(failures: Sequence[FoldedFailure], width: int, room: int, glyphs: Glyphs) -> list[Text]:
    """The first failure with as many of its innermost lines as fit, the others by their last line."""
    if not failures:
        return []
    first = failures[0]
    heads = []
    for failure in failures[:3]:
        head = Text.assemble(" ", (glyphs.fail, "bold red"), " ", (clean(failure.first.label), "bold"))
        if failure.same_text:
            head.append(f" ({clean(failure.same_text)})", style="dim")
        head.append("  " + clean(failure.first.summary), style="red")
        heads.append(head)
    trace = [line for line in clean_block(first.first.traceback).splitlines() if line.strip()]
    # The last line is the message: it is folded where the others are cut.
    trace[-1:] = [piece for line in trace[-1:] for piece in textwrap.wrap(line, max(20, width - 4))[:MESSAGE_LINES]]
    space = max(2, room - len(heads) - 1)
    lines = [heads[0]]
    if len(trace) > space:
        hidden = plural(len(trace) - space, "line")
        lines.append(Text(f" {glyphs.gutter} {glyphs.ellipsis} {hidden} above, shown whole at the end", style="dim"))
    lines += [Text.assemble((f" {glyphs.gutter} ", "red"), line) for line in trace[-space:]]
    return lines + heads[1:]


def _log(log_tail: Sequence[LogLine], width: int, room: int, glyphs: Glyphs) -> list[Text]:
    if room < 2 or not log_tail:
        return []
    lines = [Text(f" log {glyphs.rule * max(0, width - 6)}", style="dim")]
    for entry in log_tail[-(room - 1) :]:
        line = Text.assemble((" " + _short(entry.source).ljust(LABEL - 1), "dim"))
        if width >= 90 and entry.time:
            line.append(entry.time + " ", style="dim")
        style = {Level.WARNING: "yellow", Level.ERROR: "red", Level.DEBUG: "dim"}.get(entry.level or Level.INFO, "")
        line.append(clean(entry.text), style=style)
        lines.append(line)
    return lines


def _short(source: str) -> str:
    """Shorten a process name to the label column: `Worker_TP3` to `TP3`, `EngineCore` to `engine`."""
    known = {"EngineCore": "engine", "MainProcess": "main", "Worker": "worker"}
    short = known.get(source, source.removeprefix("Worker_").replace("VllmWorker-", "TP"))
    return clean(short)[: LABEL - 2]


def _spread(left: Text, right: Text, width: int) -> Text:
    """Put one text at each end of a line; the left one gives way."""
    space = width - right.cell_len
    left.truncate(max(0, space - 1), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, space - left.cell_len), right)

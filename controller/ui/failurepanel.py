"""What went wrong: the cause and its remedy, the first failing rank's traceback, the others by their last line."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from controller.core.runview import RunView, Status
from controller.core.tracebacks import FoldedFailure
from controller.ui.clean import clean, clean_block
from controller.ui.formats import plural
from controller.ui.glyphs import Glyphs

MESSAGES = 3
"""Warnings shown at a time; the report lists all."""

UNTIL_CLEARED = ("output-clear", "output-quarantine")
"""Findings that say what will become of an output: past once it has been cleared."""

CAUSE_LINES = 4
"""Of why, and of the remedy each."""

HEADS = 3
"""Failures named in the panel; the whole traceback's pane has all of them."""


def message_lines(view: RunView, glyphs: Glyphs, *, refused: bool) -> list[Text]:
    """Findings that are not ok and warnings, failures first, then the latest; what is said twice stands once.

    `refused`: also what refused the run, where no error says it.
    """
    cleared = any(step.name == "clear" and step.status is Status.DONE for step in view.steps)
    found = [
        (finding.level, finding.what, finding.fix)
        for finding in view.findings
        if (finding.level == "warn" or (finding.level == "fail" and refused))
        and not (cleared and finding.code in UNTIL_CLEARED)
    ]
    found += [("warn", notice.text, "") for notice in view.warnings]
    found = list(dict.fromkeys(found))
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
        more = plural(len(found) - len(shown), "more warning")
        lister = (
            f"ctl report {clean(view.run)}" if view.state else "ctl preflight"
        )  # before a launch there is no report
        lines.append(Text(f"   and {more}: `{lister}` lists all", style="dim"))
    return lines


def cause_lines(cause: Mapping[str, Any] | None, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the cause as triage names it: what, why, and what to do."""
    if cause is None:
        return []
    word = "cause: " if cause.get("known") else ""
    lines = [Text.assemble((f" {glyphs.fail} {word}", "bold red"), (clean(cause.get("what", "")), "bold"))]
    lines += _paragraph("", str(cause.get("why") or ""), width, "")
    lines += _paragraph("fix: ", str(cause.get("fix") or ""), width, "green")
    return lines


def failure_lines(
    failures: Sequence[FoldedFailure], width: int, room: int, glyphs: Glyphs, *, keys: bool
) -> list[Text]:
    """Return the first failure with as many of its innermost lines as fit, the others by their last line."""
    if not failures:
        return []
    first, *others = [_head(failure, glyphs) for failure in failures[:HEADS]]
    trace = trace_lines(failures[:1], width, glyphs)[1:]
    space = max(2, room - len(others) - 2)
    lines = [first]
    if len(trace) > space:
        hidden = plural(len(trace) - space, "line")
        where = "t shows it whole" if keys else "shown whole at the end"
        lines.append(Text(f" {glyphs.gutter} {glyphs.ellipsis} {hidden} above, {where}", style="dim"))
    return lines + trace[-space:] + others


def trace_lines(failures: Sequence[FoldedFailure], width: int, glyphs: Glyphs) -> list[Text]:
    """Return every failure with its whole traceback, lines folded to `width` cells."""
    lines: list[Text] = []
    for failure in failures:
        lines.append(_head(failure, glyphs))
        for raw in clean_block(failure.first.traceback).splitlines():
            if not raw.strip():
                continue
            indent = len(raw) - len(raw.lstrip())
            follow = " " * min(indent, max(0, width // 3))
            pieces = textwrap.wrap(raw, max(20, width - 4), subsequent_indent=follow) or [raw]
            lines += [Text.assemble((f" {glyphs.gutter} ", "red"), piece) for piece in pieces]
    return lines


def _head(failure: FoldedFailure, glyphs: Glyphs) -> Text:
    head = Text.assemble(" ", (glyphs.fail, "bold red"), " ", (clean(failure.first.label), "bold"))
    if failure.same_text:
        head.append(f" ({clean(failure.same_text)})", style="dim")
    return head.append("  " + clean(failure.first.summary), style="red")


def _paragraph(label: str, text: str, width: int, style: str) -> list[Text]:
    pieces = [
        piece
        for line in clean_block(text).splitlines()
        for piece in textwrap.wrap(line, max(20, width - 3 - len(label) - 1))
    ]
    if len(pieces) > CAUSE_LINES:
        pieces = [*pieces[: CAUSE_LINES - 1], pieces[CAUSE_LINES - 1] + " ..."]
    return [
        Text.assemble("   ", (label if index == 0 else " " * len(label), "bold"), (piece, style))
        for index, piece in enumerate(pieces)
    ]

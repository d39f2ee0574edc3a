"""Plans, findings, runs and summaries as a notebook shows them (HTML) and as a terminal does (text).

A bundle is what IPython's `_repr_mimebundle_` returns: both forms, of which the frontend takes one. Everything is
escaped or cleaned: much of it was written by a host.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from controller.ui import tables
from controller.ui.clean import Encodable, clean
from controller.ui.formats import UNKNOWN, count_text, css_of, end_text, state_word, summary_end
from controller.ui.markup import Markup, block, escape, facts, join, table, tag
from controller.ui.summaryrows import summary_rows

TEXT_WIDTH = 100
"""Columns of the text form, which does not know the width it is shown at."""

STYLE = Markup(
    "<style>.ctl table{border-collapse:collapse;margin:.3em 0}"
    ".ctl th,.ctl td{text-align:left!important;vertical-align:top;padding:.15em .9em .15em 0;border:0;"
    "background:none}"
    ".ctl th{font-weight:500;opacity:.75;white-space:nowrap}.ctl pre{white-space:pre-wrap;margin:.3em 0}"
    ".ctl .good,.ctl .ok{color:#1a936f}.ctl .warn{color:#b8860b}.ctl .bad,.ctl .fail{color:#d0342c}"
    ".ctl .good,.ctl .warn,.ctl .bad,.ctl .ok,.ctl .fail{font-weight:600}.ctl .soft{opacity:.75}"
    ".ctl .num td+td{text-align:right!important;font-variant-numeric:tabular-nums}</style>"
)
"""For the output of one cell: no colour of text or paper is set, so that it suits a light and a dark notebook."""


def framed(*parts: object) -> Markup:
    """Return parts as one output of a cell."""
    return Markup(f'<div class="ctl">{STYLE}{join(parts)}</div>')


# ---------------------------------------------------------------------------------------------- plan


def plan_renderable(document: Mapping[str, Any]) -> RenderableType:
    return _captured(lambda console: tables.print_intention(console, document))


def plan_bundle(document: Mapping[str, Any]) -> dict[str, str]:
    """Return both forms of the document of `ctl plan`."""
    parts: list[Markup] = [tag("b", f"plan {document.get('run_id', '')}")]
    for section in document.get("sections") or ():
        parts += [
            tag("p", section["title"], "soft"),
            facts((label, _value(value)) for label, value in section["rows"]),
        ]
    return _bundle(plan_renderable(document), framed(*parts))


def _value(value: object) -> object:
    return join(map(escape, value), "<br>") if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------------------------ findings


def findings_renderable(host: str, findings: Sequence[tables.FindingLike]) -> RenderableType:
    return _captured(lambda console: tables.print_findings(console, host, findings))


def findings_bundle(host: str, findings: Sequence[tables.FindingLike]) -> dict[str, str]:
    """Return both forms of what preflight found: reason and fix only where something is not right."""
    rows = []
    for finding in findings:
        extra = [] if finding.level == "ok" else [part for part in (finding.why, finding.fix) if part]
        told = join([escape(finding.what), *(tag("div", part, "soft") for part in extra)])
        rows.append((tag("span", str(finding.level), str(finding.level)), told))
    return _bundle(
        findings_renderable(host, findings),
        framed(tag("b", f"preflight of {host}"), table(("", "found"), rows)),
    )


# ------------------------------------------------------------------------------------ summary and run


def summary_renderable(summary: Mapping[str, Any]) -> RenderableType:
    return _captured(lambda console: tables.print_summary(console, summary))


def summary_bundle(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return both forms of a summary.json."""
    return _bundle(summary_renderable(summary), framed(_summary(summary)))


def _summary(summary: Mapping[str, Any]) -> Markup:
    words, ending = summary_end(summary)
    head = tag("span", words, css_of(ending))
    hosts = ", ".join(map(str, summary.get("hosts") or ()))
    title = join([tag("b", f"run {summary.get('run_id', UNKNOWN)}"), escape(f" on {hosts}: "), head])
    rows = facts((label, value.plain) for label, value in summary_rows(summary))
    return join([tag("div", title), rows, _states(summary.get("states") or ())])


def _states(states: Sequence[Mapping[str, Any]]) -> Markup:
    if not states:
        return Markup()
    rows = [
        [
            state.get("boundary"),
            *(_number(state.get(name)) for name in ("norm_mean", "norm_max")),
            *(count_text(state.get(name)) for name in ("nan", "inf", "zero_rows")),
        ]
        for state in states
    ]
    return table(("boundary", "mean norm", "max norm", "NaN", "infinite", "zero rows"), rows, "num")


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def run_renderable(run: Mapping[str, Any]) -> RenderableType:
    """Return a run as text: its summary once it has ended, else where it stands."""
    if run["summary"] is not None:
        return summary_renderable(run["summary"])
    return Encodable(Text("\n".join(f"{label:<8}{clean(value)}" for label, value in _run_rows(run))))


def run_bundle(run: Mapping[str, Any]) -> dict[str, str]:
    """Return both forms of a run; see `Run._described` for its fields."""
    problem = run["problem"]
    content = facts(_run_rows(run)) if run["summary"] is None else _summary(run["summary"])
    trouble: list[Markup] = []
    if problem:
        told = [(name, problem[name]) for name in ("what", "why", "fix", "code") if problem.get(name)]
        trouble = [tag("p", "problem", "bad"), facts(told)]
        trouble += [block(problem["traceback"])] if problem.get("traceback") else []
    return _bundle(run_renderable(run), framed(content, *trouble))


def _run_rows(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    words = end_text(str(run["end_reason"])) if run["end_reason"] else state_word(str(run["state"]))
    rows = [("run", run["run_id"]), ("what", run["name"] or UNKNOWN), ("host", run["host"]), ("state", words)]
    return [*rows, ("copy", run["folder"])]


# --------------------------------------------------------------------------------------------- both forms


class _Collector(Console):
    """Takes what the tables print as renderables, to be laid out later at another width."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=TEXT_WIDTH, force_jupyter=False)
        self.parts: list[RenderableType] = []

    @property
    def encoding(self) -> str:
        return "utf-8"

    def print(self, *objects: Any, **_: Any) -> None:
        self.parts += objects


def _captured(show: Callable[[Console], None]) -> RenderableType:
    collector = _Collector()
    show(collector)
    return Group(*collector.parts)


def _bundle(renderable: RenderableType, markup: Markup) -> dict[str, str]:
    return {"text/plain": plain(renderable), "text/html": str(markup)}


def plain(renderable: RenderableType) -> str:
    """Return a renderable as text without styles; a rich console left to itself would display it in the cell."""
    console = Console(file=io.StringIO(), width=TEXT_WIDTH, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())

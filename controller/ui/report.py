"""A run on one page of HTML that needs nothing but itself: no network, no script, no other file.

Every value is put in by `ui.markup`, which escapes it: log lines, names and messages come from a host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.core.figures import Lengths, Manifest, NormMap
from controller.core.ledger import Fate
from controller.core.runview import ProgressView, RunView
from controller.core.timelines import Gauges, Rates, Span
from controller.core.tracebacks import range_text
from controller.ui import report_charts as charts
from controller.ui.formats import (
    UNKNOWN,
    amount_text,
    clock_text,
    count_text,
    duration_text,
    end_text,
    ending_css,
    state_text,
    state_word,
)
from controller.ui.markup import Markup, block, escape, facts, join, table, tag
from controller.ui.report_style import POLICY, STYLE
from controller.ui.summaryrows import summary_rows

FINDING_CSS = {"ok": "good", "warn": "warn", "fail": "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a report shows; None or empty is said to be unknown, or left out."""

    run_id: str
    host: str
    state: str
    plan: Mapping[str, Any] | None
    summary: Mapping[str, Any] | None
    result: Mapping[str, Any] | None
    triage: Mapping[str, Any] | None
    view: RunView
    command: str
    written: str
    """When the report was made and by what."""
    spans: Sequence[Span] = ()
    now_s: float = 0.0
    """Where stages end that had not ended, on the axis of the spans."""
    gauges: Gauges | None = None
    rates: Rates | None = None
    progress: Sequence[ProgressView] = ()
    """Every report of the job, in order."""
    norms: NormMap | None = None
    lengths: Lengths | None = None
    manifest: Manifest | None = None
    indexes: range = range(0)
    failed: Sequence[tuple[int, str, str]] = ()
    """(index, code, why) of the first samples that were not written."""


def page(report: Report) -> str:
    """Return the whole document."""
    sections = [(name, title, body) for name, title, body in _sections(report) if body]
    links = join(Markup(f'<a href="#{name}">{escape(title)}</a>') for name, title, _ in sections)
    body = join(
        Markup(f'<section id="{name}">{tag("h2", title)}{content}</section>') for name, title, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        # A browser asks for /favicon.ico of a page that names none, and the policy forbids what it asks.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(f'Run {report.run_id} on {report.host}')}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<header>{_header(report)}<nav>{links}</nav></header>\n<main>{body}</main>\n"
        f'<footer class="soft"><p>{escape(report.written)}</p></footer>\n</body>\n</html>\n'
    )


def _header(report: Report) -> Markup:
    reason = str((report.result or {}).get("end_reason") or "")
    pause = report.view.pause
    words = (
        end_text(reason)
        if reason
        else (state_word(report.state, pause.code if pause else None) or state_text(report.view))
    )
    css = ending_css(reason) if reason else ("bad" if report.state == "lost" else "warn")
    message = str((report.result or {}).get("message") or "")
    job = (report.plan or {}).get("job") or {}
    name = f"{job.get('kind', 'run')} {job.get('name', '')}".strip()
    return join(
        [
            tag("h1", f"{name} on {report.host}"),
            Markup(f"<p>{tag('span', words, css)}{escape(f': {message}' if message else '')}</p>"),
            tag("p", _when(report), "soft"),
        ]
    )


def _when(report: Report) -> str:
    started = str((report.plan or {}).get("created") or "")
    duration = (report.result or {}).get("duration_s")
    took = f", took {duration_text(duration)}" if isinstance(duration, int | float) and duration else ""
    return f"run {report.run_id}" + (f", planned {started}" if started else "") + took


def _sections(report: Report) -> Iterator[tuple[str, str, Markup]]:
    yield "problems", "Problems", _problems(report)
    yield "outcome", "Outcome", _outcome(report)
    yield "stages", "Stages", _stages(report)
    gpus = report.gauges is not None and any(gauge.name.startswith("gpu") for gauge in report.gauges.devices)
    yield "devices", "GPUs" if gpus else "CPU and memory", _devices(report)
    if report.rates is not None:
        yield "throughput", "Throughput", _figure(charts.throughput(report.rates), _rates_text(report.rates))
    yield "progress", "Progress", _progress(report.progress)
    yield "norms", "Norms", _norms(report)
    if report.lengths is not None:
        caption = f"Each bar holds samples of {report.lengths.width} lengths."
        yield "lengths", "Token lengths", _figure(charts.histogram(report.lengths), caption)
    yield "samples", "Samples", _samples(report)
    yield "findings", "Findings", _findings(report)
    yield "versions", "Where and with what", _versions(report)
    yield "repeat", "Repeat it", _repeat(report)


def _figure(chart: Markup, caption: str = "") -> Markup:
    return Markup(f"<figure>{chart}{tag('figcaption', caption) if caption else ''}</figure>")


def _problems(report: Report) -> Markup:
    """The cause first, then each problem with its whole traceback."""
    problems = (report.summary or {}).get("problems") or []
    told = any(problem.get("traceback") for problem in problems)
    # A cause that is not known is the exception itself, which the problems may tell already.
    parts = [_triage(report.triage)] if report.triage and not (told and not report.triage.get("known")) else []
    parts += [_problem(problem, first=number == 0) for number, problem in enumerate(problems)]
    if not problems and not report.triage:
        parts += [
            Markup(f'<div class="problem">{tag("h3", failure.first.label)}{block(failure.first.traceback)}</div>')
            for failure in report.view.exceptions
        ]
    return join(parts)


def _triage(cause: Mapping[str, Any]) -> Markup:
    rows = [(name, cause[name]) for name in ("why", "fix", "code") if cause.get(name)]
    where = [
        f"{quote.get('segment')}:{quote.get('line')}  {quote.get('text')}"
        for name in ("evidence", "context")
        for quote in cause.get(name) or ()
    ]
    title = tag("h3", ("Cause: " if cause.get("known") else "") + str(cause.get("what")))
    quotes = block("\n".join(where)) if where else ""
    return Markup(f'<div class="problem">{title}{facts(rows)}{quotes}</div>')


def _problem(problem: Mapping[str, Any], *, first: bool) -> Markup:
    ranks = [rank for rank in problem.get("ranks") or () if isinstance(rank, int)]
    where = f"ranks {range_text(ranks)}: " if len(ranks) > 1 else (f"rank {ranks[0]}: " if ranks else "")
    rows = [(name, problem[name]) for name in ("why", "fix", "code") if problem.get(name)]
    trace = ""
    if problem.get("traceback"):
        opened = " open" if first else ""
        trace = f"<details{opened}><summary>traceback</summary>{block(problem['traceback'])}</details>"
    title = tag("h3", where + str(problem.get("what") or problem.get("code") or "problem"))
    return Markup(f'<div class="problem">{title}{facts(rows) if rows else ""}{trace}</div>')


def _outcome(report: Report) -> Markup:
    if report.summary is None:
        word = "has no summary: it has not ended, or was lost" if report.result is None else "left no summary"
        return tag("p", f"This run {word}. What follows is what was copied of it so far.")
    return facts((label, value.plain) for label, value in summary_rows(report.summary))


def _stages(report: Report) -> Markup:
    if not report.spans:
        return Markup()
    caption = "ctl: this workstation; host: the supervisor's steps; job: phases inside the extraction."
    return _figure(charts.gantt(report.spans, report.now_s), caption)


def _devices(report: Report) -> Markup:
    if report.gauges is None:
        return Markup()
    started = f"From {clock_text(report.gauges.start)} on, this workstation's time of day."
    drawn = [
        draw(report.gauges)
        for draw, known in (
            (charts.utilisation, any(charts.known(gauge.util) for gauge in report.gauges.devices)),
            (charts.memory, any(charts.known(gauge.memory) for gauge in report.gauges.devices)),
        )
        if known
    ]
    return join(_figure(chart, started if chart is drawn[-1] else "") for chart in drawn)


def _progress(reports: Sequence[ProgressView]) -> Markup:
    """What a command said of where it is: its count, and each value at the first and the last report that has it."""
    if not reports or reports[-1].has_tokens:
        return Markup()
    last = reports[-1]
    of = "" if last.total is None else f" of {amount_text(last.total, last.unit)}"
    rows = [[last.unit, amount_text(reports[0].done, last.unit), amount_text(last.done, last.unit) + of]]
    for name in dict.fromkeys(name for each in reports for name in each.values):
        told = [each.values[name] for each in reports if name in each.values]
        rows.append([name, str(told[0]), str(told[-1])])
    return table(("what", "first", "last"), rows, "numbers")


def _rates_text(rates: Rates) -> str:
    step = f"In steps of {duration_text(rates.step_s)}; a sample counts when its file is complete."
    return step if rates.by_rank else step + " This run's ledgers do not say when, so the ranks are not told apart."


def _norms(report: Report) -> Markup:
    if report.norms is None:
        return Markup()
    states = (report.summary or {}).get("states") or []
    rows = [
        [
            state.get("boundary"),
            *(_norm_text(state.get(name)) for name in ("norm_mean", "norm_max")),
            *(_bad_count(state.get(name)) for name in ("nan", "inf", "zero_rows")),
        ]
        for state in states
        if isinstance(state, Mapping)
    ]
    heads = ("boundary", "mean norm", "max norm", "NaN", "infinite", "zero rows")
    figures = table(heads, rows, "numbers") if rows else Markup()
    caption = "A boundary is the number of decoder layers completed. The colour's scale is logarithmic."
    return join([_figure(charts.norms(report.norms), caption), figures])


def _norm_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else UNKNOWN


def _bad_count(value: object) -> Markup:
    if not isinstance(value, int):
        return escape(UNKNOWN)
    return tag("span", count_text(value), "bad") if value else escape("0")


def _samples(report: Report) -> Markup:
    if report.manifest is None or not report.manifest.cells:
        return Markup()
    counts = report.manifest.counts
    chart = charts.grid(report.manifest, report.indexes.start, report.indexes.step)
    parts = [_figure(chart, "In the order of the data set, left to right, then down.")]
    if report.failed:
        rows = [(count_text(index), code, why) for index, code, why in report.failed]
        title = "why samples are not there"
        listed = table(("sample", "code", "why"), rows, "list")
        parts.append(Markup(f"<details><summary>{escape(title)}</summary>{listed}</details>"))
        rest = sum(counts[fate] for fate in (Fate.SKIPPED, Fate.FAILED)) - len(report.failed)
        if rest > 0:
            parts.append(tag("p", f"and {count_text(rest)} more: see ledger/ in the run folder", "soft"))
    return join(parts)


def _findings(report: Report) -> Markup:
    rows = [
        (
            tag("span", finding.level, FINDING_CSS.get(finding.level, "")),
            finding.code,
            join([escape(finding.what), *(tag("p", part, "soft") for part in (finding.why, finding.fix) if part)]),
        )
        for finding in sorted(report.view.findings, key=lambda each: ("fail", "warn", "ok").index(each.level)
                              if each.level in FINDING_CSS else 3)
    ]  # fmt: skip
    notices = [
        (tag("span", notice.level, FINDING_CSS.get(notice.level, "soft")), notice.writer, notice.code, notice.text)
        for notice in report.view.notices
    ]
    parts = [table(("level", "code", "preflight found"), rows, "list")] if rows else []
    if notices:
        parts += [tag("h3", "While it ran"), table(("level", "writer", "code", "notice"), notices, "list")]
    return join(parts)


def _versions(report: Report) -> Markup:
    plan = report.plan or {}
    host = plan.get("host") or {}
    rows: list[tuple[object, object]] = [
        ("host", f"{report.host} ({host.get('address', UNKNOWN)}), {host.get('gpus') or 'no'} GPUs"),
        ("Python there", host.get("python", UNKNOWN)),
        ("run folder", f"{host.get('workdir', '')}/runs/{report.run_id}"),
        ("playbook", plan.get("playbook") or "none"),
    ]
    versions = (report.summary or {}).get("versions") or {"ctl": plan.get("ctl_version")}
    rows += [(name, value) for name, value in versions.items() if value is not None]
    spec = plan.get("extract") or {}
    settings = [(name, value) for name, value in spec.items() if name != "engine" and value is not None]
    settings += [(f"engine {name}", value) for name, value in (spec.get("engine") or {}).items()]
    detail = f"<details><summary>all settings of the extraction</summary>{facts(settings)}</details>"
    return join([facts(rows), Markup(detail) if settings else Markup()])


def _repeat(report: Report) -> Markup:
    if not report.command:
        return tag("p", "The plan of this run was never copied here.")
    note = "Flags that say no more than the playbook are written out too, so that a later edit of it changes nothing \
but the model, the engine's arguments and the limits."
    return join([block(report.command), tag("p", note, "soft")])

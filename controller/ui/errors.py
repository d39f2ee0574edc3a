"""Errors as a person reads them: what happened, why, what to do; a worker's traceback always whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from controller.core.errors import CtlError
from controller.core.tracebacks import Failure, FoldedFailure, fold, process_label, range_text
from controller.core.triage_entry import is_told
from controller.ui.clean import Encodable, clean, clean_block
from controller.ui.glyphs import glyphs_for
from controller.ui.wrapping import wrapped, wrapped_advice


def print_error(error: CtlError, console: Console | None = None) -> None:
    """Print what, why, then the hint and the stable code. No command is wrapped, so that it can be copied.

    Where several checks refused, each is an error of its own.
    """
    target = _target(console)
    found = error.data.get("findings")
    failed = [each for each in found if each["level"] == "fail"] if isinstance(found, list) else []
    if len(failed) > 1:
        _write(target, _head(f"preflight refused: {len(failed)} checks failed, nothing was launched", target))
        for each in failed:
            _write(target, Text(""))
            print_error(CtlError(each["what"], why=each["why"], fix=each["fix"], code=each["code"]), target)
        return
    _write(target, _head(error.what, target))
    if error.why:
        _write(target, _prose(error.why, target))
    if error.fix:
        _write(target, Text(""))
        _write(target, _hint(error.fix, target))
    _write(target, Text(f"  code: {clean(error.code)}", style="dim"))


def print_failures(
    failures: Sequence[FoldedFailure],
    log: Path | str | None = None,
    console: Console | None = None,
    *,
    cause: Mapping[str, Any] | None = None,
    told: Collection[tuple[object, ...]] = (),
) -> None:
    """Print failures, nearest the cause first. The nearest ones whole; of those that only repeat them the last line.

    `log` is where the raw output lies. `cause` is a record of `core.triage` that is printed beside them: one that was
    seen outside of every traceback, as a killed process is, makes all that merely followed from it a line each.
    `told` are causes (see `Failure.cause`) whose tracebacks stand whole above: only what raised is said of them.
    """
    target = _target(console)
    named = cause is not None and cause["known"] and not cause["traceback"]
    roots = [each.first.distance for each in failures if not is_told(each.first)]
    nearest = min(roots or [each.first.distance for each in failures], default=0)
    for failure in failures:
        first = failure.first
        where = f", at {first.where}" if first.where else ""
        known = first.cause in told
        if first.distance > nearest or (is_told(first) and (roots or named)):
            line = Text.assemble(("  then ", "dim"), (clean(first.label), "bold"), ": ", clean(first.summary))
            if not known:
                _write(target, line)
            continue
        headline, *rest = first.summary.split("\n")
        _write(target, _head(f"{first.label}: {headline}{where}", target))
        if rest:
            _write(target, _indented("\n".join(rest)))
        if known:
            _write(target, Text("  its traceback stands above", style="dim"))
            continue
        _write(target, _indented(first.traceback.rstrip() or "no traceback was recorded"))
        if failure.same_text:
            _write(target, Text(f"  {clean(failure.same_text)}", style="bold"))
        for other in failure.different_messages:
            _write(target, Text.assemble(("    there, ", "dim"), f"{clean(other.label)}: {clean(other.message)}"))
    if failures and log is not None:
        _write(target, Text.assemble(("  raw log: ", "dim"), clean(log)))


def print_problems(
    problems: Sequence[Mapping[str, Any]],
    log: Path | str | None = None,
    console: Console | None = None,
    *,
    cause: Mapping[str, Any] | None = None,
    told: Collection[tuple[object, ...]] = (),
) -> None:
    """Print the `problems` of a summary: exceptions as `print_failures`, then the others as errors."""
    target = _target(console)
    failures = [failure for problem in problems if problem.get("traceback") for failure in _failures(problem)]
    print_failures(fold(failures), log, target, cause=cause, told=told)
    for problem in problems:
        if not problem.get("traceback"):
            error = CtlError(
                str(problem.get("what", "")),
                why=str(problem.get("why") or ""),
                fix=str(problem.get("fix") or ""),
                code=str(problem.get("code") or "problem"),
            )
            print_error(error, target)


def print_stopped(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Say in one line that processes reported errors while their run was stopped; their tracebacks are in the log."""
    raised = [problem for problem in summary.get("problems") or () if problem.get("traceback")]
    if raised:
        count = sum(len(problem.get("ranks") or [None]) for problem in raised)
        who = "one process" if count == 1 else f"{count} processes"
        run_id = clean(summary.get("run_id"))
        line = f"  {who} reported an error while it was stopped; that is usual, and in `ctl logs {run_id}`"
        _write(_target(console), Text(line, style="dim"))


def print_triage(
    cause: Mapping[str, Any], log: Path | str | None = None, console: Console | None = None, *, fix: bool = True
) -> None:
    """Print a record of `core.triage`: the cause, the lines that show it with their places, and what to do."""
    target = _target(console)
    rank, source = cause.get("rank"), str(cause.get("source") or "")
    where = process_label(source, rank) if source or rank is not None else ""
    ranks = list(cause.get("ranks") or ())
    where += f" (same on ranks {range_text(ranks)})" if len(ranks) > 1 else ""
    what = ("cause: " if cause["known"] else "") + str(cause["what"]) + (f", first on {where}" if where else "")
    if not fix:
        what += f" ({cause['code']})"
    _write(target, _head(what, target))
    if cause.get("why"):
        _write(target, _prose(str(cause["why"]), target))
    for title, name in (("evidence", "evidence"), ("the machine said", "context")):
        # A quote that says what the headline says, and has no place in the log, says nothing more.
        quotes = [each for each in cause.get(name) or () if each["line"] or str(cause["what"]) not in each["text"]]
        for number, quote in enumerate(quotes):
            place = f"{quote['segment']}:{quote['line']}" if quote["line"] else quote["segment"]
            lead = (f"  {title}: ", "bold") if number == 0 else (" " * (len(title) + 4), "")
            _write(target, Text.assemble(lead, (clean(place), "cyan"), "  ", clean(quote["text"])))
    if log is not None:
        _write(target, Text.assemble(("  raw log: ", "dim"), clean(log)))
    if fix and cause.get("fix"):
        _write(target, _hint(str(cause["fix"]), target))
    if fix:
        _write(target, Text(f"  code: {clean(cause['code'])}", style="dim"))


def print_unknown(cause: Mapping[str, Any], console: Console | None = None) -> None:
    """Print after an exception that no cause is known of it, where in the log it stands, and what may be missing."""
    target = _target(console)
    quote = next((quote for quote in cause.get("evidence") or () if quote["line"]), None)
    place = f"; in the log: {quote['segment']}:{quote['line']}" if quote is not None else ""
    _write(target, Text.assemble(("  unknown cause", "bold"), clean(place)))
    if cause.get("why"):
        _write(target, _prose(str(cause["why"]), target))
    if cause.get("fix"):
        _write(target, _hint(str(cause["fix"]), target))


def stands_above(problem: Mapping[str, Any], told: Collection[tuple[object, ...]]) -> bool:
    """Whether all that a problem of a summary raised was told; `told` as for `print_failures`."""
    return bool(problem.get("traceback")) and all(failure.cause in told for failure in _failures(problem))


def _failures(problem: Mapping[str, Any]) -> list[Failure]:
    """Return one failure for each rank that a problem names; None is a process without one."""
    exc_type, _, message = str(problem.get("what", "")).partition(": ")
    return [
        Failure(
            # Problems of earlier payloads do not name their writer; the driver's were the most.
            source=str(problem.get("writer", "driver")) if rank is None else f"rank-{rank}",
            rank=rank,
            exc_type=exc_type,
            message=message,
            traceback=str(problem["traceback"]),
            where=str(problem.get("where") or ""),
        )
        for rank in problem.get("ranks") or [problem.get("rank")]
    ]


def _target(console: Console | None) -> Console:
    return console or Console(stderr=True, highlight=False)


def _head(what: str, console: Console) -> Text:
    shown = wrapped(clean(what), console, 2).replace("\n", "\n  ")
    return Text.assemble((glyphs_for(console.encoding).fail, "bold red"), " ", (shown, "bold"))


def _indented(value: str) -> Text:
    return Text("\n".join(f"  {line}" for line in clean_block(value).splitlines()))


def _prose(value: str, console: Console) -> Text:
    return _indented(wrapped(clean_block(value), console, 2))


def _hint(value: str, console: Console) -> Text:
    """Further lines of a hint stand under its first."""
    lead = "  hint: "
    shown = wrapped_advice(clean_block(value), console, len(lead))
    return Text.assemble((lead, "bold cyan"), shown.replace("\n", "\n" + " " * len(lead)))


def _write(console: Console, line: Text) -> None:
    console.print(Encodable(line), soft_wrap=True)

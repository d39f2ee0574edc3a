"""The end of a failed run in words: the exception or the known cause as its headline, and each thing once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from controller.core.errors import CtlError
from controller.ui.errors import print_problems, print_triage, print_unknown, stands_above


def print_failure(
    problems: Sequence[Mapping[str, Any]],
    cause: Mapping[str, Any] | None,
    log: Path | None,
    console: Console | None = None,
    *,
    error: CtlError,
    told: Collection[tuple[object, ...]] = (),
) -> None:
    """Print what a run failed of, the cause first.

    The end itself is that of the `error` that follows, and so is the remedy unless the cause has one of its own.
    `log` is where the raw output lies, None where there is none. `told` are causes (see `Failure.cause`) of which the
    whole traceback stands above: it is not repeated.
    """
    rest = [problem for problem in problems if problem.get("code") != error.code]
    known = cause if cause is not None and cause["known"] else None
    unmatched = cause if cause is not None and not cause["known"] else None
    if known is not None:
        rest = [problem for problem in rest if not stands_above(problem, told)]
        raw = None if any(problem.get("traceback") for problem in rest) else log
        print_triage(known, raw, console, fix=known.get("fix") not in ("", None, error.fix))
    if unmatched is not None and not any(problem.get("traceback") for problem in rest):
        rest = [_of_log(unmatched), *rest]
    print_problems(rest, log, console, cause=cause, told=told)
    if unmatched is not None:
        print_unknown(unmatched, console)


def _of_log(cause: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the exception that only the log tells as a problem of the run."""
    return {
        "what": cause["exception"],
        "traceback": cause["traceback"],
        "where": cause["where"],
        "ranks": [cause["rank"]],
        "writer": cause["source"],
    }

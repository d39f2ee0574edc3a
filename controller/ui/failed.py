"""The end of a failed run in words: the exception or the known cause as its headline, and each thing once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from controller.ui.errors import print_problems, print_triage, print_unknown, stands_above


def print_failure(
    problems: Sequence[Mapping[str, Any]],
    cause: Mapping[str, Any] | None,
    log: Path,
    console: Console | None = None,
    *,
    end_reason: str,
    told: Collection[tuple[object, ...]] = (),
) -> bool:
    """Print what a run failed of, the cause first, and return whether that said more than how it ended.

    The end itself and the remedy are those of the error that follows. `told` are causes (see `Failure.cause`) of
    which the whole traceback stands above: it is not repeated.
    """
    rest = [problem for problem in problems if problem.get("code") != end_reason]
    known = cause if cause is not None and cause["known"] else None
    unmatched = cause if cause is not None and not cause["known"] else None
    if known is not None:
        rest = [problem for problem in rest if not stands_above(problem, told)]
        print_triage(known, None if any(problem.get("traceback") for problem in rest) else log, console, fix=False)
    if unmatched is not None and not any(problem.get("traceback") for problem in rest):
        rest = [_of_log(unmatched), *rest]
    print_problems(rest, log, console, cause=cause, told=told)
    if unmatched is not None:
        print_unknown(unmatched, console)
    return bool(rest or cause)


def _of_log(cause: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the exception that only the log tells as a problem of the run."""
    return {
        "what": cause["exception"],
        "traceback": cause["traceback"],
        "where": cause["where"],
        "ranks": [cause["rank"]],
        "writer": cause["source"],
    }

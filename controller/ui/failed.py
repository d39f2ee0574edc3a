"""The end of a failed run in words: the exception or the known cause as its headline, and each thing once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from controller.ui.errors import print_problems, print_triage, print_unknown


def print_failure(
    problems: Sequence[Mapping[str, Any]],
    cause: Mapping[str, Any] | None,
    log: Path,
    console: Console | None = None,
    *,
    end_reason: str,
    whole: bool,
) -> bool:
    """Print what a run failed of, and return whether that said more than how it ended.

    `whole`: the end itself and the remedy too; an error that is raised afterwards says them otherwise.
    """
    end = [problem for problem in problems if problem.get("code") == end_reason]
    told = [problem for problem in problems if problem.get("code") != end_reason]
    unmatched = cause if cause is not None and not cause["known"] else None
    if unmatched is not None and not any(problem.get("traceback") for problem in told):
        told = [_of_log(unmatched), *told]
    print_problems(told, log, console, cause=cause)
    if unmatched is not None:
        print_unknown(unmatched, console)
    elif cause is not None:
        print_triage(cause, console=console, fix=whole)
    if whole:
        print_problems(end, log, console)
    return bool(told or cause)


def _of_log(cause: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the exception that only the log tells as a problem of the run."""
    return {
        "what": cause["exception"],
        "traceback": cause["traceback"],
        "where": cause["where"],
        "ranks": [cause["rank"]],
        "writer": cause["source"],
    }

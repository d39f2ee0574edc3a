"""How the end of a run is told: its summary, what it failed of, and the remedy; at once or later."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller import diagnosis, lookup
from controller.core.endings import exit_code
from controller.core.errors import CtlError, ExitCode, JobStopped
from controller.core.runview import kind_word
from controller.run import Run
from controller.runfolder import UNKNOWN, RunFolder, last_run
from controller.ui.formats import ended_text, state_word
from controller.ui.terminal import ask_yes_no, err_console, out_console, print_json
from controller.waiting import no_summary
from controller.workspace import load_workspace
from remote_payload.host.protocol import RunState

if TYPE_CHECKING:
    from rich.console import Console

NOT_CLEAN = "not-clean"
"""Code of the problem that something of the run is left on the host."""


def tell_end(run: Run, *, as_json: bool, told: Collection[tuple[object, ...]]) -> ExitCode:
    """Print how a watched run ended; `told` as for `print_failure`. Raises the error that belongs to the end."""
    error = run.error()
    summary = run.summary
    if as_json:
        print_json(
            summary if summary is not None else {"schema_version": 1, "error": error.to_dict() if error else None}
        )
        return exit_code(error)
    from controller.ui.errors import print_stopped
    from controller.ui.tables import print_summary

    if summary is not None:
        print_summary(out_console(), summary, cause=False)
    if isinstance(error, JobStopped) and summary is not None:
        # Somebody asked for it, and the summary has said so: no more blocks that read like failures.
        print_stopped(summary)
        _print_left(run)
        return exit_code(error)
    if error is not None:
        # The error that is raised says the end and the remedy, as the last lines of all.
        _print_failure(run, error, told=told)
        raise error
    _print_left(run, told=told)
    return ExitCode.OK


def _print_left(run: Run, console: Console | None = None, *, told: Collection[tuple[object, ...]] = ()) -> None:
    """Print the problems of a run that did not fail, or of one that was stopped what it left on the host.

    A stop alone makes processes report what is none.
    """
    from controller.ui.errors import print_problems

    problems = run.summary.get("problems", ()) if run.summary is not None else ()
    if run.error() is not None:
        problems = [problem for problem in problems if problem.get("code") == NOT_CLEAN]
    print_problems(problems, _log(run), console, told=told)


def _print_failure(
    run: Run, error: CtlError, console: Console | None = None, *, told: Collection[tuple[object, ...]] = ()
) -> None:
    """Print what a run failed of; a reason that it names, the error itself need not say again."""
    from controller.ui.failed import print_failure

    summary, log = run.summary, _log(run)
    problems = summary.get("problems", ()) if summary is not None else ()
    cause = _cause(run, summary)
    print_failure(problems, cause, log, console, error=error, told=told)
    if error.why in [each["what"] for each in (cause, *problems) if each is not None]:
        error.why = ""


def _cause(run: Run, summary: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the triage of a failed run; a lost one has no summary, but may have left a log."""
    if summary is not None:
        cause: Mapping[str, Any] | None = summary["triage"]
        return cause
    found = diagnosis.diagnose_run(run.folder).triage
    return found.record() if found else None


def no_problem(folder: RunFolder, state: str, *, paused: str | None = None) -> str:
    """Return how a run is or ended of which no cause is known. That is an answer, and no error of who asked.

    `state` is the last known word about it.
    """
    run_id, result = folder.run_id, folder.read("result.json")
    if state == UNKNOWN:
        return f"no problem was reported so far: of run {run_id} nothing was copied here, if it was launched"
    if state == RunState.LOST.value:
        return f"neither the events nor the log of run {run_id} say why it is {state_word(state)}"
    if result is None:
        return f"no problem was reported so far: run {run_id} is {state_word(state, paused)}"
    reason = str(result["end_reason"])
    stage = diagnosis.with_triage({"end_reason": reason}, folder)["last_stage"]
    words = ended_text(reason, stage)
    if reason in diagnosis.UNTRIAGED:
        return f"no problem was reported: run {run_id} {words}"
    return f"run {run_id} {words}: {result['message']}; neither its events nor its log say more"


def _log(run: Run) -> Path | None:
    """Return where the raw output of a run lies; None of one that printed nothing."""
    log = run.folder.path / "log"
    return log if any(log.glob("*.log")) else None


def say_which(folder: RunFolder) -> None:
    """Say on stderr that a run nobody named is none that people mean by "the last", and which extraction is."""
    extraction = last_run(folder.path.parent, "extract")
    if folder.kind in ("rehearse", "convert") and extraction is not None and extraction.kind is not None:
        words = f"run {folder.run_id} is a {kind_word(folder.kind)}; the last extraction is {extraction.run_id}"
        err_console().print(words, markup=False, soft_wrap=True)


def summary(run_id: str | None, host: str | None, *, as_json: bool) -> ExitCode:
    with lookup.open_run(load_workspace(), run_id, host, ask=ask_yes_no) as run:
        if run.summary is None:
            lookup.copy_what_is_new(run)
        lookup.mend(run)
        document = run.summary
        if document is None:
            lost = run.state == RunState.LOST.value
            fix = f"see what it wrote: `ctl logs {run.id}`" if lost else f"watch it with `ctl attach {run.id}`"
            raise no_summary(run.id, state_word(run.state, run.paused), fix)
    if as_json:
        print_json(document)
    else:
        from controller.reporting import print_samples
        from controller.ui.errors import print_error, print_stopped
        from controller.ui.tables import print_summary

        error = run.error()
        print_summary(out_console(), document, cause=False)
        print_samples(run.folder)
        if run_id is None:
            say_which(run.folder)
        if isinstance(error, JobStopped):
            print_stopped(document, out_console())
            _print_left(run, out_console())
        elif error is not None:
            _print_failure(run, error, out_console())
            print_error(error, out_console())
        else:
            _print_left(run, out_console())
    return ExitCode.OK

"""What each verb does: the pipeline on one side, the screen on the other. `cli` only parses and maps errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from controller import diagnosis, pipeline
from controller.core import shares
from controller.core.errors import ExitCode, RefusedError, UsageError
from controller.core.intention import describe
from controller.core.model import Overrides
from controller.pipeline import Intention
from controller.run import Run, exit_code
from controller.runfolder import ALREADY_WATCHED, find_run
from controller.ui.clean import text as cleaned
from controller.ui.stream import choose_view
from controller.ui.terminal import ask_yes_no, err_console, out_console
from controller.ui.viewsink import ViewSink
from controller.workspace import load_workspace
from remote_payload.host.protocol import OwnedOutput


def plan_extract(
    host: str | None,
    playbook: str | None,
    overrides: Overrides,
    *,
    allow: Sequence[str] = (),
    wait: bool = False,
) -> Intention:
    return pipeline.plan_extract(load_workspace(), host, playbook, overrides, allow=allow, wait=wait)


def plan_rehearsal(host: str | None, playbook: str | None, *, capture: str | None = None) -> Intention:
    return pipeline.plan_rehearsal(load_workspace(), host, playbook, Overrides(capture=capture))


def plan_convert(
    run_id: str | None, host: str | None, *, to: str, output: str | None, stale: str, adopt: bool
) -> Intention:
    return pipeline.plan_convert(load_workspace(), run_id, host, to=to, output=output, stale=stale, adopt=adopt)


def plan_command(
    host: str | None, argv: Sequence[str], *, name: str | None, cwd: str | None, wait: bool = False
) -> Intention:
    return pipeline.plan_command(load_workspace(), host, argv, name=name, cwd=cwd, wait=wait)


def show_plan(intention: Intention, *, as_json: bool) -> None:
    from controller.payload import load_payload
    from controller.ui.tables import print_intention

    payload = load_payload()
    described = describe(
        intention.plan, intention.playbook, payload_files=len(payload.files), payload_bytes=payload.size
    )
    if as_json:
        _print_json(described)
    else:
        print_intention(out_console(), described)


# ------------------------------------------------------------------------------------ launch and watch


def launch_and_watch(intention: Intention, *, yes: bool, detach: bool, progress: str, as_json: bool) -> ExitCode:
    # A command's output is what its user wants to see; an extraction's log is vLLM's, and kept for `ctl logs`.
    view = choose_view(sys.stderr, os.environ, progress, show_log=intention.plan["job"]["kind"] == "command")
    with ExitStack() as stack:
        stack.enter_context(view)
        sink = ViewSink(
            view, run=intention.plan["run_id"], host=intention.host.name, title=intention.plan["job"]["name"]
        )

        def confirm(outputs: Sequence[OwnedOutput], listings: Mapping[str, Mapping[str, Any]]) -> bool:
            with view.paused():
                return _confirm_clear(outputs, listings, yes=yes)

        def ask(question: str) -> bool:
            with view.paused():
                return ask_yes_no(question)

        run = pipeline.launch(intention, sinks=[sink], ask=ask, pause=view.paused, confirm=confirm)
        stack.callback(run.close)
        if detach:
            return _detached(run)
        return _watch(run, as_json=as_json, view_stack=stack)


def attach(run_id: str | None, host: str | None, *, progress: str, as_json: bool) -> ExitCode:
    view = choose_view(sys.stderr, os.environ, progress)
    with ExitStack() as stack:
        stack.enter_context(view)

        def ask(question: str) -> bool:
            with view.paused():
                return ask_yes_no(question)

        run = pipeline.open_run(load_workspace(), run_id, host, ask=ask, pause=view.paused)
        stack.callback(run.close)
        run.add_sink(ViewSink(view, run=run.id, host=run.host, title=""))
        return _watch(run, as_json=as_json, view_stack=stack)


def _watch(run: Run, *, as_json: bool, view_stack: ExitStack) -> ExitCode:
    """Watch to the end; a Ctrl-C detaches, because the host has confirmed that it holds the run."""
    try:
        outcome = run.watch()
    except KeyboardInterrupt:
        view_stack.close()
        return _detached(run)
    view_stack.close()
    if not outcome.ended:
        return _detached(run)
    return _report(run, as_json=as_json)


def _report(run: Run, *, as_json: bool) -> ExitCode:
    error = run.error()
    summary = run.summary
    if as_json:
        _print_json(
            summary if summary is not None else {"schema_version": 1, "error": error.to_dict() if error else None}
        )
        return exit_code(error)
    from controller.ui.errors import print_problems, print_triage
    from controller.ui.tables import print_summary

    if summary is not None:
        print_summary(out_console(), summary)
    if error is not None:
        print_problems((summary or {}).get("problems", []), run.folder.path / "log")
        cause = _cause(run, summary)
        if cause:
            # The error that is raised says the remedy of a known cause, as the last line of all.
            print_triage(cause, fix=summary is None or not cause["known"])
        raise error
    return ExitCode.OK


def _cause(run: Run, summary: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the triage of a failed run; a lost one has no summary, but may have left a log."""
    if summary is not None:
        cause: Mapping[str, Any] | None = summary["triage"]
        return cause
    found = diagnosis.diagnose_run(run.folder).triage
    return found.record() if found else None


def _detached(run: Run) -> ExitCode:
    console = err_console()
    console.print(f"detached: run {run.id} goes on, on {run.host}")
    for verb, text in (("attach", "watch it again"), ("logs -f", "read its log"), ("stop", "stop it")):
        console.print(f"  {text:<16}ctl {verb} {run.id}")
    return ExitCode.DETACHED


def _confirm_clear(outputs: Sequence[OwnedOutput], listings: Mapping[str, Mapping[str, Any]], *, yes: bool) -> bool:
    from controller.ui.tables import print_clear_list

    print_clear_list(err_console(), outputs, listings)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise RefusedError(
            "the output folder holds files of an earlier run, and nobody is there to confirm",
            why=", ".join(f"{output['path']}: {output['entries']} entries" for output in outputs),
            fix="add `--yes` to delete or move exactly what is listed",
            code="confirmation-needed",
        )
    return ask_yes_no("go on?")


# --------------------------------------------------------------------------------------- existing runs


def stop(run_id: str | None, host: str | None, *, grace_s: float, as_json: bool) -> ExitCode:
    with pipeline.open_run(load_workspace(), run_id, host, ask=ask_yes_no) as run:
        outcome = run.stop(grace_s=grace_s)
        _copy_what_is_new(run)
    record = {
        "schema_version": 1, "run_id": run.id, "state": outcome.state, "end_reason": outcome.end_reason,
        "gpus_clean": outcome.gpus_clean, "killed": outcome.killed, "leftovers": outcome.leftovers,
        "message": outcome.message,
    }  # fmt: skip
    if as_json:
        _print_json(record)
    else:
        from controller.ui.tables import print_stop

        print_stop(out_console(), record)
    return ExitCode.OK


def logs(run_id: str | None, host: str | None, *, follow: bool, tail: int | None, problem: bool = False) -> ExitCode:
    """Write raw bytes to stdout: whoever pipes them gets what the job wrote, nothing folded or cleaned."""
    raw = sys.stdout.buffer
    if problem and (follow or tail is not None):
        raise UsageError("--problem goes with neither --follow nor --tail", fix="leave one of them out")

    class Printer:
        def event(self, event: object) -> None: ...

        def log(self, data: bytes) -> None:
            raw.write(data)
            raw.flush()

    with pipeline.open_run(load_workspace(), run_id, host, ask=ask_yes_no) as run:
        if follow and tail is None:
            run.add_sink(Printer())
            try:
                outcome = run.watch()
            except KeyboardInterrupt:
                return ExitCode.DETACHED
            return ExitCode.OK if outcome.ended else ExitCode.DETACHED
        if not run.ended:
            _copy_what_is_new(run)
        pieces: Iterable[bytes]
        if problem:
            place, pieces = diagnosis.problem_lines(run.folder)
            err_console().print(cleaned(place), soft_wrap=True)
        else:
            pieces = run.logs() if tail is None else [_last_lines(run, tail)]
        for piece in pieces:
            raw.write(piece)
        raw.flush()
    return ExitCode.OK


def _copy_what_is_new(run: Run) -> None:
    """Bring the local copy up to date, unless another process of this workstation does so all the time."""
    try:
        run.watch(follow=False)
    except UsageError as error:
        if error.code != ALREADY_WATCHED:
            raise


def _last_lines(run: Run, count: int) -> bytes:
    """Return the last `count` lines of the log, reading from its end."""
    data = b""
    for path in reversed(run.folder.mirror.log_parts()):
        if isinstance(path, bytes):
            data = path + data
            continue
        size = path.stat().st_size
        with open(path, "rb") as stream:
            while size > 0 and data.count(b"\n") <= count:
                step = min(size, 1 << 16)
                size -= step
                stream.seek(size)
                data = stream.read(step) + data
        if data.count(b"\n") > count:
            break
    return b"".join(data.splitlines(keepends=True)[-count:]) if count else b""


def summary(run_id: str | None, host: str | None, *, as_json: bool) -> ExitCode:
    with pipeline.open_run(load_workspace(), run_id, host, ask=ask_yes_no) as run:
        if run.summary is None:
            _copy_what_is_new(run)
        document = run.summary
        if document is None:
            raise UsageError(
                f"run {run.id} has no summary yet",
                why=f"it is {run.state}",
                fix=f"watch it with `ctl attach {run.id}`",
                code="no-summary",
            )
    if as_json:
        _print_json(document)
    else:
        from controller.ui.errors import print_problems, print_triage
        from controller.ui.tables import print_summary

        print_summary(out_console(), document)
        if document.get("problems"):
            print_problems(document["problems"], run.folder.path / "log", out_console())
        if document["triage"]:
            print_triage(document["triage"], run.folder.path / "log", out_console())
    return ExitCode.OK


def triage(paths: Sequence[Path], *, as_json: bool) -> ExitCode:
    """Name the cause of a failure that a log shows; also of one that ctl did not make."""
    found = diagnosis.diagnose_files(paths)
    cause = found.triage.record() if found.triage else None
    if as_json:
        files = [str(path) for path in found.files]
        _print_json({"schema_version": 1, "files": files, "problem": cause is not None, "triage": cause})
        return ExitCode.OK
    from controller.ui.errors import print_failures, print_triage

    console = out_console()
    if cause is None:
        console.print("no sign of a failure")
        return ExitCode.OK
    print_failures(found.failures, console=console)
    print_triage(cause, console=console)
    return ExitCode.OK


def merge_ledgers(run_ids: Sequence[str], *, output: str | None, as_json: bool) -> ExitCode:
    """Join the ledgers of runs that were watched from here; `output` gets the joined lines."""
    from controller.shards import load_share

    runs_dir = load_workspace().runs_dir
    merged = shares.merge([load_share(find_run(runs_dir, run_id)) for run_id in run_ids])
    lines = merged.pop("lines")
    if output is not None:
        with open(output, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    if as_json:
        _print_json(merged)
    else:
        from controller.ui.shares import print_merged

        print_merged(out_console(), merged)
    return ExitCode.OK if merged["complete"] else ExitCode.JOB_FAILED


# ------------------------------------------------------------------------------------------ hosts, config


def ps(host: str | None, *, as_json: bool) -> None:
    target = load_workspace().config.host(host)
    with pipeline.host_context(target, ask=ask_yes_no) as ctx:
        listed = pipeline.list_runs(ctx)
    if as_json:
        _print_json({"schema_version": 1, "host": target.name, **listed})
    else:
        from controller.ui.tables import print_ps

        print_ps(out_console(), target.name, listed)


def hosts(*, as_json: bool) -> None:
    config = load_workspace().config
    rows = [config.host(name).record() for name in config.host_names()]
    if as_json:
        _print_json({"schema_version": 1, "hosts": rows})
    else:
        from controller.ui.tables import print_hosts

        print_hosts(out_console(), rows)


def config_show(*, as_json: bool) -> None:
    document = load_workspace().config.document()
    if as_json:
        _print_json(document)
    else:
        from controller.ui.tables import print_config

        print_config(out_console(), document)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=1, default=str))

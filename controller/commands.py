"""What each verb does: the pipeline on one side, the screen on the other. `cli` only parses and maps errors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from controller import contact, diagnosis, ending, lookup, pipeline, viewing
from controller.core import shares
from controller.core.endings import OVER
from controller.core.errors import (
    ExitCode,
    Interrupted,
    RefusedError,
)
from controller.core.intention import describe
from controller.core.model import Overrides
from controller.known import RunControls, known_of
from controller.pipeline import Intention
from controller.run import Run
from controller.runfolder import RunFolder, find_run
from controller.ui.clean import clean
from controller.ui.formats import state_word
from controller.ui.stream import View, choose_view
from controller.ui.terminal import ask_yes_no, can_ask, err_console, out_console, print_json, spoken
from controller.workspace import load_workspace
from remote_payload.host.protocol import OwnedOutput

PART_OF_RUN_ID = re.compile(r"[0-9a-f-]{4,22}")
"""What `ctl triage` takes for a run where no file has that name."""


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


def show_plan(intention: Intention, *, as_json: bool) -> None:
    from controller.payload import load_payload
    from controller.ui.tables import print_intention

    payload = load_payload()
    described = describe(
        intention.plan,
        intention.extraction,
        payload_files=len(payload.files),
        payload_bytes=payload.size,
        pushed=intention.data.describe() if intention.data else None,
    )
    if as_json:
        print_json(described)
    else:
        print_intention(out_console(), described)


# ------------------------------------------------------------------------------------ launch and watch


def launch_and_watch(intention: Intention, *, yes: bool, detach: bool, progress: str, as_json: bool) -> ExitCode:
    # A command's output, and pip's, is what its user wants to see; an extraction's log is kept for `ctl logs`.
    view = choose_view(
        sys.stderr, os.environ, progress, show_log=intention.plan["job"]["kind"] in ("command", "setup"),
        error_follows=not as_json,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(view)
        run_id = intention.plan["run_id"]
        known = known_of(RunFolder(intention.runs_dir / run_id), intention.plan)
        sink = view.sink(run=run_id, host=intention.host.name, known=known)

        def confirm(outputs: Sequence[OwnedOutput], listings: Mapping[str, Mapping[str, Any]]) -> bool:
            with view.paused():
                return _confirm_clear(intention.host.name, outputs, listings, yes=yes)

        def ask(question: str) -> bool:
            with view.paused():
                return ask_yes_no(question)

        try:
            run = pipeline.launch(intention, sinks=[sink], ask=ask, pause=view.paused, confirm=confirm)
        except KeyboardInterrupt:
            raise Interrupted("interrupted: nothing was launched") from None
        stack.callback(run.close)
        if detach:
            stack.close()  # before a word is said: a last frame would be drawn over it
            return _detached(run, as_json=as_json)
        sink.control(RunControls(run))
        return _watch(run, view, as_json=as_json, view_stack=stack)


def attach(run_ids: Sequence[str | None], host: str | None, *, progress: str, as_json: bool) -> ExitCode:
    """Watch one run to its end and show its summary, or several side by side."""
    if len(run_ids) > 1:
        return viewing.attach_several([run_id or "" for run_id in run_ids], host, progress=progress, as_json=as_json)
    run_id = run_ids[0]
    view = choose_view(sys.stderr, os.environ, progress, error_follows=not as_json)
    with ExitStack() as stack:
        stack.enter_context(view)

        def ask(question: str) -> bool:
            with view.paused():
                return ask_yes_no(question)

        run = lookup.open_run(load_workspace(), run_id, host, ask=ask, pause=view.paused)
        stack.callback(run.close)
        sink = view.sink(run=run.id, host=run.host, known=known_of(run.folder))
        sink.control(RunControls(run))
        run.add_sink(sink)
        return _watch(run, view, as_json=as_json, view_stack=stack)


def _watch(run: Run, view: View, *, as_json: bool, view_stack: ExitStack) -> ExitCode:
    """Watch to the end; a Ctrl-C detaches, because the host has confirmed that it holds the run."""
    try:
        outcome = run.watch()
    except KeyboardInterrupt:
        view_stack.close()
        return _detached(run, as_json=as_json)
    view_stack.close()
    if not outcome.ended:
        return _detached(run, as_json=as_json)
    return ending.tell_end(run, as_json=as_json, told=view.told)


def _detached(run: Run, *, as_json: bool) -> ExitCode:
    if as_json:
        where = {"run_id": run.id, "host": run.host, "state": run.state, "paused": run.paused}
        print_json({"schema_version": 1, "detached": True, **where})
        return ExitCode.DETACHED
    console = err_console()
    waits = f"; it is {state_word(run.state, run.paused)}" if run.paused else ""
    console.print(f"detached: run {run.id} goes on, on {run.host}{waits}")
    for verb, text in (("attach", "watch it again"), ("logs -f", "read its log"), ("stop", "stop it")):
        console.print(f"  {text:<16}ctl {verb} {run.id}")
    return ExitCode.DETACHED


def _confirm_clear(
    host: str, outputs: Sequence[OwnedOutput], listings: Mapping[str, Mapping[str, Any]], *, yes: bool
) -> bool:
    from controller.ui.tables import print_clear_list
    from controller.ui.terminal import loss_question

    with nullcontext() if yes or not can_ask() else spoken():
        print_clear_list(err_console(), host, outputs, listings)
    if yes:
        return True
    if not can_ask():
        raise RefusedError(
            "the output folder holds files of an earlier run, and nobody is there to confirm",
            why=", ".join(f"{output['path']} on {host}: {output['entries']:,} entries" for output in outputs),
            fix="add `--yes` to delete or move exactly what is listed",
            code="confirmation-needed",
        )
    return all(ask_yes_no(loss_question(host, output, listings.get(output["path"], {}))) for output in outputs)


# --------------------------------------------------------------------------------------- existing runs


def triage(paths: Sequence[Path], *, as_json: bool) -> ExitCode:
    """Name the cause of a failure that logs show, also of one that ctl did not make; or that of a run, by its id."""
    if len(paths) == 1 and not paths[0].exists() and PART_OF_RUN_ID.fullmatch(str(paths[0])):
        paths = [find_run(load_workspace().runs_dir, str(paths[0])).path]
    found = diagnosis.diagnose_files(paths)
    cause = found.triage.record() if found.triage else None
    folder = diagnosis.run_folder(paths[0]) if len(paths) == 1 else None
    if as_json:
        files = [str(path) for path in found.files]
        failed = cause is not None or (folder is not None and diagnosis.ended_badly(folder))
        print_json({"schema_version": 1, "files": files, "problem": failed, "triage": cause})
        return ExitCode.OK
    from controller.ui.errors import print_failures, print_triage, print_unknown

    console = out_console()
    if cause is None:
        words = ending.no_problem(folder, folder.state) if folder else "no sign of a failure"
        console.print(clean(words), markup=False, soft_wrap=True)
        return ExitCode.OK
    print_failures(found.failures, console=console, cause=cause)
    if cause["known"]:
        print_triage(cause, console=console)
    else:
        print_unknown(cause, console)
    return ExitCode.OK


def merge_ledgers(run_ids: Sequence[str], *, output: str | None, as_json: bool) -> ExitCode:
    """Join the ledgers of runs; `output` gets the joined lines. Runs not seen to their end here are asked for."""
    from controller.shards import load_share

    workspace = load_workspace()
    folders = [find_run(workspace.runs_dir, run_id) for run_id in run_ids]
    for folder in folders:
        # Without its end, what lies here may be any part of its ledger.
        if folder.read("result.json") is None or folder.damaged():
            with lookup.open_run(workspace, folder.run_id, None, ask=ask_yes_no) as run:
                lookup.copy_what_is_new(run)
    merged = shares.merge([load_share(folder) for folder in folders])
    lines = merged.pop("lines")
    if output is not None:
        with open(output, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    if as_json:
        print_json(merged)
    else:
        from controller.ui.shares import print_merged

        print_merged(out_console(), merged)
    return ExitCode.OK if merged["complete"] else ExitCode.JOB_FAILED


# ------------------------------------------------------------------------------------------ hosts, config


def ps(host: str | None, *, limit: int | None = None, running: bool = False, as_json: bool) -> None:
    """List the runs of a host: the newest `limit` of them, and with `running` only those that are not over."""
    target = load_workspace().config.host(host)
    with contact.host_context(target, ask=ask_yes_no) as ctx:
        listed = contact.list_runs(ctx)
    listed = {**listed, "runs": chosen_rows(listed["runs"], limit=limit, running=running)}
    if as_json:
        print_json({"schema_version": 1, "host": target.name, **listed})
    else:
        from controller.ui.tables import print_ps

        print_ps(out_console(), target.name, listed)


def chosen_rows(rows: Sequence[Mapping[str, Any]], *, limit: int | None, running: bool) -> list[Mapping[str, Any]]:
    """Return the rows of `ctl ps` that were asked for, the newest first."""
    newest = sorted(rows, key=lambda row: str(row["run_id"]), reverse=True)
    return [row for row in newest if not running or row["state"] not in OVER][:limit]


def hosts(*, as_json: bool) -> None:
    config = load_workspace().config
    rows = [config.host(name).record() for name in config.host_names()]
    if as_json:
        print_json({"schema_version": 1, "hosts": rows})
    else:
        from controller.ui.tables import print_hosts

        print_hosts(out_console(), rows)


def hosts_test(name: str | None, *, as_json: bool) -> ExitCode:
    from dataclasses import asdict

    from controller.core.checks_introduction import introduction_findings
    from controller.core.finding import Level
    from controller.stages import introduce

    target = load_workspace().config.host(name, naming="use `ctl hosts test NAME`")
    with contact.open_transport(target, ask=ask_yes_no) as transport:
        transport.connect()
        report = introduce.run(transport, target)
    findings = introduction_findings(target, report)
    failed = any(finding.level is Level.FAIL for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print_json({"schema_version": 1, "host": target.name, "ok": not failed, "findings": rows, "report": report})
    else:
        from controller.ui.tables import print_findings

        print_findings(out_console(), target.name, findings)
    return ExitCode.REFUSED if failed else ExitCode.OK


def config_show(*, as_json: bool) -> None:
    document = load_workspace().config.document()
    if as_json:
        print_json(document)
    else:
        from controller.ui.tables import print_config

        print_config(out_console(), document)

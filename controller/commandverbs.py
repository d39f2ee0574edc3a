"""What `ctl run`, `ctl convert` and `ctl stacks` do, beside the pipeline that all runs share."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from controller import gone
from controller.core import planner
from controller.core.commandplan import make_playbook_command_plan
from controller.core.errors import ExitCode, UsageError
from controller.core.findingcodes import check_codes
from controller.core.setting import typed
from controller.localfiles import local_files
from controller.lookup import open_run, refuse_unlaunched
from controller.pipeline import Intention, stamp
from controller.run import Run, load_plan
from controller.runfolder import find_run
from controller.ui.stacks import print_stacks
from controller.ui.terminal import ask_yes_no, out_console
from controller.workspace import load_workspace

STACKS_TIMEOUT_S = 300.0
"""For all processes of a run; each has a shorter deadline on the host."""


def plan_command(
    host: str | None,
    argv: Sequence[str],
    *,
    name: str | None,
    cwd: str | None,
    wait: bool,
    tracebacks: bool,
) -> Intention:
    """Plan a run of any command without connecting. Raises UsageError, ConfigError."""
    if not argv:
        raise UsageError(
            "no command given",
            fix="write it after `--`: ctl run --host NAME -- python train.py; or name a command playbook",
        )
    workspace = load_workspace()
    target = workspace.config.host(host)
    plan = planner.make_command_plan(
        target, argv, name=name or os.path.basename(argv[0]), cwd=cwd, tracebacks=tracebacks, **stamp()
    )
    return Intention(
        plan=planner.with_queue(plan) if wait else plan,
        host=target,
        playbook=None,
        secret_values=workspace.secret_values(target, None),
        runs_dir=workspace.runs_dir,
    )


def plan_command_playbook(
    host: str | None,
    playbook: str,
    extra: Sequence[str],
    *,
    stale: str | None,
    adopt: bool,
    allow: Sequence[str],
    wait: bool,
) -> Intention:
    """Plan a command playbook with `extra` arguments, without connecting; every upload is read, for its hash.

    Raises UsageError, ConfigError.
    """
    allowed = check_codes(allow)
    workspace = load_workspace()
    target = workspace.config.host(host)
    chosen = workspace.command_playbook(playbook)
    uploads = local_files(chosen.uploads, workspace.cwd, chosen.origin) if chosen.uploads else None
    plan = make_playbook_command_plan(
        target, chosen, extra, upload=uploads.digest if uploads else None, stale=stale, adopt=adopt, **stamp()
    )
    return Intention(
        plan=planner.with_queue(plan) if wait else plan,
        host=target,
        playbook=chosen,
        secret_values=workspace.secret_values(target, chosen),
        allow=allowed,
        runs_dir=workspace.runs_dir,
        uploads=uploads,
    )


def plan_convert(
    run_id: str | None,
    host: str | None,
    *,
    to: str,
    output: str | None,
    stale: str,
    adopt: bool,
) -> Intention:
    """Plan the conversion of an earlier run's files, on its host; None means the last extraction.

    What it wrote is asked of the host, by preflight: what was seen here may be old, or of a disk that was away for a
    minute. Raises UsageError, ConfigError.
    """
    workspace = load_workspace()
    folder = find_run(workspace.runs_dir, run_id, kind="extract")
    refuse_unlaunched(folder)
    source = load_plan(folder)
    if source is None:
        raise folder.missing("plan.json", f"attach first: `ctl attach {folder.run_id} --host HOST`")
    target = workspace.config.host(typed(host) or source["host"]["name"])
    plan = planner.make_convert_plan(target, source, to=to, output=output, stale=stale, adopt=adopt, **stamp())
    return Intention(
        plan=plan,
        host=target,
        playbook=None,
        secret_values=workspace.secret_values(target, None),
        runs_dir=workspace.runs_dir,
    )


def stacks(run: Run) -> dict[str, Any]:
    """Return {"processes": [{"pid", "rank", "process", "stacks" or "error"}]} of a living run's Python processes.

    Raises UsageError for a run that has ended (`run-ended`), or of which nothing is known any more (`run-gone`).
    """
    ctx = run.context
    request = {"workdir": ctx.host["workdir"], "run_id": run.id}
    try:
        with gone.noticed():
            return ctx.call_json("stacks", request, timeout=STACKS_TIMEOUT_S)
    except gone.RunPruned:
        gone.last_word(run.folder, run.host)
        raise _has_ended(run) from None


def _has_ended(run: Run) -> UsageError:
    return UsageError(
        f"run {run.id} has ended", why="stacks are those of living processes",
        fix=f"see how it ended with `ctl summary {run.id}`", code="run-ended",
    )  # fmt: skip


def show_stacks(run_id: str | None, host: str | None, *, as_json: bool) -> ExitCode:
    """Print the stacks of a run's processes."""
    with open_run(load_workspace(), run_id, host, ask=ask_yes_no) as run:
        if run.ended:
            raise _has_ended(run)
        found = stacks(run)["processes"]
    if as_json:
        print(json.dumps({"schema_version": 1, "run_id": run.id, "processes": found}, indent=1))
    else:
        print_stacks(out_console(), found)
    return ExitCode.OK

"""A run by its id: from its folder here, from the host that is named, or from whichever host lists it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from controller.afterwards import Afterwards
from controller.contact import Ask, Pause, host_context, list_runs, open_transport, pushed_context
from controller.core.errors import CtlError, UsageError
from controller.core.model import Host
from controller.localdisk import copying
from controller.run import Run, Sink, load_plan
from controller.runfolder import RunFolder, find_run, matching
from controller.sidebyside import side_by_side
from controller.stages.base import Context
from controller.workspace import Workspace
from remote_payload.host.layout import RUN_ID

HOSTS_AT_ONCE = 8
"""Connections at a time while a run is looked for."""


def open_run(
    workspace: Workspace,
    run_id: str | None,
    host: str | None,
    *,
    sinks: Sequence[Sink] = (),
    ask: Ask | None = None,
    pause: Pause = nullcontext,
) -> Run:
    """Return the handle of an existing run: from its local folder, or from `host` where there is none.

    Without `host`, a whole id is looked for on every host of the configuration. `run_id` None means the last one
    launched from here. Raises UsageError (also if no host lists the run), ConfigError, ConnectionFailed.
    """
    try:
        folder = find_run(workspace.runs_dir, run_id)
    except UsageError as unknown:
        if run_id is None:
            raise
        if host is None and RUN_ID.fullmatch(run_id):  # a typo in a part of an id must not knock at every host
            host = _host_of(workspace, run_id, unknown)
        if host is None:
            raise
        return _adopt_run(workspace.runs_dir, run_id, workspace.config.host(host), sinks, ask, pause)
    refuse_unlaunched(folder)
    local = folder.read("local.json") or {}
    plan, record = load_plan(folder), local.get("host")
    if plan is None or record is None:
        # Its copy was cut off before the plan came, or files were lost here: the host still says what the run is.
        missing = UsageError(
            f"{folder.path} holds no plan", why="it was not made by ctl, or its copy was cut off",
            fix=f"name the host of the run: `ctl attach {folder.run_id} --host HOST`",
        )  # fmt: skip
        name = host or (record["name"] if record else _host_of(workspace, folder.run_id, missing))
        return _adopt_run(folder.path.parent, folder.run_id, workspace.config.host(name), sinks, ask, pause)
    target = workspace.config.host(host or record["name"])
    transport = open_transport(target, ask=ask, pause=pause)
    return Run(folder, transport, plan["host"], plan["payload"], sinks, afterwards=Afterwards.of(target))


def refuse_unlaunched(folder: RunFolder) -> None:
    """Raise UsageError (`not-launched`) for a run that no host ever had."""
    if (folder.read("local.json") or {}).get("status") in ("planned", "refused"):
        raise UsageError(
            f"run {folder.run_id} was never launched",
            why=f"it was refused or given up before; what was seen is in {folder.path}/events",
            fix="see `ctl preflight`, then start a new one",
            code="not-launched",
        )


def _host_of(workspace: Workspace, run_id: str, unknown: UsageError) -> str:
    """Return the host of the configuration that lists a run of this whole id; all are asked at once.

    Raises UsageError, with what `unknown` says and which hosts were asked, if none does.
    """
    names = workspace.config.host_names()

    def look(name: str) -> str | None:
        """Return why the run was not found there, None if it was."""
        try:
            with host_context(workspace.config.host(name), ask=None) as ctx:
                return None if any(row["run_id"] == run_id for row in list_runs(ctx)["runs"]) else "not there"
        except CtlError as error:
            return error.what

    found = dict(zip(names, side_by_side(look, names, at_once=HOSTS_AT_ONCE), strict=True))
    for name, why in found.items():
        if why is None:
            return name
    asked = "; ".join(f"{name}: {why}" for name, why in found.items())
    raise UsageError(unknown.what, why=asked or unknown.why, fix=unknown.fix, code=unknown.code)


def _adopt_run(runs_dir: Path, run_id: str, host: Host, sinks: Sequence[Sink], ask: Ask | None, pause: Pause) -> Run:
    """Find a run that was launched elsewhere: the host's own list says which payload operates it."""
    with ExitStack() as undo:
        transport = open_transport(host, ask=ask, pause=pause)
        undo.callback(transport.close)
        ctx = pushed_context(host, transport)
        row = _listed_run(ctx, run_id)
        with copying(runs_dir / row["run_id"]):
            folder = RunFolder.create(runs_dir, row["run_id"])
            # The plan comes with the copy, after a log of gigabytes; a view names the run before that.
            folder.write_local(host=host.record(), status="launched", name=row.get("name"))
        undo.pop_all()  # the connection goes on to serve the run
    return Run(folder, transport, host.record(), row["payload"], sinks, afterwards=Afterwards.of(host))


def _listed_run(ctx: Context, run_id: str) -> dict[str, Any]:
    """Return the host's row of the run that this id, or a part of it, means. Raises UsageError."""
    host = ctx.host["name"]
    rows: dict[str, dict[str, Any]] = {row["run_id"]: row for row in list_runs(ctx)["runs"]}
    matches = matching(run_id, rows)
    if len(matches) != 1:
        raise UsageError(
            f"{run_id!r} is ambiguous on {host}" if matches else f"no run {run_id!r} on {host}",
            why=", ".join(matches),
            fix=f"list its runs with `ctl ps --host {host}`",
            code="run-ambiguous" if matches else "run-unknown",
        )
    return rows[matches[0]]

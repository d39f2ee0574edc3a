"""A run by its id: from its folder here, or from the host that is named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from controller.afterwards import HOOK_FAILED, Afterwards
from controller.contact import Ask, Pause, list_runs, open_transport, pushed_context
from controller.core.config import Config
from controller.core.errors import ConnectionFailed, ConnectionLost, UsageError
from controller.core.events import Event
from controller.core.model import Host
from controller.core.setting import typed
from controller.gone import RUN_GONE
from controller.localdisk import copying
from controller.run import Run, load_plan
from controller.runfolder import RUN_UNKNOWN, RunFolder, find_run, known_ids, like, matching
from controller.sinks import Sink
from controller.stages.base import Context
from controller.stages.mirror import COPY_DAMAGED
from controller.ui.clean import text as cleaned
from controller.ui.stream import is_own_warning
from controller.ui.terminal import err_console
from controller.workspace import Workspace, load_workspace


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

    `run_id` None means the last one launched from here. Without `host` no host is asked for a run that is not known
    here: a typo must not knock at anybody's door. A host of the environment (`core.setting`) is asked for what is
    like nothing that is known here; of a run that is, it says nothing. Raises UsageError, ConfigError,
    ConnectionFailed.
    """
    named = typed(host)
    try:
        folder = find_run(workspace.runs_dir, run_id)
    except UsageError as error:
        if not run_id or host is None:
            raise
        if named is None and (error.code != RUN_UNKNOWN or error.data):
            error.fix = f"{error.fix}; to have {host} asked, which CTL_HOST names: `--host {host}`"
            raise
        return _adopt_run(workspace.runs_dir, run_id, workspace.config.host(host), sinks, ask, pause)
    refuse_unlaunched(folder)
    local = folder.read("local.json") or {}
    plan = load_plan(folder)
    record = local.get("host") or (plan["host"] if plan is not None else None)
    if plan is None or record is None:
        # Its copy was cut off before the plan came, or files were lost here: the host still says what the run is.
        name = named or (record["name"] if record else host)
        if name is None:
            lacking = folder.missing(
                "plan.json", f"name the host of the run: `ctl attach {folder.run_id} --host HOST`"
            )
            lacking.why = lacking.why or "it was not made by ctl, or its copy was cut off"
            raise lacking
        return _adopt_run(folder.path.parent, folder.run_id, workspace.config.host(name), sinks, ask, pause)
    if named is not None:
        _refuse_other_host(workspace.config, folder.run_id, named, record)
    target = _host_of(workspace, folder, named, record)
    transport = open_transport(target, ask=ask, pause=pause)
    return Run(folder, transport, plan["host"], plan["payload"], sinks, afterwards=Afterwards.of(target))


def _host_of(workspace: Workspace, folder: RunFolder, named: str | None, record: Mapping[str, Any]) -> Host:
    """Return the host of a run as it is described here, else where the run was launched: in a project, perhaps."""
    try:
        return workspace.config.host(named or record["name"])
    except UsageError as error:
        if named is not None or error.code != "unknown-host":
            raise
        return load_workspace(cwd=folder.path, environ=workspace.environ).config.host(record["name"])


def _refuse_other_host(config: Config, run_id: str, named: str, record: Mapping[str, Any]) -> None:
    """Raise UsageError (`run-elsewhere`) where another host is named than the run is known to be of.

    The same address is the same host, and a name that is defined no more may have been changed.
    """
    target = config.host(named)
    same = target.name == record["name"] or target.record()["address"] == record["address"]
    if not same and record["name"] in config.hosts:
        raise UsageError(
            f"run {run_id} is of host `{record['name']}`, not of `{named}`",
            why="it was launched there, and no other host knows it",
            fix=f"leave `--host` out, or name {record['name']}",
            code="run-elsewhere",
        )


def copy_what_is_new(run: Run, *, handover_s: float = 0.0) -> None:
    """Bring the local copy up to date as `Run.refresh` does, and say on stderr what this side warns of."""
    with _telling(run):
        run.refresh(handover_s=handover_s)


def copy_or_say(run: Run, shows: str) -> None:
    """Copy what is new; where the host is out of reach, or has nothing of the run any more, say so on stderr.

    `shows` says what then has only what was copied before: `the report shows`.
    """
    try:
        copy_what_is_new(run)
    except (ConnectionFailed, ConnectionLost, UsageError) as error:
        if isinstance(error, UsageError) and error.code != RUN_GONE:
            raise
        err_console().print(cleaned(f"{error.what}: {shows} what was copied before"), soft_wrap=True)


def mend(run: Run) -> None:
    """Have the damaged documents of an ended run's copy written anew, if there are any and its host can be asked.

    Where it cannot, that is said on stderr: what is whole of the copy is still to be read.
    """
    if not run.folder.damaged():
        return
    try:
        copy_what_is_new(run)
    except (ConnectionFailed, ConnectionLost) as error:
        names = ", ".join(str(run.folder.path / name) for name in run.folder.damaged())
        words = f"{names} is damaged, and {run.host} cannot be asked for it: {error.what}"
        err_console().print(cleaned(words), soft_wrap=True)


@contextmanager
def _telling(run: Run) -> Iterator[None]:
    run.add_sink(sink := _Warnings())
    try:
        yield
    finally:
        run.remove_sink(sink)


class _Warnings:
    """Prints what only a copy tells: of damaged files, and of a hook that it ran and that failed."""

    def event(self, event: Event) -> None:
        if is_own_warning(event) and event.get("code") in (COPY_DAMAGED, HOOK_FAILED):
            err_console().print(cleaned(str(event.get("text"))), soft_wrap=True)

    def log(self, data: bytes) -> None:
        """A log is for who asked for it."""


def refuse_unlaunched(folder: RunFolder) -> None:
    """Raise UsageError (`not-launched`) for a run that no host ever had."""
    if (folder.read("local.json") or {}).get("status") in ("planned", "refused"):
        raise UsageError(
            f"run {folder.run_id} was never launched",
            why=f"it was refused or given up before; what was seen is in {folder.path}/events",
            fix="see `ctl preflight`, then start a new one",
            code="not-launched",
        )


def _adopt_run(runs_dir: Path, run_id: str, host: Host, sinks: Sequence[Sink], ask: Ask | None, pause: Pause) -> Run:
    """Find a run that was launched elsewhere: the host's own list says which payload operates it."""
    with ExitStack() as undo:
        transport = open_transport(host, ask=ask, pause=pause)
        undo.callback(transport.close)
        ctx = pushed_context(host, transport)
        row = _listed_run(ctx, run_id, known_ids(runs_dir))
        with copying(runs_dir / row["run_id"]):
            folder = RunFolder.create(runs_dir, row["run_id"])
            # The plan comes with the copy, after a log of gigabytes; a view names the run before that.
            folder.write_local(host=host.record(), status="launched", name=row.get("name"))
        undo.pop_all()  # the connection goes on to serve the run
    return Run(folder, transport, host.record(), row["payload"], sinks, afterwards=Afterwards.of(host))


def _listed_run(ctx: Context, run_id: str, known: Collection[str]) -> dict[str, Any]:
    """Return the host's row of the run that this id, or a part of it, means; `known` are ids that are known here.

    Raises UsageError.
    """
    host = ctx.host["name"]
    rows: dict[str, dict[str, Any]] = {row["run_id"]: row for row in list_runs(ctx)["runs"]}
    matches = matching(run_id, rows)
    if len(matches) != 1:
        close = like(run_id, {*rows, *known})
        raise UsageError(
            f"{run_id!r} is ambiguous on {host}" if matches else f"no run {run_id!r} on {host}, and none here",
            why=", ".join(matches) if matches else f"like it: {', '.join(close)}" if close else "",
            fix=f"list its runs with `ctl ps --host {host}`",
            code="run-ambiguous" if matches else RUN_UNKNOWN,
        )
    return rows[matches[0]]

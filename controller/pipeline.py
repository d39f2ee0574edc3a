"""The stages in order: from an intention to a run that the host holds, and back to a run by its id."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from controller import history
from controller.afterwards import Afterwards
from controller.core import planner, shape
from controller.core.checks_command import programs
from controller.core.command import CommandPlaybook, CommandPreflight
from controller.core.errors import CtlError, LaunchUnknown, RefusedError, UsageError
from controller.core.model import Host, Overrides, Playbook
from controller.localdata import LocalData, local_data
from controller.localdisk import before_launch, copying
from controller.localfiles import LocalFiles
from controller.payload import load_payload
from controller.run import Run, Sink, load_plan
from controller.runfolder import RunFolder, find_run
from controller.stages import data as data_stage
from controller.stages import launch as launch_stage
from controller.stages import preflight as preflight_stage
from controller.stages import push as push_stage
from controller.stages import uploads as uploads_stage
from controller.stages.base import Context, Emit
from controller.transport.base import Transport
from controller.version import version
from controller.workspace import Workspace
from remote_payload.host.protocol import OwnedOutput, Plan, Stale

Ask = Callable[[str], bool]
"""Asks a person a yes-or-no question; returns False where there is nobody to ask."""

Pause = Callable[[], AbstractContextManager[None]]
"""Keeps the terminal free for somebody else's questions while its block runs."""

Confirm = Callable[[Sequence[OwnedOutput], Mapping[str, Mapping[str, Any]]], bool]
"""Shows what clear will delete or move, and asks: the outputs touched, and the host's listing of each by path."""


WAITED_FOR = ("lease-busy", "gpu-process", "gpu-memory")
"""Findings that a run which waits for its turn does not mind: the supervisor looks again when the turn has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intention:
    """A plan, and what must not be written into it."""

    plan: Plan
    host: Host
    playbook: Playbook | CommandPlaybook | None
    secret_values: dict[str, str]
    runs_dir: Path
    allow: tuple[str, ...] = ()
    """Codes of findings that this run is started in spite of, besides those of the playbook."""
    data: LocalData | None = None
    """A data set of this workstation that must be on the host before its preflight."""
    uploads: LocalFiles | None = None
    """Files of this workstation that the run gets a copy of."""

    @property
    def extraction(self) -> Playbook | None:
        """The playbook, if it is of an extraction."""
        return self.playbook if isinstance(self.playbook, Playbook) else None


# ---------------------------------------------------------------------------------------------- plan


def plan_extract(
    workspace: Workspace,
    host: str | None,
    playbook: str | None,
    overrides: Overrides,
    *,
    allow: Sequence[str] = (),
    wait: bool = False,
) -> Intention:
    """Plan an extraction without connecting; None takes the setting or the host's default.

    With `wait` it queues on the host until the lease is free.

    Raises UsageError, ConfigError.
    """
    return _planned(planner.make_plan, workspace, host, playbook, overrides, allow, wait=wait)


def plan_rehearsal(workspace: Workspace, host: str | None, playbook: str | None, overrides: Overrides) -> Intention:
    """Plan only the rehearsal of an extraction, without connecting. Raises UsageError, ConfigError."""
    return _planned(planner.make_rehearsal_plan, workspace, host, playbook, overrides)


def _planned(
    make: Callable[..., Plan],
    workspace: Workspace,
    host: str | None,
    playbook: str | None,
    overrides: Overrides,
    allow: Sequence[str] = (),
    *,
    wait: bool = False,
) -> Intention:
    target = workspace.config.host(host)
    chosen = workspace.playbook(playbook, target)
    data = local_data(overrides.data or chosen.data.path, workspace.cwd)
    pushed = data.path_on(target) if data else None
    plan = make(target, chosen, **stamp(), overrides=overrides, pushed=pushed)
    return Intention(
        plan=planner.with_queue(plan) if wait else plan,
        host=target,
        playbook=chosen,
        secret_values=workspace.secret_values(target, chosen),
        allow=tuple(allow),
        runs_dir=workspace.runs_dir,
        data=data,
    )


def new_run_id(now: datetime | None = None) -> str:
    """Return an id that nothing has yet; `now` is in UTC."""
    return planner.new_run_id(now or datetime.now(UTC), secrets.token_bytes(3))


class Stamp(TypedDict):
    run_id: str
    created: str
    payload: str
    ctl_version: str


def stamp() -> Stamp:
    """What makes one plan differ from another of the same intention."""
    now = datetime.now(UTC)
    return {
        "run_id": new_run_id(now),
        "created": now.isoformat(timespec="seconds"),
        "payload": load_payload().digest,
        "ctl_version": version(),
    }


# -------------------------------------------------------------------------------------------- launch


def launch(
    intention: Intention,
    *,
    sinks: Sequence[Sink] = (),
    ask: Ask | None = None,
    pause: Pause = nullcontext,
    confirm: Confirm,
) -> Run:
    """Take a plan through connect, push, preflight, confirm and launch; return once the host holds the run.

    Raises ConnectionFailed, RefusedError, RemoteFailed; LaunchUnknown if nobody can say whether it was launched.
    """
    plan = intention.plan
    origin = intention.playbook.origin if intention.playbook else None
    with before_launch(intention.runs_dir):
        folder = RunFolder.create(intention.runs_dir, plan["run_id"])
        folder.write_plan(plan)
        folder.write_local(host=plan["host"], status="planned", playbook_file=origin)
    with ExitStack() as undo:
        transport = open_transport(intention.host, ask=ask, pause=pause)
        undo.callback(transport.close)
        afterwards = Afterwards.of(intention.host)
        run = Run(folder, transport, plan["host"], plan["payload"], sinks, afterwards=afterwards)
        ctx = run.context
        push_s = _connect_and_push(ctx)
        if intention.data is not None:
            data_stage.run(ctx, intention.data)
        if intention.uploads is not None:
            uploads_stage.run(ctx, intention.uploads)
        outcome = preflight(ctx, intention)
        try:
            preflight_stage.refuse(outcome)
            plan = planner.with_preflight(
                plan,
                outcome.outputs,
                {"push_s": push_s, "preflight_s": round(outcome.seconds, 3)},
                outcome.allowed,
            )
            _confirm(ctx, plan, outcome.listings, confirm)
            with before_launch(intention.runs_dir):
                folder.write_plan(plan)
                # From here on the host may hold the run, whatever happens to us.
                folder.write_local(status="unknown")
                run.flush()
            launch_stage.run(ctx, plan, intention.secret_values)
        except LaunchUnknown:
            raise
        except (CtlError, KeyboardInterrupt):
            # What kept it from being launched is worth more than a full disk that keeps it from being noted.
            with suppress(OSError):
                folder.write_local(status="refused")
            raise
        with copying(folder.path):
            folder.write_local(status="launched")
        _remember(ctx, plan, folder)
        undo.pop_all()
    return run


def _remember(ctx: Context, plan: Plan, folder: RunFolder) -> None:
    entry = history.Entry(
        run_id=plan["run_id"],
        host=plan["host"]["name"],
        name=plan["job"]["name"],
        created=plan["created"],
        folder=str(folder.path),
    )
    try:
        history.record(entry)
    except OSError as error:
        # The run is on its way: a home folder that cannot be written is worth a word, not a failure.
        ctx.emit("notice", level="warn", code="history", text=f"not remembered in {history.history_file()}: {error}")


def preflight(ctx: Context, intention: Intention) -> preflight_stage.PreflightOutcome:
    """Probe and judge the host for an intention; failures that it or its playbook allows are warnings."""
    limits = intention.playbook.preflight if intention.playbook else None
    needs = limits if isinstance(limits, CommandPreflight) else CommandPreflight()
    queue = WAITED_FOR if intention.plan["job"]["limits"].get("wait_for_lease") else ()
    expected = preflight_stage.Expectations(
        gpu_name=intention.host.gpu_name,
        bytes_expected=shape.bytes_expected(intention.plan, intention.extraction),
        min_free_bytes=limits.min_free_bytes if limits else None,
        min_memory_bytes=needs.min_memory_bytes,
        programs=programs(intention.plan, needs.programs),
        allow=(*(limits.allow if limits else ()), *intention.allow, *queue),
    )
    return preflight_stage.run(ctx, intention.plan, expected)


def _confirm(ctx: Context, plan: Plan, listings: Mapping[str, Mapping[str, Any]], confirm: Confirm) -> None:
    """Have a person agree to what clear will delete, move or claim; nothing is asked where nothing is touched."""
    touched = [output for output in plan["job"]["outputs"] if output["entries"] and output["stale"] != Stale.FAIL]
    if not touched:
        return
    ctx.emit("stage", name="confirm", status="started")
    if not confirm(touched, listings):
        ctx.emit("stage", name="confirm", status="failed", text="declined")
        raise RefusedError("declined: nothing was deleted and nothing was launched", code="declined")
    ctx.emit("stage", name="confirm", status="done", text="confirmed")


def _connect_and_push(ctx: Context) -> float:
    """Connect, push, and return the seconds that the push took."""
    started = time.monotonic()
    ctx.emit("stage", name="connect", status="started")
    try:
        ctx.transport.connect()
    except CtlError as error:
        ctx.emit("stage", name="connect", status="failed", text=error.what)
        raise
    ctx.emit("stage", name="connect", status="done", seconds=round(time.monotonic() - started, 3))
    if ctx.transport.note:
        ctx.emit("notice", level="info", code="transport", text=ctx.transport.note)
    pushed = push_stage.run(ctx.transport, ctx.host, emit=ctx.emit)
    return round(pushed.seconds, 3)


# ------------------------------------------------------------------------------------ an existing run


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

    `run_id` None means the last one launched from here. Raises UsageError, ConfigError; RemoteFailed if the host
    does not know the run.
    """
    try:
        folder = find_run(workspace.runs_dir, run_id)
    except UsageError:
        if run_id is None or host is None:
            raise
        return _adopt_run(workspace, run_id, workspace.config.host(host), sinks, ask)
    plan = load_plan(folder)
    if (folder.read("local.json") or {}).get("status") in ("planned", "refused"):
        raise UsageError(
            f"run {folder.run_id} was never launched",
            why=f"it was refused or given up before; what was seen is in {folder.path}/events",
            fix="see `ctl preflight`, then start a new one",
            code="not-launched",
        )
    record = (folder.read("local.json") or {}).get("host")
    if plan is None or record is None:
        raise UsageError(
            f"{folder.path} holds no plan", why="it was not made by ctl, or its copy was cut off",
            fix=f"attach anew: `ctl attach {folder.run_id} --host HOST`",
        )  # fmt: skip
    target = workspace.config.host(host or record["name"])
    transport = open_transport(target, ask=ask, pause=pause)
    return Run(folder, transport, plan["host"], plan["payload"], sinks, afterwards=Afterwards.of(target))


def _adopt_run(workspace: Workspace, run_id: str, host: Host, sinks: Sequence[Sink], ask: Ask | None) -> Run:
    """Find a run that was launched elsewhere: the host's own list says which payload operates it."""
    with ExitStack() as undo:
        transport = open_transport(host, ask=ask)
        undo.callback(transport.close)
        ctx = _pushed_context(host, transport)
        run_id, payload = _listed_run(ctx, run_id)
        with copying(workspace.runs_dir / run_id):
            folder = RunFolder.create(workspace.runs_dir, run_id)
            folder.write_local(host=host.record(), status="launched")
        undo.pop_all()  # the connection goes on to serve the run
    return Run(folder, transport, host.record(), payload, sinks, afterwards=Afterwards.of(host))


def _listed_run(ctx: Context, run_id: str) -> tuple[str, str]:
    """Return the whole id of a run that the host lists, and its payload. Raises UsageError."""
    host = ctx.host["name"]
    listed = list_runs(ctx)["runs"]
    matches = [row for row in listed if row["run_id"].startswith(run_id) or row["run_id"].endswith(run_id)]
    if len(matches) != 1:
        raise UsageError(
            f"{run_id!r} is ambiguous on {host}" if matches else f"no run {run_id!r} on {host}",
            why=", ".join(row["run_id"] for row in matches),
            fix=f"list its runs with `ctl ps --host {host}`",
            code="run-unknown",
        )
    return matches[0]["run_id"], matches[0]["payload"]


# ------------------------------------------------------------------------------------- a host itself


@contextmanager
def host_context(host: Host, *, ask: Ask | None, emit: Emit | None = None) -> Iterator[Context]:
    """Connect to a host, push the payload, and yield a context for its verbs (ps, probe)."""
    with open_transport(host, ask=ask) as transport:
        yield _pushed_context(host, transport, emit)


def _pushed_context(host: Host, transport: Transport, emit: Emit | None = None) -> Context:
    ctx = Context(transport=transport, host=host.record(), payload=load_payload().digest, emit=emit or _discard)
    _connect_and_push(ctx)
    return ctx


def list_runs(ctx: Context) -> dict[str, Any]:
    """Return {"runs": [...], "leases": [...]} of a host, judged there."""
    return ctx.call_json("ps", {"workdir": ctx.host["workdir"], "lease_dir": ctx.host["lease_dir"]})


def open_transport(host: Host, *, ask: Ask | None, pause: Pause = nullcontext) -> Transport:
    """Return the transport that the host's configuration asks for, not yet connected.

    `pause` is held while `ssh` itself asks a person something on the terminal.
    """
    # Imported here: fabric and paramiko take 250 ms.
    from controller.transport.auto import AutoTransport
    from controller.transport.openssh import OpensshTransport
    from controller.transport.ssh import SshTarget, SshTransport

    target = SshTarget(host=host.address, port=host.port, user=host.user, ssh_config=host.ssh_config)
    if host.transport == "paramiko":
        return SshTransport(target, ask=ask, connect_timeout_s=host.connect_timeout_s)
    kind = OpensshTransport if host.transport == "openssh" else AutoTransport
    return kind(target, ask=ask, pause=pause, connect_timeout_s=host.connect_timeout_s)


def _discard(event_type: str, /, **fields: object) -> None:
    """An emit for contacts that belong to no run."""

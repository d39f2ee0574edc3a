"""The stages in order: from an intention to a run that the host holds, and back to a run by its id."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from controller import history
from controller.afterwards import Afterwards
from controller.attempts import drop_old_attempts
from controller.contact import Ask, Pause, connect_and_push, open_transport
from controller.core import planner, shape
from controller.core.checks_command import programs
from controller.core.checks_outputs import counts_as_empty
from controller.core.command import CommandPlaybook, CommandPreflight
from controller.core.errors import CtlError, LaunchUnknown, RefusedError
from controller.core.findingcodes import check_codes
from controller.core.model import Host, Overrides, Playbook
from controller.localdata import LocalData, local_data
from controller.localdisk import before_launch, copying
from controller.localfiles import LocalFiles
from controller.payload import load_payload
from controller.run import Run
from controller.runfolder import RunFolder
from controller.sinks import Sink
from controller.stages import data as data_stage
from controller.stages import launch as launch_stage
from controller.stages import preflight as preflight_stage
from controller.stages import uploads as uploads_stage
from controller.stages.base import Context
from controller.version import version
from controller.workspace import Workspace
from remote_payload.host.protocol import OwnedOutput, Plan, Stale

Confirm = Callable[[Sequence[OwnedOutput], Mapping[str, Mapping[str, Any]]], bool]
"""Shows what clear will delete or move, and asks: the outputs touched, and the host's listing of each by path."""


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
    allowed = check_codes(allow)
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
        allow=allowed,
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
        push_s = connect_and_push(ctx)
        try:
            if intention.data is not None:
                data_stage.run(ctx, intention.data)
            if intention.uploads is not None:
                uploads_stage.run(ctx, intention.uploads)
            outcome = preflight(ctx, intention)
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
            launched = launch_stage.run(ctx, plan, intention.secret_values)
            run.confirmed(launched.confirmation["run"])
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
        _tidy(ctx, intention.runs_dir)
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


def _tidy(ctx: Context, runs_dir: Path) -> None:
    try:
        drop_old_attempts(runs_dir)
    except OSError as error:
        text = f"folders of old attempts that launched nothing stay in {runs_dir}: {error}"
        ctx.emit("notice", level="warn", code="attempts-kept", text=text)


def preflight(ctx: Context, intention: Intention) -> preflight_stage.PreflightOutcome:
    """Probe and judge the host for an intention; failures that it or its playbook allows are warnings."""
    limits = intention.playbook.preflight if intention.playbook else None
    needs = limits if isinstance(limits, CommandPreflight) else CommandPreflight()
    expected = preflight_stage.Expectations(
        gpu_name=intention.host.gpu_name,
        data_name=str(intention.data.path) if intention.data else None,
        bytes_expected=shape.bytes_expected(intention.plan, intention.extraction),
        min_free_bytes=limits.min_free_bytes if limits else None,
        min_memory_bytes=needs.min_memory_bytes,
        programs=programs(intention.plan, needs.programs),
        engine_places=getattr(intention.playbook, "engine_places", {}),
        allow=(*(limits.allow if limits else ()), *intention.allow),
    )
    return preflight_stage.run(ctx, intention.plan, expected)


def _confirm(ctx: Context, plan: Plan, listings: Mapping[str, Mapping[str, Any]], confirm: Confirm) -> None:
    """Have a person agree to what clear will delete, move or claim; nothing is asked where nothing is touched."""
    touched = outputs_to_confirm(plan, listings)
    if not touched:
        return
    ctx.emit("stage", name="confirm", status="started")
    if not confirm(touched, listings):
        ctx.emit("stage", name="confirm", status="failed", text="declined")
        raise RefusedError("declined: nothing was deleted and nothing was launched", code="declined")
    ctx.emit("stage", name="confirm", status="done", text="confirmed")


def outputs_to_confirm(plan: Plan, listings: Mapping[str, Mapping[str, Any]]) -> list[OwnedOutput]:
    """Return the outputs of which a run loses something; `listings` as the probe reports them, by path."""
    outputs = plan["job"]["outputs"]
    return [each for each in outputs if each["entries"] and _loses(each, listings.get(each["path"], {}))]


def _loses(output: OwnedOutput, listing: Mapping[str, Any]) -> bool:
    """Whether something of the folder is deleted, moved or claimed. A resume deletes what was never finished."""
    if output["stale"] == Stale.FAIL or (listing and counts_as_empty(listing)):
        return False
    return output["stale"] != Stale.RESUME or bool(listing.get("foreign", True) or listing.get("partial", 1))


# ------------------------------------------------------------------------------------ an existing run

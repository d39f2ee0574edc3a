"""`ctl hosts setup` and `ctl hosts fetch-model`: look at the host, show the plan, run it as a supervised job.

Both are jobs like any other (docs/architecture.md, "The job"): here they are only planned.
"""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from controller import commands, contact, pipeline
from controller.core import planner
from controller.core.environment import Wish, environment_folder, plan_change
from controller.core.errors import ExitCode, UsageError
from controller.core.fetching import ModelWish, model_folder, plan_download
from controller.core.model import Host
from controller.pipeline import Intention
from controller.ui.terminal import ask_yes_no, can_ask, err_console, out_console, print_json, require_yes, spoken
from controller.workspace import Workspace, load_workspace
from remote_payload.host.protocol import Accelerator, Step

TOKEN = "HF_TOKEN"  # noqa: S105 - a name: the variable that the hub's client reads
ONLINE = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""For the fetching job: hosts.toml often keeps extractions offline, and progress is told by events."""

QUIET_PIP = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A plan for a person, as sections of rows, and for a program."""

    sections: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]


def setup(
    host: str, wish: Wish, *, check: bool, yes: bool, dry_run: bool, detach: bool, progress: str, as_json: bool
) -> ExitCode:
    """Make or complete the host's environment; with `check` prove it by importing vLLM even if nothing is lacking."""
    workspace = load_workspace()
    target = workspace.config.host(host)
    folder = environment_folder(target)  # before the host is asked: most mistakes are in hosts.toml
    request = {"python": target.python, "base_python": wish.base_python or target.bootstrap_python}
    with contact.host_context(target, ask=ask_yes_no) as ctx:
        found = ctx.call_json("environment", request)
    change = plan_change(target, wish, found)
    shown = Shown(sections=change.sections, facts=change.facts)
    if change.nothing and not check:
        return _nothing(target, f"{folder} holds all that is asked for", shown, as_json=as_json)
    steps = (*change.steps, change.check)
    intention = _intention(workspace, target, "setup", f"set up {folder}", steps, QUIET_PIP, {})
    return _carry_out(
        intention, shown, yes=yes or change.nothing, dry_run=dry_run, detach=detach, progress=progress,
        as_json=as_json,
    )  # fmt: skip


def fetch_model(
    host: str,
    repo: str,
    revision: str,
    *,
    to: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
    adopt: bool,
    token_stdin: bool,
    yes: bool,
    dry_run: bool,
    detach: bool,
    progress: str,
    as_json: bool,
) -> ExitCode:
    """Bring one commit of a model into a folder of the host, proved file by file."""
    workspace = load_workspace()
    target = workspace.config.host(host)
    wish = ModelWish(
        repo=repo, revision=revision, folder=model_folder(target, repo, to), include=tuple(include),
        exclude=tuple(exclude), adopt=adopt,
    )  # fmt: skip
    token = {TOKEN: _read_token()} if token_stdin else {}
    secrets = {**workspace.secret_values(target, None), **token}
    body = json.dumps({"env": {**target.env, **secrets, **ONLINE}}).encode()
    with contact.host_context(target, ask=ask_yes_no) as ctx:
        found = ctx.call_json("hub", {"python": target.python, "query": wish.query()}, body=body)
    download = plan_download(target, wish, found)
    shown = Shown(sections=download.sections, facts=download.facts)
    if download.nothing:
        done = f"{wish.folder} holds {repo}@{found['commit']}, whole and proved"
        return _nothing(target, done, shown, as_json=as_json)
    name = f"fetch {repo}"
    intention = _intention(workspace, target, "fetch-model", name, download.steps, ONLINE, token)
    return _carry_out(intention, shown, yes=yes, dry_run=dry_run, detach=detach, progress=progress, as_json=as_json)


def _read_token() -> str:
    token = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline()
    token = token.strip()
    if not token:
        raise UsageError("no token came on stdin", fix="pipe it in: `ctl hosts fetch-model ... --token-stdin < FILE`")
    return token


def _intention(
    workspace: Workspace,
    host: Host,
    kind: str,
    name: str,
    steps: Sequence[Step],
    env: Mapping[str, str],
    secrets: Mapping[str, str],
) -> Intention:
    """Return a job of these steps that uses no GPU. Secrets beat those of the same name in hosts.toml."""
    plan = planner.make_command_plan(host, steps[0]["argv"], name=name, **pipeline.stamp())
    job = plan["job"]
    job["kind"], job["steps"] = kind, list(steps)
    job["env"] = {**job["env"], **env}
    job["secret_env"] = sorted({*job["secret_env"], *secrets})
    # No GPU is used, so none is leased; two such jobs never work side by side.
    plan["host"] = {**plan["host"], "accelerator": Accelerator.CPU.value, "gpus": 0}
    return Intention(
        plan=plan, host=host, playbook=None, secret_values={**workspace.secret_values(host, None), **secrets},
        runs_dir=workspace.runs_dir,
    )  # fmt: skip


def _carry_out(
    intention: Intention, shown: Shown, *, yes: bool, dry_run: bool, detach: bool, progress: str, as_json: bool
) -> ExitCode:
    """Show the plan; unless it is all that was asked for, have it confirmed, launch it and watch."""
    from controller.ui.tables import print_intention

    if dry_run and as_json:
        print_json(_document(intention.host, shown, steps=intention.plan["job"]["steps"]))
        return ExitCode.OK
    with nullcontext() if yes or not can_ask() else spoken():
        print_intention(out_console() if dry_run else err_console(), shown.sections)
    if dry_run:
        return ExitCode.OK
    if not yes:
        require_yes(
            "go on?", unattended="nobody is there to confirm the plan", fix="add `--yes` to do exactly what is shown",
            declined="nothing was changed",
        )  # fmt: skip
    return commands.launch_and_watch(intention, yes=True, detach=detach, progress=progress, as_json=as_json)


def _nothing(host: Host, text: str, shown: Shown, *, as_json: bool) -> ExitCode:
    if as_json:
        print_json(_document(host, shown, steps=()))
    else:
        out_console().print(f"nothing to do: {text}", markup=False, soft_wrap=True)
    return ExitCode.OK


def _document(host: Host, shown: Shown, *, steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "schema_version": 1, "host": host.name, "nothing_to_do": not steps, "plan": dict(shown.facts),
        "steps": [dict(step) for step in steps], "sections": list(shown.sections),
    }  # fmt: skip

"""The command that makes a run again, from its plan alone: every value that a flag can set is written out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from controller.core.checks_source import conversion_options
from remote_payload.host.protocol import Plan

REHEARSALS = ("auto", "always", "never")
"""What `--rehearse` takes; a plan may hold other words."""

_FLAGS = {
    "--data": "data",
    "--data-kind": "data_kind",
    "--max-samples": "max_samples",
    "--output": "output",
    "--format": "format",
    "--store-dtype": "store_dtype",
    "--capture": "capture",
}


def repeat_command(plan: Plan, playbook_file: str | None = None) -> list[str]:
    """Return the argv of `ctl` that plans the same run: same host, data, samples, states, format and output.

    What no flag sets (the model, engine arguments, limits) comes from the playbook, so the same file is named.
    `playbook_file` is where it lay; a file outside a `playbooks` folder is named by its path.
    """
    job, kind = plan["job"], plan["job"]["kind"]
    argv = ["ctl", *_verb(plan), "--host", plan["host"]["name"]]
    spec = plan["extract"]
    if kind == "convert":
        options = conversion_options(plan)
        argv[2:2] = [PurePath(options["--run"]).name, "--to", options["--to"]]
        return [*argv, "--output", options["--output"], *_stale(plan)]
    if spec is None:
        command = next(each["argv"] for each in job["steps"] if each["kind"] == "exec")
        wait = ["--wait"] if job["limits"].get("wait_for_lease") else []
        return [*argv, "--name", job["name"], "--cwd", job["cwd"], *wait, "--", *command]
    argv += ["--playbook", _playbook(plan["playbook"] or job["name"], playbook_file)]
    if kind == "rehearse":
        return [*argv, "--capture", spec["capture"]]
    return [*argv, *_capture(spec), *_stale(plan), *_permissions(plan)]


def repeat_text(plan: Plan, playbook_file: str | None = None) -> str:
    """Return the same as one line for a POSIX shell."""
    return shlex.join(repeat_command(plan, playbook_file))


def _verb(plan: Plan) -> list[str]:
    return {"extract": ["extract"], "rehearse": ["rehearse"], "convert": ["convert"]}.get(
        plan["job"]["kind"], ["run"]
    )


def _playbook(name: str, file: str | None) -> str:
    return name if file is None or PurePath(file).parent.name == "playbooks" else file


def _capture(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of an ExtractSpec; plans of earlier versions lack some of its fields."""
    for flag, name in _FLAGS.items():
        if spec.get(name) is not None:
            yield from (flag, str(spec[name]))
    if isinstance(spec["boundaries"], str):
        yield from ("--boundaries", spec["boundaries"])
    else:
        # The plan's numbers are ours already; the playbook may be written in another system's.
        yield from ("--boundaries", ",".join(map(str, spec["boundaries"])), "--layer-convention", "boundaries")
    number, count = spec.get("shard") or (1, 1)
    if count > 1:
        yield from ("--shard", f"{number}/{count}")
    if not spec.get("canary", True):
        yield "--no-canary"
    if spec.get("rehearse") in REHEARSALS:
        yield from ("--rehearse", spec["rehearse"])


def _stale(plan: Plan) -> Iterator[str]:
    for output in plan["job"]["outputs"]:
        yield from ("--stale", output["stale"])
        if output["adopt"]:
            yield "--adopt"


def _permissions(plan: Plan) -> Iterator[str]:
    for code in plan.get("allowed", ()):
        yield from ("--allow", code)
    if plan["job"]["limits"].get("wait_for_lease"):
        yield "--wait"

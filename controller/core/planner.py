"""Host + playbook + flags -> plan: pure, so that the same inputs give the same plan, byte for byte.

The plan says what will be uploaded, run, written and perhaps deleted; it holds no secret (see `redaction`). Only
`with_preflight` adds what the host was seen to hold.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from controller.core.boundaries import resolve_boundaries
from controller.core.errors import ConfigError, UsageError
from controller.core.model import DEFAULT_LOG_CAP, Host, Overrides, Playbook
from controller.core.outputs import output_step, owned_output, planned_output
from controller.core.playbook import override
from controller.core.redaction import refuse_secrets, split_env
from controller.core.runview import kind_word
from controller.core.shape import model_shape
from remote_payload.host.layers import boundaries_of
from remote_payload.host.layout import Layout, check_run_id
from remote_payload.host.protocol import (
    WIRE,
    Accelerator,
    EndReason,
    ExtractSpec,
    Job,
    Limits,
    OwnedOutput,
    Plan,
    Stale,
    Step,
)

FINAL_NORM = {"speculators": False, "speculators-0.3": False, "specforge": True, "modelopt": True}
"""Whether a format's consumers expect the model's last state after its final norm; the model applies it."""

WHOLE = (1, 1)
"""The shard of a host that does everything."""

COMMAND_GRACE_S = 30.0
"""Between TERM and KILL for a command: enough for a trainer to write a checkpoint marker, short for a person."""


def new_run_id(now: datetime, random: bytes) -> str:
    """Return a run id from an aware time and 3 random bytes."""
    return check_run_id(f"{now.astimezone(UTC):%Y%m%d-%H%M%S}-{random.hex()}")


def make_plan(
    host: Host,
    playbook: Playbook,
    *,
    run_id: str,
    created: str,
    payload: str,
    ctl_version: str,
    overrides: Overrides | None = None,
    pushed: str | None = None,
) -> Plan:
    """Plan an extraction. `created` is ISO 8601 in UTC, `payload` the hash of the payload's manifest.

    `pushed` is where on the host a data set of the workstation (`local:`) will lie.

    Raises ConfigError if the output lies outside the host's `output_roots` or touches what is not ours to clear, or
    if the boundaries do not fit a known number of layers; UsageError if a flag's value is not valid.
    """
    overrides = overrides or Overrides()
    playbook = override(playbook, overrides)
    shard = check_shard(overrides.shard)
    boundaries = wanted_boundaries(playbook)
    layers = model_shape(playbook).num_layers
    if layers is not None:
        resolve_boundaries(boundaries, layers)
    output = planned_output(host, playbook, adopt=overrides.adopt, by_flag=overrides.output is not None)
    env, secret_env = job_env(host, playbook)
    job: Job = {
        "kind": "extract",
        "name": playbook.name,
        "steps": [
            {"name": "recheck", "kind": "recheck"},
            *([] if playbook.rehearse.mode == "never" else [_rehearse_step(host)]),
            output_step([output]),
            {"name": "extract", "kind": "exec", "argv": [host.python, "-m", "remote_payload.extract.engine"]},
            {"name": "verify", "kind": "verify", "argv": [host.python, "-m", "remote_payload.extract.summarize"]},
        ],
        # `python -m` imports from the current folder first; the run's own folder holds no Python.
        "cwd": Layout(host.workdir).run(run_id).folder,
        "env": env,
        "secret_env": secret_env,
        "outputs": [output],
        "success": {"exit_codes": [0]},
        "limits": {
            "load_timeout_s": playbook.limits.load_timeout,
            "silence_timeout_s": playbook.limits.silence_timeout,
            "time_limit_s": playbook.limits.time_limit,
            "stop_grace_s": playbook.limits.stop_grace,
            "log_cap_bytes": playbook.limits.log_cap,
        },
    }
    plan = envelope(host, job, run_id=run_id, created=created, payload=payload, ctl_version=ctl_version)
    plan["playbook"] = playbook.name
    plan["extract"] = dict(_extract_spec(host, playbook, output["path"], shard, pushed))
    return plan


def make_rehearsal_plan(
    host: Host,
    playbook: Playbook,
    *,
    run_id: str,
    created: str,
    payload: str,
    ctl_version: str,
    overrides: Overrides | None = None,
    pushed: str | None = None,
) -> Plan:
    """Plan only the rehearsal of an extraction, whatever the size of the model and without its cache.

    It owns no output, so nothing is ever cleared. Raises as `make_plan`.
    """
    plan = make_plan(
        host, playbook, run_id=run_id, created=created, payload=payload, ctl_version=ctl_version,
        overrides=overrides, pushed=pushed,
    )  # fmt: skip
    assert plan["extract"] is not None
    plan["extract"]["rehearse"] = "fresh"
    job = plan["job"]
    job["kind"], job["outputs"] = "rehearse", []
    job["steps"] = [{"name": "recheck", "kind": "recheck"}, _rehearse_step(host)]
    return plan


def make_command_plan(
    host: Host,
    argv: Sequence[str],
    *,
    name: str,
    run_id: str,
    created: str,
    payload: str,
    ctl_version: str,
    cwd: str | None = None,
    time_limit_s: float | None = None,
    tracebacks: bool = False,
) -> Plan:
    """Plan a run of any command: it owns no output, so nothing is ever cleared. `cwd` starts at `workdir`.

    `tracebacks` hooks every Python process of it (see `remote_payload.hook`).

    Raises UsageError if there is no command, or if it carries a secret in the open.
    """
    if not argv or not argv[0]:
        raise UsageError("no command given", fix="write it after `--`: ctl run --host NAME -- python train.py")
    refuse_secrets(argv, host.name, "leave it out here")
    env, secret_env = job_env(host, None)
    step: Step = {"name": "command", "kind": "exec", "argv": list(argv)}
    limits: Limits = {
        "time_limit_s": time_limit_s,
        "stop_grace_s": COMMAND_GRACE_S,
        "log_cap_bytes": DEFAULT_LOG_CAP,
    }
    job: Job = {
        "kind": "command",
        "name": name,
        "steps": [{"name": "recheck", "kind": "recheck"}, step],
        "cwd": host.resolve(cwd) if cwd else host.workdir,
        "env": env,
        "secret_env": secret_env,
        "outputs": [],
        "success": {"exit_codes": [0]},
        "limits": limits,
    }
    if tracebacks:
        job["tracebacks"] = True
    return envelope(host, job, run_id=run_id, created=created, payload=payload, ctl_version=ctl_version)


def make_convert_plan(
    host: Host,
    source: Plan,
    *,
    to: str,
    output: str | None,
    stale: str,
    adopt: bool,
    run_id: str,
    created: str,
    payload: str,
    ctl_version: str,
) -> Plan:
    """Plan the conversion of an extraction's files, on its host, without its GPUs, beside whatever runs on them.

    `output` defaults to the source's folder with `-FORMAT` after its name. Raises UsageError if `source` is no
    extraction, of that format already, or of states that the format cannot hold without loss (`lossy-conversion`: as
    far as the plan tells; the job looks at the files), ConfigError if the output may not lie there.
    """
    spec = source["extract"]
    if spec is None or source["job"]["kind"] != "extract":
        raise UsageError(
            f"run {source['run_id']} is a {kind_word(source['job']['kind'])}, not an extraction",
            why="only the samples of an extraction can be converted",
            fix="name an extraction, or say `--last` for the last one",
            code="no-samples",
        )
    if to not in FINAL_NORM:
        raise UsageError(f"there is no format `{to}`", fix=f"use one of {', '.join(FINAL_NORM)}")
    if spec["format"] == to:
        raise UsageError(
            f"the samples of run {source['run_id']} are of format {to} already",
            fix=f"nothing is to be done, or `--to` another: {', '.join(each for each in FINAL_NORM if each != to)}",
        )
    lost = None
    if spec.get("store_dtype") == "fp8":
        lost = "they are fp8, rounded when they were stored: no format may pass them on as more"
    elif spec.get("final_norm") and not FINAL_NORM[to]:
        lost = f"the last state is after the final norm, format {to} needs it before: it cannot be undone"
    if lost is not None:
        raise UsageError(
            f"the states of run {source['run_id']} cannot be converted to {to} without loss",
            why=lost,
            fix=f"extract them anew with `--format {to}`",
            code="lossy-conversion",
        )
    path = host.resolve(output) if output else f"{spec['output']}-{to}"
    if stale == Stale.RESUME.value:
        raise UsageError(
            "a conversion cannot resume: it writes every file anew",
            fix="`--stale clear` deletes what is in its output, `--stale quarantine` moves it",
        )
    owned = owned_output(host, path, stale=stale, adopt=adopt, reads=(spec["output"], spec["model"], spec["data"]))
    runs = Layout(host.workdir)
    argv = [
        host.python, "-m", "remote_payload.extract.convert", "--run", runs.run(source["run_id"]).folder,
        "--output", path, "--to", to,
    ]  # fmt: skip
    env, secret_env = job_env(host, None)
    job: Job = {
        "kind": "convert",
        "name": f"convert to {to}",
        "steps": [
            output_step([owned]),
            {"name": "convert", "kind": "exec", "argv": argv},
            {"name": "verify", "kind": "verify", "argv": [*argv, "--verify"]},
        ],
        "cwd": runs.run(run_id).folder,
        "env": env,
        "secret_env": secret_env,
        "outputs": [owned],
        "success": {"exit_codes": [0]},
        "limits": {"stop_grace_s": COMMAND_GRACE_S},
    }
    plan = envelope(host, job, run_id=run_id, created=created, payload=payload, ctl_version=ctl_version)
    # No GPU is used, so none is leased.
    plan["host"] = {**plan["host"], "accelerator": Accelerator.CPU.value, "gpus": 0}
    return plan


def with_preflight(
    plan: Plan, outputs: Sequence[OwnedOutput], timings: Mapping[str, float], allowed: Sequence[str] = ()
) -> Plan:
    """Return the plan with what preflight saw in the outputs (digest, entries, bytes), and its timings in seconds.

    The step that makes the outputs ready is called `claim` from then on if there is nothing to be cleared.

    `allowed` are the codes of failures that somebody allowed by name; the run's summary repeats them.

    Raises ValueError if these are not the plan's own outputs: what may be cleared never widens after planning.
    """
    fixed = ("path", "root", "stale", "adopt")
    planned = [tuple(output.get(key) for key in fixed) for output in plan["job"]["outputs"]]
    if [tuple(output.get(key) for key in fixed) for output in outputs] != planned:
        raise ValueError("preflight reports other outputs than the plan owns")
    updated = copy.deepcopy(plan)
    updated["job"]["outputs"] = [copy.deepcopy(output) for output in outputs]
    ready = output_step(outputs, seen=True)
    updated["job"]["steps"] = [ready if step["kind"] == "clear" else step for step in updated["job"]["steps"]]
    updated["timings"] = {**plan["timings"], **timings}
    updated["allowed"] = list(allowed)
    return updated


def with_queue(plan: Plan) -> Plan:
    """Return the plan of a run that waits for the lease instead of being refused."""
    updated = copy.deepcopy(plan)
    updated["job"]["limits"]["wait_for_lease"] = True
    return updated


def job_env(host: Host, playbook: Playbook | None) -> tuple[dict[str, str], list[str]]:
    """Return (plain environment, sorted names of secrets) of a job; the playbook's values beat the host's.

    Raises ConfigError if the playbook sets a variable that the host has as a secret.
    """
    plain, names = split_env({**host.env, **(playbook.env if playbook else {})})
    clash = sorted(set(playbook.env if playbook else ()) & set(host.secrets))
    if clash and playbook:
        raise ConfigError(
            f"{playbook.origin}: `env.{clash[0]}` is also a secret of host `{host.name}`",
            fix="remove one of the two",
        )
    return plain, sorted({*names, *host.secrets})


def _rehearse_step(host: Host) -> Step:
    return {
        "name": "rehearse",
        "kind": "exec",
        "argv": [host.python, "-m", "remote_payload.extract.rehearse"],
        "failure": EndReason.REHEARSAL_FAILED.value,
    }


def envelope(host: Host, job: Job, *, run_id: str, created: str, payload: str, ctl_version: str) -> Plan:
    """Return a plan around a job: what every kind of run has."""
    return {
        "wire": WIRE,
        "run_id": check_run_id(run_id),
        "created": created,
        "ctl_version": ctl_version,
        "host": host.record(),
        "playbook": None,
        "payload": payload,
        "job": job,
        "extract": None,
        "timings": {},
        "allowed": [],
    }


def wanted_boundaries(playbook: Playbook) -> str | list[int]:
    """Return the playbook's boundaries in our own convention, whichever they are written in."""
    capture = playbook.capture
    if isinstance(capture.boundaries, str):
        return capture.boundaries
    return boundaries_of(capture.boundaries, capture.layer_convention)


def check_shard(shard: tuple[int, int] | None) -> tuple[int, int]:
    """Return (number from 1, of how many). Raises UsageError if there is no such share."""
    number, count = shard or WHOLE
    if not 1 <= number <= count:
        raise UsageError(f"there is no shard {number}/{count}", fix=f"number them from 1/{count} to {count}/{count}")
    return number, count


def _extract_spec(
    host: Host, playbook: Playbook, output: str, shard: tuple[int, int], pushed: str | None
) -> ExtractSpec:
    capture = playbook.capture
    final_norm = FINAL_NORM[playbook.output.format] if capture.final_norm is None else capture.final_norm
    return {
        "model": host.resolve(playbook.model.path),
        "revision": playbook.model.revision,
        "trust_remote_code": playbook.model.trust_remote_code,
        "dtype": playbook.model.dtype,
        "data": pushed or host.resolve(playbook.data.path),
        "data_kind": playbook.data.kind,
        "max_samples": playbook.data.max_samples,
        "max_seq_len": playbook.data.max_seq_len,
        "over_long": playbook.data.over_long,
        "shard": list(shard),
        "boundaries": wanted_boundaries(playbook),
        "final_norm": final_norm,
        "store_dtype": capture.store_dtype,
        "output": output,
        "format": playbook.output.format,
        "capture": capture.path.value,
        "canary": capture.canary,
        "rehearse": playbook.rehearse.mode,
        "buffer_bytes": capture.buffer_bytes,
        "engine": {"tensor_parallel_size": _tensor_parallel(host, playbook), **playbook.engine.arguments},
    }


def _tensor_parallel(host: Host, playbook: Playbook) -> int:
    size = playbook.engine.tensor_parallel_size or max(host.gpus, 1)
    if host.accelerator is Accelerator.CUDA and size > host.gpus:
        where = playbook.engine_places.get("tensor_parallel_size", playbook.origin)
        raise ConfigError(
            f"{where}: `engine.tensor_parallel_size` is {size}",
            why=f"host `{host.name}` has {host.gpus} GPUs",
            fix=f"set it to {host.gpus} or less, or correct `gpus` of the host",
        )
    return size

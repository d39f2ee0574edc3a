"""Checks of the accelerator: the GPUs that the job will use, and who is on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.core.finding import Finding, age, failed, passed, section, size, some, warned
from remote_payload.host.protocol import Accelerator, Plan

MEMORY_OCCUPIED = 1 << 30
"""Bytes in use that fail a GPU: the same limit as the supervisor's recheck under the lease."""

MEMORY_IDLE = 64 << 20
"""Bytes in use that an idle driver may show; the smallest CUDA context takes over 100 MiB."""

PARENT_SHOWN = 40
COMMAND_SHOWN = 120
"""Characters of a command line in a finding."""


def check_gpus(report: Mapping[str, Any], plan: Plan, gpu_name: str | None) -> Iterator[Finding]:
    """Judge number, model, memory and health of the GPUs that the job will use."""
    found = section(report, "gpus")
    if found is None:
        return
    if plan["host"]["accelerator"] == Accelerator.CPU:
        yield from _check_cpu(found)
        return
    if not found["present"]:
        yield failed(
            "gpu-driver",
            "there is no nvidia-smi on the host",
            why=f"hosts.toml promises {plan['host']['gpus']} GPUs",
            fix='install the NVIDIA driver, or set `accelerator = "cpu"` for this host',
        )
        return
    problems = [*_check_count(found, plan), *_check_each(selected(found, plan), gpu_name)]
    yield from problems
    if not problems:
        gpus = selected(found, plan)
        used = sum(gpu["memory_used"] or 0 for gpu in gpus)
        names = some(sorted({gpu["name"] or "unnamed" for gpu in gpus}))
        yield passed("gpus", f"{len(gpus)} x {names}, driver {gpus[0]['driver']}, {size(used)} in use")


def check_processes(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Name who computes on the job's GPUs, and what vLLM left behind without holding one."""
    found = section(report, "processes")
    if found is None:
        return
    uuids = {gpu["uuid"] for gpu in selected(section(report, "gpus") or {}, plan)}
    index = {gpu["uuid"]: gpu["index"] for gpu in (section(report, "gpus") or {}).get("gpus", [])}
    holders = [record for record in found["compute"] or [] if record["gpu_uuid"] in uuids]
    for record in holders:
        memory = "memory" if record["memory_used"] is None else size(record["memory_used"])
        yield failed(
            "gpu-process",
            f"GPU {index.get(record['gpu_uuid'], '?')}: process {record['pid']} holds {memory}",
            why=_who(record, report),
            fix=_how_to_end(record, report),
        )
    yield from _check_vllm(found["vllm"], report, " without GPU memory" if uuids else "")
    if found["compute"] is not None and not holders and not found["vllm"]:
        yield passed(
            "processes", "no compute process on the GPUs, none left by vLLM" if uuids else "none left by vLLM"
        )


def _check_vllm(records: Sequence[Mapping[str, Any]], report: Mapping[str, Any], state: str) -> Iterator[Finding]:
    """One finding for each run whose processes are there, and one for all that belong to none.

    `state` says what all of them have in common.
    """
    groups: dict[tuple[str, bool], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["run_id"] or "", _is_elsewhere(record)), []).append(record)
    for (run_id, _), group in groups.items():
        pids = some([str(record["pid"]) for record in group])
        every = ",".join(str(record["pid"]) for record in group)
        noun = "process" if len(group) == 1 else "processes"
        whose = f"of run {run_id}" if run_id else "of no run of ctl"
        yield warned(
            "vllm-process",
            f"{len(group)} vLLM {noun} {whose}{state}: {pids}",
            why=_who(group[0], report),
            fix=f"see on the host: `ps -fp {every}`" if not run_id else _how_to_end(group[0], report),
        )


def selected(found: Mapping[str, Any], plan: Plan) -> list[Mapping[str, Any]]:
    """Return the GPUs that the job will use: those CUDA_VISIBLE_DEVICES of its environment names, else the first."""
    gpus: list[Mapping[str, Any]] = list(found.get("gpus", []))
    visible = plan["job"]["env"].get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return gpus[: plan["host"]["gpus"]]
    words = [word.strip() for word in visible.split(",")]
    return [gpu for gpu in gpus if any(_is_named(gpu, word) for word in words)]


def ranks(plan: Plan) -> int:
    """Return the job's tensor-parallel size, 1 for a command."""
    spec = plan["extract"]
    return int(spec["engine"].get("tensor_parallel_size") or 1) if spec else 1


def _check_cpu(found: Mapping[str, Any]) -> Iterator[Finding]:
    load, cpus = found["load"][0], found["cpus"]
    if load > cpus:
        yield warned(
            "cpu-busy",
            f"the load is {load:.1f} on {cpus} CPUs",
            why="the job shares them",
            fix="see who computes with `top` on the host, or wait",
        )
    else:
        yield passed("cpus", f"{cpus} CPUs, load {load:.1f}")


def _check_count(found: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    promised, seen, usable = plan["host"]["gpus"], len(found["gpus"]), len(selected(found, plan))
    for line in found["unparsed"]:
        yield failed(
            "gpu-unreadable",
            "nvidia-smi cannot read a GPU",
            why=line,
            fix="look for Xid errors with `sudo dmesg | grep -i xid`, then reset the GPU or reboot the host",
        )
    visible = plan["job"]["env"].get("CUDA_VISIBLE_DEVICES")
    if visible and usable < len(visible.split(",")):
        yield failed(
            "gpu-visible",
            f"CUDA_VISIBLE_DEVICES={visible} names GPUs that are not there",
            why=f"nvidia-smi lists {seen}",
            fix="correct it in `env` of the playbook or of the host in hosts.toml",
        )
    elif usable < promised and not visible:
        yield failed(
            "gpu-count",
            f"{seen} GPUs are there, hosts.toml promises {promised}",
            why="a GPU that fell off the bus is not listed until a reset",
            fix=f"compare with `nvidia-smi -L` on the host, or set `gpus = {seen}` in hosts.toml",
        )
    if usable < ranks(plan):
        yield failed(
            "gpu-tp",
            f"tensor_parallel_size {ranks(plan)} needs more GPUs than the {usable} that the job may use",
            fix=f"set `tensor_parallel_size = {max(usable, 1)}` in [engine] of the playbook",
        )
    hidden = found["visible"]
    if hidden is not None and not visible:
        yield warned(
            "gpu-visible-login",
            f"the login environment of the host sets CUDA_VISIBLE_DEVICES={hidden}",
            why="the job inherits it, and may use other GPUs than the ones that are checked and leased",
            fix=f'set `env = {{ CUDA_VISIBLE_DEVICES = "{hidden}" }}` for this host in hosts.toml',
        )


def _check_each(gpus: list[Mapping[str, Any]], gpu_name: str | None) -> Iterator[Finding]:
    for gpu in gpus:
        label, used = f"GPU {gpu['index']}", gpu["memory_used"]
        if gpu_name and gpu_name.lower() not in (gpu["name"] or "").lower():
            yield failed(
                "gpu-name",
                f"{label} is a {gpu['name']}, hosts.toml promises {gpu_name}",
                fix=f'set `gpu_name = "{gpu["name"]}"` for this host in hosts.toml, or check its address',
            )
        if used is not None and used > MEMORY_IDLE:
            judge = failed if used > MEMORY_OCCUPIED else warned
            yield judge(
                "gpu-memory",
                f"{label} has {size(used)} in use",
                why="if no process is shown with it, a container or another PID namespace holds it",
                fix="on the host: `sudo fuser -v /dev/nvidia*`",
            )
        if gpu["ecc_uncorrected"]:
            yield failed(
                "gpu-ecc",
                f"{label} has {gpu['ecc_uncorrected']} uncorrected ECC errors since the last reset",
                why="results may be wrong, and the next one ends the job",
                fix=f"on the host, with the GPU idle: `sudo nvidia-smi --gpu-reset -i {gpu['index']}`",
            )
        if gpu["mig"] == "Enabled":
            yield failed(
                "gpu-mig",
                f"{label} is split by MIG",
                why="a job that uses whole GPUs does not see it",
                fix=f"on the host: `sudo nvidia-smi -i {gpu['index']} -mig 0`",
            )


def _is_named(gpu: Mapping[str, Any], word: str) -> bool:
    return word == str(gpu["index"]) or (not word.isdigit() and bool(word) and str(gpu["uuid"]).startswith(word))


def _who(record: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    if record["owner"] is None:
        return f"{record['command'][:COMMAND_SHOWN]}; its owner is hidden (a container or another PID namespace)"
    owner = record["owner"]
    if record["uid"] == report["uid"]:
        # Accounts are shared, root's above all: whose it is shows only where this workdir knows the run.
        owner = f"your account, {owner}, from another workdir" if _is_elsewhere(record) else f"your account, {owner},"
    orphaned = "; its parent has ended" if record["ppid"] == 1 else ""
    parent = f", by {record['parent'][:PARENT_SHOWN]}" if record.get("parent") and not orphaned else ""
    return f"started by {owner} {age(record['age_s'])} ago{parent}: {record['command'][:COMMAND_SHOWN]}{orphaned}"


def _how_to_end(record: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    if record["owner"] is None:
        return f"on the host: `sudo nvidia-smi`, `docker ps`; look for pid {record['pid']}"
    if record["uid"] != report["uid"]:
        return f"ask {record['owner']}, or wait; on the host: `ps -fp {record['pid']}`"
    if _is_elsewhere(record):
        return (
            f"wait for it, or ask who uses {record['owner']} too: run {record['run_id']} is of another workdir, and "
            "can only be stopped from there"
        )
    if run := record["run_id"]:
        return f"wait for it with `ctl attach {run}`; only if nobody wants it any more: `ctl stop {run}`"
    return f"on the host: `kill {record['pid']}`"


def _is_elsewhere(record: Mapping[str, Any]) -> bool:
    """Whether a process is of a run that this workdir does not have; earlier payloads do not say."""
    return record.get("run_here") is False

"""From a probe report to findings: pure, so that every verdict can be tested from a JSON file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from controller.core.arithmetic import bytes_left
from controller.core.checks_arithmetic import check_arithmetic
from controller.core.checks_capability import check_capability
from controller.core.checks_command import check_command
from controller.core.checks_engine import check_engine
from controller.core.checks_functional import check_functional
from controller.core.checks_gpus import check_gpus, check_processes
from controller.core.checks_health import check_health
from controller.core.checks_inputs import check_data, check_environment, check_model
from controller.core.checks_login import check_login
from controller.core.checks_machine import check_disk, check_lease, check_memory, is_queued
from controller.core.checks_outputs import check_outputs, owned_outputs
from controller.core.checks_records import check_records
from controller.core.checks_source import check_source, source_of
from controller.core.checks_toolchain import check_toolchain
from controller.core.finding import Finding, Level, failed, warned
from remote_payload.host.protocol import Plan

__all__ = ["Finding", "Level", "findings", "owned_outputs"]

SECTION_FIXES = {
    "gpus": "run `nvidia-smi` on the host; if it hangs, the driver is stuck and only a reboot helps",
    "outputs": "look at the output folder on the host: `time ls -la` and `df` show a dead mount",
    "model": "look at the model folder on the host: `time ls -la` and `df` show a dead mount",
    "data": "look at the data set on the host: `time head -c 1 FILE` shows a dead mount",
    "disk": "run `df` on the host; if it hangs, a mount is dead: `findmnt`",
    "environment": "run the host's `python` by hand: `time PYTHON -c pass`",
    "capability": "nothing, if the rehearsal passes: it loads the class that could not be read",
    "health": "run `nvidia-smi -q` on the host; if it hangs, the driver is stuck and only a reboot helps",
    "processes": "run `ps aux` on the host; if it hangs, a process is stuck in the kernel",
    "memory": "run `ls /dev/shm` on the host",
    "toolchain": "run the host's `python` by hand: `time PYTHON -c pass`",
    "functional": "run preflight again: a cold disk answers faster the second time",
    "lengths": "nothing, if there is room for samples of full length: the job counts them before the load",
    "login": "run `loginctl` on the host",
    "history": "look at `runs` of the workdir on the host: `time ls`",
    "source": "look at the samples' folder on the host: `time ls` and `df` show a dead mount",
    "lease": "see `lease_dir` of this host in hosts.toml: a folder on a local disk that all users may write",
}


def findings(
    report: Mapping[str, Any],
    plan: Plan,
    *,
    gpu_name: str | None = None,
    data_name: str | None = None,
    bytes_expected: int | None = None,
    min_free_bytes: int | None = None,
    min_memory_bytes: int | None = None,
    engine_places: Mapping[str, str] | None = None,
    allow: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Judge a probe's report (see `remote_payload.host.probe`) against a plan, in the order of a person's questions.

    `gpu_name` must occur in each GPU's name; `data_name` is what its user calls a data set that was pushed, whose
    path on the host is a hash; `bytes_expected` is what the output takes at most, `min_free_bytes`
    what must stay free beside it, `min_memory_bytes` what memory must be available; `engine_places` where the
    playbook sets each engine argument. A failure whose code is in `allow`, or whose end a queued run waits for, is
    only warned about.
    """
    bytes_expected = bytes_left(report, plan, bytes_expected)
    found = [
        *_check_sections(report, plan),
        *check_login(report, plan),
        *check_gpus(report, plan, gpu_name),
        *check_health(report, plan),
        *check_processes(report, plan),
        *check_lease(report, plan),
        *check_functional(report, plan),
        *check_environment(report, plan),
        *check_toolchain(report, plan),
        *check_model(report, plan),
        *check_capability(report, plan),
        *check_engine(report, plan, engine_places or {}),
        *check_data(report, plan, data_name),
        *check_records(report, plan, data_name),
        *check_source(report, plan),
        *check_outputs(report, plan),
        *check_disk(report, plan, bytes_expected, min_free_bytes),
        *check_memory(report, plan),
        *check_arithmetic(report, plan),
        *check_command(report, min_memory_bytes),
    ]
    waits = WAITED_FOR if is_queued(plan) else ()
    return tuple(
        _allowed(finding) if finding.code in allow else _waited_for(finding) if finding.code in waits else finding
        for finding in found
    )


WAITED_FOR = ("lease-busy", "gpu-process", "gpu-memory")
"""Failures that a run which queues does not mind: the supervisor looks again when its turn has come."""


def _waited_for(finding: Finding) -> Finding:
    """Nobody allowed it: it is what the run waits for, and refuses it then if it still holds."""
    if finding.level is not Level.FAIL:
        return finding
    why = "; ".join(filter(None, [finding.why, "the run waits for its turn, and looks again then"]))
    return replace(finding, level=Level.WARN, why=why)


def _allowed(finding: Finding) -> Finding:
    if finding.level is not Level.FAIL:
        return finding
    why = f"{finding.why}; allowed by name" if finding.why else "allowed by name"
    return replace(finding, level=Level.WARN, why=why, allowed=True)


def _check_sections(report: Mapping[str, Any], plan: Plan) -> list[Finding]:
    """Without GPUs, outputs, model or source nothing can be promised; without the others a run may still be right.

    A source that only takes long to look through refuses nothing: the conversion proves each sample as it reads it.
    """
    needed = {
        "gpus": True, "outputs": plan["job"]["outputs"], "model": plan["extract"], "source": source_of(plan),
    }  # fmt: skip
    required = {name for name, reason in needed.items() if reason}
    sections = report["sections"]
    if sections.get("source", {}).get("timed_out"):
        required.discard("source")
    errors = {name: result["error"] for name, result in sections.items() if not result["ok"]}
    errors.update(dict.fromkeys(sorted(required - sections.keys()), "the probe did not report it"))
    return [
        (failed if name in required else warned)(
            f"probe-{name}", f"`{name}` could not be checked", why=why, fix=SECTION_FIXES.get(name, "run again")
        )
        for name, why in errors.items()
    ]

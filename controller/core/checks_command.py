"""Checks of what a command needs: its programs, its container's runtime, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.core.finding import Finding, failed, passed, section, size
from remote_payload.host.protocol import Plan


def programs(plan: Plan, wanted: Sequence[str]) -> list[str]:
    """Return the programs that must be on the host before a command is launched, each once.

    Those that the playbook names, the container's runtime, and the interpreter of the verify step. A command's own
    program is not among them unless it is an absolute path outside the run: its folder may not be there yet.
    """
    job = plan["job"]
    if job["kind"] != "command":
        return []
    container = job.get("container")
    found = [*wanted, *([container["runtime"]] if container else [])]
    for step in job["steps"]:
        argv = step.get("argv") or [""]
        outside = argv[0].startswith("/") and not argv[0].startswith(f"{plan['host']['workdir']}/")
        if (step["kind"] == "exec" and not container and outside) or step["kind"] == "verify":
            found.append(argv[0])
    return list(dict.fromkeys(found))


def check_command(report: Mapping[str, Any], min_memory_bytes: int | None) -> Iterator[Finding]:
    """Judge programs and memory; nothing for a run that asks for neither."""
    found = section(report, "programs")
    if found is not None:
        missing = [program["name"] for program in found["programs"] if program["path"] is None]
        for name in missing:
            yield failed(
                "program-missing",
                f"there is no program {name} on the host, or it may not be run",
                why="the login's PATH was searched",
                fix="install it, or give its absolute path; `python` may be set in the playbook or in hosts.toml",
            )
        if not missing:
            yield passed("programs", ", ".join(str(program["path"]) for program in found["programs"]))
    memory = section(report, "memory")
    if min_memory_bytes is not None and memory is not None and memory["available"] < min_memory_bytes:
        yield failed(
            "memory-low",
            f"{size(memory['available'])} of memory is available, the playbook asks for {size(min_memory_bytes)}",
            fix="see who uses it with `top` on the host, or lower `min_memory_bytes` in [preflight]",
        )

"""Checks of what the system does to the job's processes: limits, logout, containers, clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.finding import Finding, age, passed, section, warned
from remote_payload.host.protocol import Plan

OPEN_FILES = 4096
"""A rank of a large model maps some hundred shards and opens sockets to all others; the usual 1024 are few."""

PROCESSES = 4096
"""Threads count as well: torch, NCCL and the tokenizers start some hundred a rank."""

CLOCK_OFF_S = 5.0
"""Times in logs and events of both sides are compared by eye; certificates and downloads fail from minutes on."""


def check_login(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge limits, lingering, what a container hides, and the host's clock."""
    found = section(report, "login")
    if found is None:
        return
    problems = [*_check_limits(found["limits"]), *_check_logout(found, report), *_check_clock(report)]
    if found["pids_hidden"]:
        problems.append(
            warned(
                "pids-hidden",
                "processes of others cannot be seen from here",
                why=f"{found['pids_hidden']}: memory in use on a GPU may be theirs, and nothing proves it free again",
                fix="start the container with `--pid=host`, or ask who else uses the machine",
            )
        )
    yield from problems
    if not problems:
        up = f", up {age(report['boot_s'])}" if "boot_s" in report else ""
        inside = f", in a container ({found['container']})" if found["container"] else ""
        yield passed("login", f"{report['user']} on {report['hostname']}{inside}, boot {report['boot_id'][:8]}{up}")


def _check_limits(limits: Mapping[str, Mapping[str, int | None]]) -> Iterator[Finding]:
    for name, needed, option in (("open_files", OPEN_FILES, "n"), ("processes", PROCESSES, "u")):
        soft, hard = limits[name]["soft"], limits[name]["hard"]
        if soft is not None and soft < needed:
            words = name.replace("_", " ")
            raisable = hard is None or hard >= needed
            yield warned(
                f"limit-{name.replace('_', '-')}",
                f"a process may have {soft} {words}, {needed} are safe",
                why=f"the hard limit is {'none' if hard is None else hard}",
                fix=f"on the host: put `ulimit -{option} {needed}` into ~/.bashrc"
                if raisable
                else f"have an administrator raise it in /etc/security/limits.conf: `nofile` or `nproc` {needed}",
            )
    largest = limits["file_size"]["soft"]
    if largest is not None:
        yield warned(
            "limit-file-size",
            f"a file may have {largest} bytes",
            why="a sample or log that grows beyond ends the process that writes it (SIGXFSZ)",
            fix="on the host: `ulimit -f unlimited`",
        )


def _check_logout(found: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[Finding]:
    if found["kill_user_processes"] and found["linger"] is False:
        yield warned(
            "logout-kills",
            "the host ends all processes of a user at logout",
            why="KillUserProcesses is on, and this user does not linger",
            fix=f"on the host: `loginctl enable-linger {report['user']}`",
        )


def _check_clock(report: Mapping[str, Any]) -> Iterator[Finding]:
    clock = report.get("clock") or {}
    offset, uncertain = clock.get("offset_s"), clock.get("uncertain_s") or 0.0
    if offset is not None and abs(offset) > CLOCK_OFF_S + uncertain:
        yield warned(
            "clock",
            f"the host's clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} this one",
            why="times in logs cannot be compared; far off, certificates are refused",
            fix="on the host: `timedatectl`, `sudo timedatectl set-ntp true`",
        )

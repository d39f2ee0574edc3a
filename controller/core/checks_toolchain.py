"""Checks of what compiles kernels at the engine's start, of old caches, and of the host's environment file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.finding import Finding, age, failed, passed, section, some, warned
from remote_payload.host.protocol import Accelerator, Plan

LOCK_STALE_S = 1800.0
"""Age of a lock file from which on its maker is taken for dead: the longest builds take some ten minutes."""

CACHE_STALE_S = 600.0
"""Age of an unfinished cache folder from which on nobody is finishing it."""


def check_toolchain(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge compilers, Python's headers, caches and the environment file."""
    found = section(report, "toolchain")
    if found is None or plan["extract"] is None:
        return
    problems = [*_check_env_file(found), *_check_tools(found, plan), *_check_caches(found["caches"])]
    yield from problems
    if not problems:
        there = [name for name, path in found["tools"].items() if path]
        yield passed(
            "toolchain", f"found in the job's PATH: {some(there)}{', Python.h' if found['python_h'] else ''}"
        )


def _check_env_file(found: Mapping[str, Any]) -> Iterator[Finding]:
    record = found["env_file"]
    if record and record["error"]:
        yield failed(
            "env-file",
            f"the env_file {record['path']} cannot be used",
            why=record["error"],
            fix="correct it, or `env_file` of this host in hosts.toml: NAME=value lines",
        )
    elif record and "CUDA_VISIBLE_DEVICES" in record["names"]:
        yield failed(
            "env-file-visible",
            f"the env_file {record['path']} sets CUDA_VISIBLE_DEVICES",
            why="the lease is taken for the GPUs that hosts.toml or the playbook name, which may be others",
            fix="move it to `env` of this host in hosts.toml",
        )
    for name, folder in found["variables"].items():
        if not folder["exists"] and name in ("HF_HOME", "CUDA_HOME"):
            yield warned(
                "env-folder",
                f"{name} is {folder['value']}, which does not exist on the host",
                fix=f"on the host: `ls -ld {shlex.quote(folder['value'])}`; correct it in env_file or `env`",
            )


def _check_tools(found: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    python = plan["host"]["python"]
    if plan["host"]["accelerator"] == Accelerator.CPU:
        if not found["tools"]["c++"]:
            fix = "install it: `sudo apt-get install g++`; or set `enforce_eager = true` in [engine]"
            yield warned("tool-cxx", "there is no C++ compiler", why="vLLM compiles its graphs with it", fix=fix)
        return
    if not found["tools"]["cc"]:
        yield failed(
            "tool-cc",
            "there is no C compiler `cc` in the job's PATH",
            why="Triton builds the launcher of each kernel with it, when the engine starts",
            fix="install it: `sudo apt-get install gcc`",
        )
    if not found["python_h"]:
        yield failed(
            "tool-python-h",
            f"the headers of {python} are not there",
            why=f"Triton's launchers include Python.h; looked in {found['include'] or 'no folder'}",
            fix="install them: `sudo apt-get install python3-dev` of the same version, or use uv's Python",
        )
    for name, why, fix in (
        ("ninja", "FlashInfer and PyTorch build extensions with it", f"on the host: `{python} -m pip install ninja`"),
        ("nvcc", "kernels that were not built before cannot be", "install the CUDA toolkit, and set CUDA_HOME"),
    ):
        if not found["tools"][name]:
            yield warned(f"tool-{name}", f"there is no {name} in the job's PATH", why=why, fix=fix)


def _check_caches(caches: Mapping[str, Any]) -> Iterator[Finding]:
    for item in caches["found"]:
        told = f"of {item['owner']}, {age(item['age_s'])} old"
        if item["kind"] == "lock":
            judge = failed if item["age_s"] > LOCK_STALE_S else warned
            yield judge(
                "jit-lock",
                f"a build of kernels is locked: {item['path']}",
                why=f"{told}; whoever needs it waits without a limit until the file is gone",
                fix=f"if nothing compiles there: `rm {shlex.quote(item['path'])}`",
            )
        elif item["age_s"] > CACHE_STALE_S:
            yield warned(
                "compile-cache",
                f"a cache of compiled kernels was left half-written: {item['path']}",
                why=f"{told}; loading it can fail with an empty AssertionError",
                fix=f"`rm -r {shlex.quote(item['path'])}`: it is compiled anew",
            )

"""Judges what `ctl hosts test` was told; see `remote_payload.host.introduce` for the report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.finding import Finding, failed, passed, warned
from controller.core.model import Host
from remote_payload.host.protocol import Accelerator

OLDEST_BOOTSTRAP = (3, 9)
"""Of the host side's own code."""

OLDEST_VLLM = (0, 16)
"""The first whose layers the capture's hooks know; see docs/compatibility.md."""


def introduction_findings(host: Host, report: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return what is right and wrong with a host, in the order in which it would be mended."""
    return tuple(_findings(host, report))


def _findings(host: Host, report: Mapping[str, Any]) -> Iterator[Finding]:
    table = f"[hosts.{host.name}]"
    yield passed("connected", f"connected as {report['user']} to {report['hostname']}")
    if release(report["bootstrap"]) >= OLDEST_BOOTSTRAP:
        yield passed("bootstrap-python", f"{host.bootstrap_python} is Python {report['bootstrap']}")
    else:
        yield failed(
            "python-old",
            f"{host.bootstrap_python} is Python {report['bootstrap']}, and ctl needs 3.9",
            fix=f"set `bootstrap_python` of {table} to a newer one; on the host: `ls /usr/bin/python3.*`",
        )
    yield _environment(host, report["python"], table)
    if host.accelerator is Accelerator.CUDA:
        yield from _gpus(host, report["gpus"], table)
    for path, verdict in report["folders"].items():
        yield _folder(host, path, verdict)


def _environment(host: Host, python: Mapping[str, Any], table: str) -> Finding:
    if "error" in python:
        return failed(
            "environment-python",
            f"{host.python} does not run",
            why=python["error"],
            fix=f"set `python` of {table} to the Python that vLLM is installed in",
        )
    if not python["vllm"]:
        return failed(
            "vllm-missing",
            f"{host.python} (Python {python['version']}) has no vLLM",
            fix=f"on the host: `{shlex.quote(host.python)} -m pip install vllm`, or correct `python` of {table}",
        )
    versions = f"vLLM {python['vllm']}, torch {python['torch'] or 'missing'}, Python {python['version']}"
    if release(python["vllm"]) < OLDEST_VLLM:
        return failed("vllm-old", f"{versions}: too old", fix="install vLLM 0.16 or newer on the host")
    return passed("environment", versions)


def _gpus(host: Host, gpus: Any, table: str) -> Iterator[Finding]:
    if isinstance(gpus, Mapping):
        yield failed("gpus", "the GPUs cannot be asked", why=gpus["error"], fix="on the host: `nvidia-smi`")
        return
    names = sorted({gpu["name"] for gpu in gpus})
    seen = f"{len(gpus)} x {', '.join(names)}" if gpus else "no GPU"
    if len(gpus) != host.gpus:
        what = f"the host has {seen}, and {table} says gpus = {host.gpus}"
        yield failed("gpu-count", what, fix=f"set `gpus = {len(gpus)}`")
    elif host.gpu_name is not None and any(host.gpu_name not in name for name in names):
        what = f"the host has {seen}, and {table} says gpu_name = {host.gpu_name!r}"
        yield warned("gpu-name", what, fix=f'set `gpu_name = "{names[0]}"`')
    else:
        driver = f", driver {gpus[0]['driver']}" if gpus else ""
        yield passed("gpus", f"{seen}{driver}")


def _folder(host: Host, path: str, verdict: str) -> Finding:
    what = "workdir" if path == host.workdir else "output root"
    if verdict == "ok":
        return passed("folder", f"{what} {path} can be written")
    quoted = shlex.quote(path)
    fix = f"on the host: `mkdir -p {quoted}`" if "no such" in verdict else f"on the host: `ls -ld {quoted}`"
    return failed("folder", f"{what} {path} cannot be used", why=verdict, fix=fix)


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 32) of 0.32.0rc1, for a comparison of two of them."""
    parts = version.split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)

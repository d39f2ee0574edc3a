"""introduce: what kind of host this is, asked in one round trip, before anything is pushed."""

from __future__ import annotations

import json
from typing import Any

from controller.core.errors import RemoteFailed
from controller.core.model import Host
from controller.payload import load_payload
from controller.transport.base import Transport

TIMEOUT_S = 75.0
"""The slowest answer: a Python that does not answer, then a driver that hangs."""

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # exit codes of POSIX shells


def run(transport: Transport, host: Host) -> dict[str, Any]:
    """Return the report of `remote_payload.host.introduce`.

    Raises RemoteFailed (`python-missing` if the host's `bootstrap_python` is none), ConnectionLost.
    """
    source = load_payload().files["remote_payload/host/introduce.py"].decode()
    request = {
        "python": host.python,
        "workdir": host.workdir,
        "output_roots": list(host.output_roots),
        "accelerator": host.accelerator.value,
    }
    argv = [host.bootstrap_python, "-I", "-S", "-c", source]
    done = transport.run(argv, stdin=json.dumps(request).encode(), timeout=TIMEOUT_S)
    if done.code == 0:
        report: dict[str, Any] = json.loads(done.stdout)
        return report
    missing = done.code in (_NOT_EXECUTABLE, _NOT_FOUND)
    raise RemoteFailed(
        f"{host.name} has no {host.bootstrap_python} that can be run" if missing
        else f"{host.bootstrap_python} on {host.name} failed with exit code {done.code}",
        why=done.stderr[-1000:].decode(errors="replace").strip(),
        fix=f"set `bootstrap_python` of [hosts.{host.name}] to a Python 3.9 or newer of the host",
        code="python-missing" if missing else None,
    )  # fmt: skip

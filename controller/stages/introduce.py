"""introduce: what kind of host this is, asked in one round trip, before anything is pushed."""

from __future__ import annotations

import json
from typing import Any

from controller.core.model import Host
from controller.payload import load_payload
from controller.stages.base import python_error
from controller.transport.base import Transport

TIMEOUT_S = 75.0
"""The slowest answer: a Python that does not answer, then a driver that hangs."""


def run(transport: Transport, host: Host) -> dict[str, Any]:
    """Return the report of `remote_payload.host.introduce`.

    Raises HostUnusable (`python-missing`, `python-unusable`: the host's `bootstrap_python` is none), RemoteFailed,
    ConnectionLost.
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
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:  # a program that takes any arguments, and is no Python
            pass
        else:
            return report
    stderr = done.stderr or done.stdout
    raise python_error(host.name, host.bootstrap_python, done.code, stderr, failed="introduce-failed")

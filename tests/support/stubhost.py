"""A host in a folder of this machine: the real payload, reached without a network."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.local_transport import LocalTransport

from controller.stages.base import Context
from remote_payload.host.protocol import HostRecord, Plan

REPOSITORY = Path(__file__).resolve().parents[2]
PAYLOAD = "0" * 64
"""Any name of the right form does: the payload is put into place by hand."""


@dataclass
class StubHost:
    """`workdir` with the payload deployed; `events` collects what the stages emit."""

    workdir: Path
    transport: LocalTransport = field(default_factory=LocalTransport)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        target = self.workdir / "payload" / PAYLOAD / "remote_payload"
        if not target.exists():
            shutil.copytree(
                REPOSITORY / "remote_payload", target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
            )

    @property
    def record(self) -> HostRecord:
        return {
            "name": "stub",
            "address": "localhost",
            "port": 0,
            "user": "",
            "workdir": str(self.workdir),
            "python": sys.executable,
            "bootstrap_python": sys.executable,
            "accelerator": "cpu",
            "gpus": 0,
            "lease_dir": str(self.workdir / "lease"),
        }

    def context(self, cancel: threading.Event | None = None) -> Context:
        emit: Callable[..., None] = lambda event_type, /, **fields: self.events.append((event_type, fields))  # noqa: E731
        return Context(
            transport=self.transport,
            host=self.record,
            payload=PAYLOAD,
            emit=emit,
            cancel=cancel or threading.Event(),
        )

    def plan(self, run_id: str, *argv: str, **limits: float) -> Plan:
        return {
            "wire": 1,
            "run_id": run_id,
            "created": "2026-01-01T00:00:00+00:00",
            "ctl_version": "0",
            "host": self.record,
            "playbook": None,
            "payload": PAYLOAD,
            "job": {
                "kind": "command",
                "name": "stub",
                "steps": [{"name": "command", "kind": "exec", "argv": list(argv)}],
                "cwd": str(self.workdir),
                "env": {},
                "secret_env": [],
                "outputs": [],
                "success": {"exit_codes": [0]},
                "limits": {"stop_grace_s": 2.0, **limits},  # type: ignore[typeddict-item]
            },
            "extract": None,
            "timings": {},
        }

"""A temporary host that runs command playbooks: planned by the controller, supervised for real, without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.hostrun import HostRun

from controller.core.command import CommandPlaybook
from controller.core.commandplan import make_playbook_command_plan
from controller.core.model import Host
from controller.core.playbook import parse_playbook
from remote_payload.host.children import MAIN
from remote_payload.host.framing import pack_frame
from remote_payload.host.layout import Layout

CHECKOUT = Path(__file__).resolve().parents[2]
PAYLOAD = "0" * 64


class CommandHost(HostRun):
    """`HostRun` with the payload in its place, and plans made of playbooks' texts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        target = Path(Layout(str(self.workdir)).payload(PAYLOAD)) / "remote_payload"
        shutil.copytree(CHECKOUT / "remote_payload", target, ignore=shutil.ignore_patterns("__pycache__"))
        self.outputs = folder / "outputs"
        self.outputs.mkdir()

    def configured(self, **fields: Any) -> Host:
        return Host.model_validate(
            {
                "name": "box", "address": "127.0.0.1", "python": sys.executable, "bootstrap_python": sys.executable,
                "workdir": str(self.workdir), "output_roots": [str(self.outputs)], "accelerator": "cpu",
                "lease_dir": str(self.lease_dir), **fields,
            }
        )  # fmt: skip

    def playbook(self, text: str, *extra: str, **plan: Any) -> dict[str, Any]:
        """Return a plan of the playbook in `text`, on this host; `fields` of the host may be given as `host`."""
        playbook = parse_playbook("job", "job.toml", f'schema = 1\nkind = "command"\n{text}')
        assert isinstance(playbook, CommandPlaybook)
        run_id = self.plan()["run_id"]
        host = self.configured(**plan.pop("host", {}))
        made = make_playbook_command_plan(
            host, playbook, extra, run_id=run_id, created="2026-01-01T00:00:00Z", payload=PAYLOAD,
            ctl_version="0.1.0", **plan,
        )  # fmt: skip
        return dict(made)

    def popen_open(self, verb: str, request: dict[str, Any], body: bytes) -> subprocess.Popen[bytes]:
        """Start a verb and send its request; its stdin stays open for a conversation."""
        process = subprocess.Popen(
            [sys.executable, "-S", "-I", "-B", MAIN, verb], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(pack_frame(request, body))
        process.stdin.flush()
        return process

    def finish(self, plan: dict[str, Any], **secrets: str) -> dict[str, Any]:
        """Run a plan to its end; return its result with its `summary`, `log` and `exceptions` added."""
        paths = self.launch(plan, secrets)
        result = self.result(paths)
        return {**result, "summary": self.read(paths.summary), "log": self.log(paths).decode(errors="replace")}

    def all_events(self, plan: dict[str, Any], kind: str) -> list[dict[str, Any]]:
        """Return the events of one type of all writers, by time."""
        folder = Path(self.paths(plan).events)
        events = [event for path in folder.glob("*.jsonl") for event in self.events(self.paths(plan), path.stem)]
        return sorted((event for event in events if event["type"] == kind), key=lambda event: event["t"])

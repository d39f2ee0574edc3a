"""Runs of the stub job, watched through a network that misbehaves; and the faults, drawn from a seed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from support import stubjob
from support.hostrun import wait_until
from support.proxy import TcpProxy
from support.stubhost import StubHost

from controller.core.events import Event
from controller.stages import launch, stop, watch
from controller.stages.mirror import Mirror
from remote_payload.host.protocol import Plan
from tools.sshd import SshServer

FAULTS_A_RUN = 5
PART_BYTES = 525_000
"""20 runs of 6 such parts log 63 MB."""

DEADLINE_S = 90.0
"""For one part to arrive through a fault; seconds on an idle machine."""

SCRIPT = stubjob.__file__


@dataclass
class Site:
    host: StubHost
    proxy: TcpProxy | None
    server: SshServer | None
    local: Path
    runs: list[Run] = field(default_factory=list)

    def prepare(self, parts: int, part_bytes: int = PART_BYTES) -> Run:
        """Make the plan of a run and its folders."""
        run_id = f"20260101-000000-{secrets.token_hex(3)}"
        output = self.host.workdir / "output" / run_id
        output.mkdir(parents=True)
        words = [str(output), str(parts), str(part_bytes)]
        plan = self.host.plan(run_id, sys.executable, "-S", SCRIPT, "job", *words)
        plan["job"]["steps"] += [
            {"name": "verify", "kind": "verify", "argv": [sys.executable, "-S", SCRIPT, "verify", *words]}
        ]
        (self.local / run_id / "events").mkdir(parents=True)
        run = Run(self, plan, parts, part_bytes, output, Mirror(self.local / run_id))
        self.runs.append(run)
        return run

    def launch(self, parts: int, part_bytes: int = PART_BYTES) -> Run:
        run = self.prepare(parts, part_bytes)
        launch.run(self.host.context(), run.plan, {})
        return run

    def project(self, folder: Path, ssh_config: Path) -> Project:
        """Make a folder from which `ctl` reaches this host by the name `stub`."""
        assert self.server is not None
        folder.mkdir()
        workdir, python = self.host.workdir, json.dumps(sys.executable)
        (folder / "hosts.toml").write_text(
            f"schema = 1\n[hosts.stub]\naddress = {json.dumps(self.server.alias)}\n"
            f"ssh_config = {json.dumps(str(ssh_config))}\npython = {python}\nbootstrap_python = {python}\n"
            f'workdir = {json.dumps(str(workdir))}\noutput_roots = ["output"]\naccelerator = "cpu"\n'
            f"lease_dir = {json.dumps(str(workdir / 'lease'))}\n"
        )
        return Project(folder)

    def close(self) -> None:
        """Leave no run behind, whatever the test did."""
        for run in self.runs:
            run.cancel.set()
            if run.folder.exists() and not (run.folder / "result.json").exists():
                stop.run(self.host.context(), run.plan["run_id"], grace_s=0.1)


@dataclass(frozen=True)
class Project:
    folder: Path

    def start(
        self,
        *words: str,
        stdout: IO[bytes] | int = subprocess.PIPE,
        program: Sequence[str] = ("-m", "controller"),
    ) -> subprocess.Popen[bytes]:
        """Start a real `ctl` with nothing of the user's own around it; `program` is what Python is to run."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CTL_", "XDG_"))}
        root = Path(__file__).resolve().parents[2]
        return subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=self.folder,
            env={**kept, "HOME": str(self.folder), "PYTHONPATH": str(root)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )

    def ctl(self, *words: str, program: Sequence[str] = ("-m", "controller")) -> tuple[int, bytes, bytes]:
        """Run `ctl` to its end; return exit code, stdout and stderr."""
        process = self.start(*words, program=program)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
        return process.returncode, stdout, stderr


@dataclass
class Run:
    site: Site
    plan: Plan
    parts: int
    part_bytes: int
    output: Path
    mirror: Mirror
    log: bytearray = field(default_factory=bytearray)
    events: list[Event] = field(default_factory=list)
    cancel: threading.Event = field(default_factory=threading.Event)
    outcome: watch.WatchOutcome | None = None
    error: BaseException | None = None

    @property
    def folder(self) -> Path:
        return self.site.host.workdir / "runs" / self.plan["run_id"]

    def open_gate(self, part: int) -> None:
        (self.output / f"gate-{part}").touch()

    def watch(self) -> watch.WatchOutcome:
        """Watch to the end, in this thread."""
        self.outcome = watch.run(
            self.site.host.context(self.cancel),
            self.plan["run_id"],
            self.mirror,
            on_event=self.events.append,
            on_log=lambda data, _: self.log.extend(data),
            patience_s=120,
        )
        return self.outcome

    def watch_in_background(self) -> threading.Thread:
        def work() -> None:
            try:
                self.watch()
            except BaseException as error:  # noqa: BLE001 - shown by `join`
                self.error = error

        thread = threading.Thread(target=work, name="watch", daemon=True)
        thread.start()
        return thread

    def wait_log(self, size: int) -> None:
        wait_until(
            lambda: self.error is not None or len(self.log) >= size, f"{size} bytes of log arrived", DEADLINE_S
        )
        assert self.error is None, self.error

    def finish(self, thread: threading.Thread) -> watch.WatchOutcome:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the watch does not end"
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome

    def read(self, name: str) -> Any:
        return json.loads((self.mirror.folder / name).read_bytes())

    def summary(self) -> dict[str, Any]:
        """Return the summary without what differs between any two runs of one plan."""
        summary = self.read("summary.json")
        del summary["timings"], summary["run_id"]
        return dict(summary)

    def expected_log(self) -> bytes:
        return b"".join(stubjob.log_of(part, self.part_bytes) for part in range(self.parts))

    def check(self) -> None:
        """The log arrived to the byte, every sample is in the ledger once, every event was seen once."""
        result = self.read("result.json")
        assert result["end_reason"] == "succeeded", result
        assert hashlib.sha256(self.log).hexdigest() == result["log_sha256"]
        assert len(self.log) == result["log_bytes"] == self.parts * self.part_bytes
        assert bytes(self.log) == self.expected_log()
        lines = [
            json.loads(line)
            for path in sorted((self.mirror.folder / "ledger").glob("*.jsonl"))
            for line in path.read_bytes().splitlines()
        ]
        assert sorted(line["index"] for line in lines) == list(range(self.parts * stubjob.SAMPLES_A_PART))
        for line in lines:
            assert line["sha256"] == hashlib.sha256(stubjob.sample_of(line["index"])).hexdigest()
        for path in (self.folder / "events").glob("*.jsonl"):
            whole = path.read_bytes()
            assert (self.mirror.folder / "events" / path.name).read_bytes() == whole
            seen = [event.seq for event in self.events if event.writer == path.stem]
            assert seen == list(range(1, whole.count(b"\n") + 1))


def inject(proxy: TcpProxy, chance: random.Random) -> str:
    """Begin one fault, and calm the network again where it would not by itself; return its name."""
    kind = chance.choice(("cut", "cut at a byte", "cut at a byte sent", "freeze", "delay", "throttle", "refuse"))
    if kind == "cut":
        time.sleep(chance.random() * 0.3)
        proxy.cut()
    elif kind == "cut at a byte":
        proxy.cut_after = chance.randrange(1, PART_BYTES)
    elif kind == "cut at a byte sent":
        proxy.cut()  # the next connection breaks in its handshake or its request
        proxy.cut_sent_after = chance.randrange(1, 6000)
    elif kind == "freeze":
        time.sleep(chance.random() * 0.2)
        proxy.freeze()
        _later(chance.uniform(0.5, 5.0), proxy.thaw)
    elif kind == "delay":
        proxy.delay_s = chance.uniform(0.01, 0.1)
        _later(2.0, lambda: setattr(proxy, "delay_s", 0.0))
    elif kind == "throttle":
        proxy.rate = chance.uniform(100_000, 1_000_000)
        _later(2.0, lambda: setattr(proxy, "rate", None))
    else:
        proxy.refuse()
        proxy.cut()
        _later(chance.uniform(0.2, 1.5), lambda: proxy.refuse(False))
    return kind


def _later(seconds: float, action: Any) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()

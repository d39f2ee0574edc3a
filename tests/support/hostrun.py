"""A host in a temporary folder: real supervisors, pumps and jobs, started as the controller starts them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host.cgroup import Cgroup
from remote_payload.host.children import MAIN
from remote_payload.host.framing import pack_frame
from remote_payload.host.layout import Layout, RunPaths
from remote_payload.host.liveness import Liveness, judge, send_signal
from remote_payload.host.members import find_marked, snapshot
from remote_payload.host.protocol import WIRE, parse_confirmation

DEADLINE_S = 60.0
"""Generous: a loaded machine may take seconds to start a Python process."""

_numbers = itertools.count(secrets.randbelow(1 << 23))
"""Members are found by run id over the whole machine, so other test sessions on it must not have the same."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Return the first true value of `condition`; fail the test with `what` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def _python_of(user: int) -> str:
    """Return an interpreter that `user` may run: ours may lie in a closed home, the system's does not."""
    for path in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([path, "-S", "-c", ""], user=user, group=user, cwd="/", check=False).returncode == 0:
                return path
    pytest.skip("there is no Python that another user may run: apt install python3")


class HostRun:
    """One temporary host; `env` is added to the environment of what is started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workdir = folder / "work"
        self.workdir.mkdir()
        self.lease_dir = folder / "lease"
        self.env: dict[str, str] = {}
        self.runs: list[str] = []
        self.user: int | None = None
        self.interpreter = sys.executable
        self.cgroup: Path | None = None

    def become(self, user: int, cgroup: Path | None = None) -> None:
        """Run verbs as another user from now on, in a cgroup (v2) if one is given. Only for root."""
        self.user, self.cgroup = user, cgroup
        self.interpreter = _python_of(user)

    # ------------------------------------------------------------------------------------ plans

    def plan(self, *steps: dict[str, Any], job: dict[str, Any] | None = None, **host: Any) -> dict[str, Any]:
        """Return a valid plan of a new run with these steps."""
        run_id = f"20260101-000000-{next(_numbers):06x}"
        self.runs.append(run_id)
        return {
            "wire": WIRE,
            "run_id": run_id,
            "created": "2026-01-01T00:00:00Z",
            "ctl_version": "0.1.0",
            "host": {
                "name": "box",
                "address": "127.0.0.1",
                "port": 22,
                "user": "tester",
                "workdir": str(self.workdir),
                "python": sys.executable,
                "bootstrap_python": sys.executable,
                "accelerator": "cpu",
                "gpus": 0,
                "lease_dir": str(self.lease_dir),
                **host,
            },
            "playbook": None,
            "payload": "0" * 64,
            "job": {
                "kind": "command",
                "name": "test",
                "steps": list(steps),
                "cwd": str(self.folder),
                "env": {},
                "secret_env": [],
                "outputs": [],
                "success": {"exit_codes": [0]},
                "limits": {"stop_grace_s": 1.0},
                **(job or {}),
            },
            "extract": None,
            "timings": {"push_s": 0.5},
        }

    def python(self, code: str, name: str = "job", kind: str = "exec") -> dict[str, Any]:
        """Return a step that runs Python code."""
        return {"name": name, "kind": kind, "argv": [self.interpreter, "-S", "-c", code]}

    # ------------------------------------------------------------------------------------ verbs

    def popen(self, verb: str, request: dict[str, Any], body: bytes = b"") -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [self.interpreter, "-S", "-I", "-B", MAIN, verb],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.env},
            user=self.user,
            group=self.user,
            extra_groups=[] if self.user is not None else None,
        )
        if self.cgroup is not None:
            # It waits for its request, so it is moved before it does anything.
            (self.cgroup / "cgroup.procs").write_text(str(process.pid))
        assert process.stdin is not None
        process.stdin.write(pack_frame(request, body))
        process.stdin.close()
        process.stdin = None
        return process

    def call(self, verb: str, request: dict[str, Any], body: bytes = b"") -> tuple[int, bytes]:
        """Run a verb to its end; return its exit code and stdout."""
        process = self.popen(verb, {"workdir": str(self.workdir), **request}, body)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
        if stderr:
            print(stderr.decode(), file=sys.stderr)
        return process.returncode, stdout

    def ask(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        """Run a verb that answers with one JSON document, and must succeed."""
        code, stdout = self.call(verb, request)
        assert code == 0, stdout
        answer: dict[str, Any] = json.loads(stdout)
        return answer

    def start_request(self, plan: dict[str, Any], secrets: dict[str, str] | None = None) -> tuple[Any, bytes]:
        request = {"nonce": f"nonce-{plan['run_id']}", "workdir": str(self.workdir)}
        return request, json.dumps({"plan": plan, "secrets": secrets or {}}).encode()

    def start(self, plan: dict[str, Any], secrets: dict[str, str] | None = None) -> dict[str, Any]:
        request, body = self.start_request(plan, secrets)
        code, stdout = self.call("start", request, body)
        assert code == 0, stdout
        confirmation = parse_confirmation(stdout, request["nonce"])
        assert confirmation is not None, stdout
        return dict(confirmation)

    def launch(self, plan: dict[str, Any], secrets: dict[str, str] | None = None) -> RunPaths:
        confirmation = self.start(plan, secrets)
        assert confirmation["outcome"] == "launched", confirmation
        return self.paths(plan)

    def run(self, plan: dict[str, Any], secrets: dict[str, str] | None = None) -> dict[str, Any]:
        """Launch, wait, and return result.json."""
        return self.result(self.launch(plan, secrets))

    # ---------------------------------------------------------------------------------- records

    def paths(self, plan: dict[str, Any]) -> RunPaths:
        return Layout(str(self.workdir)).run(plan["run_id"])

    def read(self, path: str) -> Any:
        return json.loads(Path(path).read_bytes())

    def result(self, paths: RunPaths) -> Any:
        wait_until(lambda: Path(paths.result).exists(), f"{paths.result} is written")
        return self.read(paths.result)

    def log(self, paths: RunPaths) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(Path(paths.log).glob("*.log")))

    def events(self, paths: RunPaths, writer: str = "supervisor") -> list[dict[str, Any]]:
        path = Path(paths.events) / f"{writer}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def job(self, paths: RunPaths) -> Any:
        """Wait for the job to be recorded; return its identity."""
        return wait_until(lambda: self.read(paths.run)["job"], "the job is recorded")

    def wait_file(self, name: str) -> str:
        """Wait for a file that a job writes into the host's folder; return its text."""
        path = self.folder / name
        wait_until(lambda: path.exists() and path.read_text(), f"{name} is written")
        return path.read_text()

    def state(self, plan: dict[str, Any]) -> dict[str, Any]:
        rows = self.ask("ps", {})["runs"]
        found: dict[str, Any] = next(row for row in rows if row["run_id"] == plan["run_id"])
        return found

    def kill_supervisor(self, paths: RunPaths) -> None:
        supervisor = self.read(paths.run)["supervisor"]
        send_signal(supervisor["pid"], supervisor["start_ticks"], signal.SIGKILL)
        wait_until(lambda: judge(supervisor)[0] is Liveness.DEAD, "the supervisor is dead")

    def close(self) -> None:
        """End whatever the test's runs left, supervisors first, so that nothing outlives a failed test."""
        for run_id in self.runs:
            paths = Layout(str(self.workdir)).run(run_id)
            with contextlib.suppress(FileNotFoundError):
                self.kill_supervisor(paths)
            wait_until(lambda run_id=run_id: not self._kill(run_id), f"the members of {run_id} are dead")
            with contextlib.suppress(FileNotFoundError):
                cgroup = self.read(paths.run)["cgroup"]
                if cgroup:
                    wait_until(lambda cgroup=cgroup: Cgroup(cgroup).remove() is None, "the cgroup is removed")

    def _kill(self, run_id: str) -> bool:
        members = find_marked(Layout(str(self.workdir)).run(run_id).folder, snapshot())
        for member in members:
            send_signal(member.pid, member.start_ticks, signal.SIGKILL)
        return bool(members)


def left_by_the_run(ended: Mapping[str, Any]) -> list[Any]:
    """The leftovers of a result or a stop's answer, less what other processes of this machine use at the moment."""
    return [left for left in ended["leftovers"] if left.get("ours") is not False]

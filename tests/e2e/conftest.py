"""A project as `make demo` makes one, in a folder of its own: real sshd, real payload, real vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools.demo import CHECKOUT, Demo
from tools.sshd import SshdUnavailable, SshServer

COMMAND_TIMEOUT_S = 240.0
"""For one `ctl` call, an engine start on two busy cores included."""


@dataclass(frozen=True)
class Project:
    """`root` is the current folder of every `ctl` call."""

    root: Path
    demo: Demo
    server: SshServer

    @property
    def workdir(self) -> Path:
        return self.demo.host

    @property
    def output(self) -> Path:
        return self.workdir / "output" / "demo"

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "controller", *words]

    def ctl(self, *words: str, timeout: float = COMMAND_TIMEOUT_S, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `ctl` without a terminal and return what it printed."""
        return subprocess.run(
            self.argv(*words),
            cwd=self.root,
            env=self.environment(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def environment(self, **env: str) -> dict[str, str]:
        return {**self.demo.environment(), "PYTHONPATH": str(CHECKOUT), **env}

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        done = self.ctl(*words, "--json")
        assert done.returncode == code, done.stderr[-4000:] + done.stdout[-2000:]
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def playbook(self, name: str, *replacements: tuple[str, str]) -> str:
        """Write a variation of the demo's playbook and return its name."""
        text = (CHECKOUT / "playbooks" / "demo.toml").read_text()
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new)
        (self.root / "playbooks" / f"{name}.toml").write_text(text)
        return name

    def run_folder(self, run_id: str) -> Path:
        return self.workdir / "runs" / run_id


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    root = tmp_path_factory.mktemp("project")
    shutil.copy(CHECKOUT / "hosts.toml", root)
    shutil.copytree(CHECKOUT / "playbooks", root / "playbooks")
    demo = Demo(root / ".demo")
    demo.prepare()
    try:
        server = SshServer(demo.ssh, alias="ctl-demo")
    except SshdUnavailable as error:
        pytest.skip(str(error))
    with server:
        demo.write_hosts(server)
        yield Project(root, demo, server)

"""Completion as people meet it: a real bash, zsh and fish, with `ctl` on the PATH and the tab key."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_S = 60.0
"""For a shell to show what it completed; each tab starts a Python."""

RUN = "20260101-000000-abcdef"

CASES = [
    ("ctl ps --host tow", "tower1"),
    ("ctl plan --playbook nightly", "nightly-kimi"),
    ("ctl attach 2026", RUN),
]
"""What is typed before the tab key, and the whole word that is to stand there afterwards."""

CLEAR_LINE = b"\x15"  # Ctrl-U

HOSTS = """
schema = 1
[hosts.tower1]
address = "tower.example"
python = "/opt/vllm/bin/python"
workdir = "/root/ctl"
output_roots = ["/data/out"]
gpus = 8
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a host, a playbook and a run, and a `ctl` program beside it."""
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks" / "nightly-kimi.toml").write_text("schema = 1\n")
    (tmp_path / "ctl-runs" / RUN).mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ctl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m controller "$@"\n')
    program.chmod(0o755)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "dumb",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "ZDOTDIR": str(folder),
        "INPUTRC": os.devnull,
    }


def completes(folder: Path, shell: list[str], setup: str) -> None:
    """Type each line and the tab key into an interactive shell, and wait for the whole word on its screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(shell[0], shell, environment(folder))
    try:
        os.write(terminal, f"{setup}; echo re''ady\n".encode())
        _read_until(terminal, b"ready")
        for line, expected in CASES:
            os.write(terminal, f"{line}\t".encode())
            _read_until(terminal, expected.encode())
            os.write(terminal, CLEAR_LINE)
    finally:
        os.close(terminal)  # the shell gets a hangup, and ends
        os.waitpid(pid, 0)


def _read_until(terminal: int, wanted: bytes) -> None:
    screen = b""
    deadline = time.monotonic() + DEADLINE_S
    while wanted not in screen:
        assert time.monotonic() < deadline, screen.decode(errors="replace")
        if select.select([terminal], [], [], 1.0)[0]:
            screen += os.read(terminal, 4096)


def test_bash_completes_hosts_playbooks_and_runs(folder: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("apt install bash")
    completes(folder, ["bash", "--norc", "--noprofile", "-i"], 'eval "$(_CTL_COMPLETE=source_bash ctl)"')


def test_zsh_completes_hosts_playbooks_and_runs(folder: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("apt install zsh")
    setup = 'autoload -Uz compinit; compinit -u; eval "$(_CTL_COMPLETE=source_zsh ctl)"'
    completes(folder, ["zsh", "-f", "-i"], setup)


def test_fish_completes_hosts_playbooks_and_runs(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("apt install fish")
    asked = "; ".join(f"complete -C '{line}'" for line, _ in CASES)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"_CTL_COMPLETE=source_fish ctl | source; {asked}"], cwd=folder,
        env=environment(folder), capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [expected for _, expected in CASES]

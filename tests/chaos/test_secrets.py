"""Secrets reach the job, over a real sshd, and are seen nowhere else: no argv, no environment, no file, no output."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from support import chaos
from support.filekeyring import FILE
from support.hostrun import wait_until

from remote_payload.host.members import read_environ, snapshot

pytestmark = pytest.mark.sshd

VALUES = {"FROM_ENV": "env-5f1c9a-value", "FROM_FILE": "file-7be233-value", "FROM_RING": "ring-90dd41-value"}

IN_A_URL = "url-31c0d7-value"
"""A password in a variable that nobody called a secret."""

JOB = """
import hashlib, os, time
names = ("FROM_ENV", "FROM_FILE", "FROM_RING", "HTTPS_PROXY")
print(" ".join(hashlib.sha256(os.environ[name].encode()).hexdigest() for name in names), flush=True)
open("pid.new", "w").write(str(os.getpid()))
os.rename("pid.new", "pid")
while not os.path.exists("release"):
    time.sleep(0.02)
"""


def seen_in_processes(pids: set[int]) -> dict[int, str]:
    """Return where a value stands in the argv or environment of one of `pids`."""
    found = {}
    for pid in pids:
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it ended
        environ = "\n".join((read_environ(pid) or {}).values())
        for name, value in {**VALUES, "HTTPS_PROXY": IN_A_URL}.items():
            if value.encode() in argv:
                found[pid] = f"{name} in argv"
            elif value in environ:
                found[pid] = f"{name} in the environment"
    return found


def is_local_ssh(pid: int) -> bool:
    return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "ssh"


def seen_in_files(folder: Path) -> list[str]:
    return [
        str(path)
        for path in folder.rglob("*")
        if stat.S_ISREG(path.lstat().st_mode)
        and any(value.encode() in path.read_bytes() for value in (*VALUES.values(), IN_A_URL))
    ]


@pytest.mark.parametrize("transport", ["paramiko", "openssh"])
def test_a_secret_travels_by_stdin_only(
    site: chaos.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    project = site.project(tmp_path / "project", tmp_path / "ssh_config")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "file").write_text(VALUES["FROM_FILE"] + "\n")
    (sources / "ring.json").write_text(json.dumps({"hub": {"me": VALUES["FROM_RING"]}}))
    monkeypatch.setenv("LOCAL_TOKEN", VALUES["FROM_ENV"])
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "tests.support.filekeyring.FileKeyring")
    monkeypatch.setenv(FILE, str(sources / "ring.json"))
    proxy = f"http://me:{IN_A_URL}@proxy.example.org:3128"
    with (project.folder / "hosts.toml").open("a") as hosts:
        hosts.write(
            f'transport = "{transport}"\n[hosts.stub.secrets]\nFROM_ENV = {{ env = "LOCAL_TOKEN" }}\n'
            f"FROM_FILE = {{ file = {json.dumps(str(sources / 'file'))} }}\n"
            'FROM_RING = { keyring = "hub", account = "me" }\n'
            f'[hosts.stub.env]\nHTTPS_PROXY = "{proxy}"\n'
        )
    others = set(snapshot())

    controller = project.start("run", "--host", "stub", "-v", "--", sys.executable, "-S", "-c", JOB)
    pid = site.host.workdir / "pid"
    wait_until(lambda: pid.exists() or controller.poll() is not None, "the job runs")
    assert controller.poll() is None, controller.communicate()
    job = int(pid.read_text())
    seen = seen_in_processes(set(snapshot()) - others - {os.getpid(), job})
    # What the user's own shell exports, ctl and the ssh programs that it starts here have inherited.
    inherited = {pid for pid in seen if pid == controller.pid or is_local_ssh(pid)}
    assert {seen.pop(pid) for pid in inherited} == {"FROM_ENV in the environment"}
    assert seen == {}
    assert seen_in_processes({job}) == {job: "HTTPS_PROXY in the environment"}  # it would have been seen
    (site.host.workdir / "release").touch()
    stdout, stderr = controller.communicate(timeout=chaos.DEADLINE_S)
    assert controller.returncode == 0, stderr

    expected = " ".join(hashlib.sha256(value.encode()).hexdigest() for value in (*VALUES.values(), proxy))
    assert project.ctl("logs", "--last")[1].decode().strip() == expected
    shown = [stdout, stderr, *project.ctl("config", "show"), *project.ctl("summary", "--last", "--json")[1:]]
    assert not [value for value in (*VALUES.values(), IN_A_URL) if value in repr(shown)]
    assert seen_in_files(site.host.workdir) == []
    assert seen_in_files(project.folder) == [str(project.folder / "hosts.toml")]  # where its owner wrote one

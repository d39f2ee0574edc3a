"""What a job finds in its environment: the host's file, the plan, secrets, and its Python's folder first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remote_payload.host.errors import HostError
from remote_payload.host.steps import job_environment


def plan(env: dict[str, str], **host: Any) -> dict[str, Any]:
    return {
        "run_id": "20261129-120000-abcdef", "payload": "0" * 64, "job": {"kind": "extract", "env": env},
        "host": {"name": "h", "python": "/opt/vllm/bin/python", **host},
    }  # fmt: skip


def test_the_pythons_folder_comes_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/opt/vllm/bin:/bin")
    assert job_environment(plan({}), "/w", {})["PATH"] == "/opt/vllm/bin:/usr/bin:/bin"
    assert job_environment(plan({"PATH": "/a"}), "/w", {})["PATH"] == "/opt/vllm/bin:/a"
    assert job_environment(plan({}, python="python3"), "/w", {})["PATH"] == "/usr/bin:/opt/vllm/bin:/bin"


def test_the_plan_beats_the_hosts_file_and_secrets_beat_both(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("export HF_HOME='/data/hf'  # a comment\nHF_TOKEN=old\nA=file\n\n")
    found = job_environment(plan({"A": "plan"}, env_file=str(path)), "/w", {"HF_TOKEN": "new"})
    assert (found["HF_HOME"], found["A"], found["HF_TOKEN"]) == ("/data/hf", "plan", "new")


def test_a_file_that_is_gone_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot be read"):
        job_environment(plan({}, env_file=str(tmp_path / "none")), "/w", {})

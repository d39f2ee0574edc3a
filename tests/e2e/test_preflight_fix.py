"""`ctl preflight --fix` over a real sshd: clearing up after a killed supervisor, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import Project
from support.hostrun import wait_until

pytestmark = [pytest.mark.sshd, pytest.mark.machine]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def segment() -> Any:
    """The name of a file in /dev/shm as vLLM calls them, removed afterwards."""
    path = Path("/dev/shm") / f"psm_ctl{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


def test_fix_clears_up_what_a_dead_run_left_and_nothing_else(project: Project, segment: Path) -> None:
    stranger = subprocess.Popen(["VLLM::EngineCore", "600"], executable=shutil.which("sleep"), start_new_session=True)
    try:
        started = project.ctl(
            "run", "--host", "demo", "--detach", "--", "sh", "-c", f"exec 3> {segment}; exec sleep 500"
        )
        assert started.returncode == 8, started.stderr
        run_id = project.json("ps", "--host", "demo")["runs"][0]["run_id"]
        record = project.run_folder(run_id) / "run.json"
        job = wait_until(lambda: json.loads(record.read_text())["job"], "the job is recorded")
        wait_until(segment.exists, "the job opens its segment")
        os.kill(json.loads(record.read_text())["supervisor"]["pid"], signal.SIGKILL)
        unfinished = unfinished_output(project, run_id)
        words = ("preflight", "--host", "demo", "--playbook", "demo", "--fix")

        unconfirmed = project.ctl(*words)
        assert unconfirmed.returncode == 3
        assert "add `--yes`" in unconfirmed.stderr
        assert f"stop the dead run {run_id}" in unconfirmed.stderr
        assert str(stranger.pid) in unconfirmed.stderr
        assert "but of no run of ctl" in unconfirmed.stderr
        assert alive(job["pid"])
        assert segment.exists()

        document = json.loads(project.ctl(*words, "--yes", "--json").stdout)
        assert [action["kind"] for action in document["actions"]] == ["stop"]
        assert [each["kind"] for each in document["done"]] == ["stop"]
        assert not alive(job["pid"])
        assert not segment.exists()
        assert stranger.poll() is None
        # Now that the run is known to be over, its output is nobody's any more.
        assert [each["kind"] for each in document["remaining"]] == ["output"]
        assert unfinished.exists()

        done = project.ctl(*words, "--yes")
        assert "1 entries deleted" in done.stdout, done.stderr
        assert "nothing of it is left" in done.stdout
        assert not unfinished.exists()
        assert "nothing was left by a dead run of ctl" in project.ctl(*words, "--yes").stderr
    finally:
        stranger.kill()
        stranger.wait()


def unfinished_output(project: Project, run_id: str) -> Path:
    """Make the demo's output that of a run which wrote one sample and marked the folder as every run does."""
    shutil.rmtree(project.output, ignore_errors=True)
    project.output.mkdir(parents=True, mode=0o700)
    marker = {"wire": 1, "run_id": run_id, "created": "2026-01-01T00:00:00Z", "owner": json.loads(
        (project.run_folder(run_id) / "run.json").read_text()
    )["user"]}  # fmt: skip
    (project.output / ".ctl-owner.json").write_text(json.dumps(marker))
    sample = project.output / "hs_0.safetensors"
    sample.write_bytes(bytes(100))
    return sample

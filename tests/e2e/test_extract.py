"""The whole job as a user does it, over a real sshd, with a real vLLM of two ranks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from e2e.conftest import Project
from safetensors import safe_open

from remote_payload.extract import arrow

pytestmark = [pytest.mark.engine, pytest.mark.sshd]

BOUNDARIES = [2, 4, 5, 8]


@pytest.fixture(scope="module")
def killed_and_attached(project: Project) -> dict[str, object]:
    """Extract; SIGKILL the controller in mid-run; attach; return the summary and what was seen on the way."""
    sentinel = project.output.parent / "sentinel"
    sentinel.parent.mkdir(parents=True, exist_ok=True)
    sentinel.write_text("not yours")
    earlier = {path.name for path in (project.root / "ctl-runs").glob("*")}
    controller = subprocess.Popen(
        project.argv("extract", "--host", "demo", "--playbook", "demo", "--yes"),
        cwd=project.root, env=project.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    run_id = _wait_for_log(project, earlier)
    controller.send_signal(signal.SIGKILL)
    controller.communicate(timeout=30)
    held = sum(path.stat().st_size for path in (project.root / "ctl-runs" / run_id / "log").glob("*.log"))
    state = json.loads((project.run_folder(run_id) / "run.json").read_text())["state"]
    attached = project.ctl("attach", "--last")
    return {"run": run_id, "held": held, "state": state, "attached": attached}


def _wait_for_log(project: Project, earlier: set[str]) -> str:
    """Return the new run's id once the controller has copied some of the job's log."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for log in (project.root / "ctl-runs").glob("*/log/*.log"):
            if log.parents[1].name not in earlier and log.stat().st_size > 1000:
                return log.parents[1].name
        time.sleep(0.1)
    raise AssertionError("no log arrived")


def test_the_job_outlives_its_controller_and_attach_ends_with_the_summary(
    project: Project, killed_and_attached: dict[str, object]
) -> None:
    attached = killed_and_attached["attached"]
    assert isinstance(attached, subprocess.CompletedProcess)
    assert killed_and_attached["state"] == "running"
    assert attached.returncode == 0, attached.stderr
    summary = project.json("summary", "--last")
    assert summary["run_id"] == killed_and_attached["run"]
    assert summary["samples"] == {"expected": 64, "written": 64, "skipped": 0, "failed": 0, "missing": 0}
    assert summary["boundaries"] == BOUNDARIES
    assert summary["num_layers"] == 8
    assert (summary["shape"]["states"], summary["shape"]["hidden"]) == (4, 128)
    assert sum(state["nan"] + state["inf"] for state in summary["states"]) == 0
    assert (summary["end_reason"], summary["gpus_clean"], summary["problems"]) == ("succeeded", True, [])
    assert {"push_s", "preflight_s", "load_s", "extract_s"} <= set(summary["timings"])


def test_every_byte_of_the_log_arrived_once(project: Project, killed_and_attached: dict[str, object]) -> None:
    run_id = str(killed_and_attached["run"])
    here = b"".join(p.read_bytes() for p in sorted((project.root / "ctl-runs" / run_id / "log").glob("*.log")))
    there = b"".join(p.read_bytes() for p in sorted((project.run_folder(run_id) / "log").glob("*.log")))
    assert 0 < int(str(killed_and_attached["held"])) < len(there)
    assert here == there
    result = json.loads((project.run_folder(run_id) / "result.json").read_text())
    assert result["log_sha256"] == hashlib.sha256(here).hexdigest()
    printed = subprocess.run(
        project.argv("logs", "--last"), cwd=project.root, env=project.environment(), capture_output=True, check=True,
        timeout=60,
    ).stdout  # fmt: skip
    assert printed == here


def test_every_file_holds_its_sample(project: Project, killed_and_attached: dict[str, object]) -> None:
    from transformers import AutoTokenizer  # takes seconds, so only where it is needed

    tokenizer = AutoTokenizer.from_pretrained(project.workdir / "models" / "kimi-k25-tiny")
    lines = (project.workdir / "data" / "chats.jsonl").read_text().splitlines()
    assert len(lines) == 64
    for index, line in enumerate(lines):
        expected = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True, return_dict=False)
        with safe_open(project.output / f"hs_{index}.safetensors", "pt") as file:
            assert file.get_tensor("token_ids").tolist() == expected
            states = file.get_tensor("hidden_states")
            assert tuple(states.shape) == (len(expected), 4, 128)
            for left, right in zip(range(3), range(1, 4), strict=True):
                difference = (states[:, right] - states[:, left]).norm() / states[:, left].norm()
                assert difference > 0.1, "neighbouring boundaries must differ, or the test proves nothing"
    others = {name for name in os.listdir(project.output) if not name.startswith(("hs_", ".ctl-"))}
    assert others == set(arrow.FILES)


def test_no_process_of_the_run_is_left(project: Project, killed_and_attached: dict[str, object]) -> None:
    assert _members(str(killed_and_attached["run"])) == []


def test_the_run_folder_is_private(project: Project, killed_and_attached: dict[str, object]) -> None:
    for path in project.run_folder(str(killed_and_attached["run"])).rglob("*"):
        assert path.lstat().st_mode & 0o077 == 0, path


def test_stale_files_are_refused_listed_and_only_ours_are_cleared(
    project: Project, killed_and_attached: dict[str, object]
) -> None:
    outside = project.root / "outside"
    outside.mkdir()
    (outside / "precious").write_text("reached through a link")
    (project.output / "link").symlink_to(outside)
    (project.output / "hs_99.safetensors").symlink_to(outside)
    before = sorted(os.listdir(project.output))
    refused = project.json("extract", "--host", "demo", "--playbook", "demo", "--stale", "fail", code=3)
    assert refused["error"]["code"] == "output-stale"
    assert "hs_0.safetensors" in json.dumps(refused)
    unconfirmed = project.json("extract", "--host", "demo", "--playbook", "demo", "--stale", "clear", code=3)
    assert unconfirmed["error"]["code"] == "confirmation-needed"
    assert sorted(os.listdir(project.output)) == before
    script = (
        "from controller import extract\n"
        "run = extract(host='demo', playbook='demo', stale='clear', yes=True, max_samples=6)\n"
        "run.wait()\n"
        "assert run.state == 'finished' and run.problem is None, (run.state, run.problem)\n"
        "print(run.summary['samples']['written'])\n"
    )
    done = subprocess.run(
        [project.argv()[0], "-W", "error", "-c", script], cwd=project.root, env=project.environment(), text=True,
        capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "6"
    assert sorted(name for name in os.listdir(project.output) if name.startswith("hs_")) == [
        f"hs_{index}.safetensors" for index in range(6)
    ]
    assert (project.output / "link").readlink() == outside, "no extraction writes that: it is somebody's"
    assert (outside / "precious").read_text() == "reached through a link"
    assert (project.output.parent / "sentinel").read_text() == "not yours"


def test_a_model_that_vllm_cannot_run_ends_with_the_workers_traceback(project: Project) -> None:
    models = project.workdir / "models"
    from tools.tiny_models import write

    write("kimi-k25-bad-rank", models)
    name = project.playbook(
        "bad-rank",
        ('path = "models/kimi-k25-tiny"', 'path = "models/kimi-k25-bad-rank"'),
        ('path = "output/demo"', 'path = "output/bad-rank"'),
        ("[engine]", '[preflight]\nallow = ["model-no-weights"]\n\n[engine]\nload_format = "dummy"'),
    )
    done = project.ctl("extract", "--host", "demo", "--playbook", name)
    assert done.returncode == 100, done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert "is not supported by MLA." in done.stderr
    summary = project.json("summary", "--last")
    assert summary["end_reason"] == "job-failed"
    problem = summary["problems"][0]
    last_line = problem["traceback"].strip().splitlines()[-1]
    assert last_line.startswith("ValueError: Head dimension")
    assert last_line.endswith("is not supported by MLA.")
    output = project.workdir / "output" / "bad-rank"
    assert [path for path in output.iterdir() if not path.name.startswith(".")] == []
    assert _members(summary["run_id"]) == []


def _members(run_id: str) -> list[str]:
    """Return the processes that carry a run's id in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"CTL_RUN_ID={run_id}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # ended in between, or not ours to read
    return found

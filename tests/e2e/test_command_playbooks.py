"""The shipped command playbooks over a real sshd: the user's own script for speculators 0.3, and a training."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.conftest import Project
from support import consumers

from tools import tiny_models
from tools.demo import CHECKOUT

pytestmark = pytest.mark.sshd

SUPPORT = Path(__file__).parents[1] / "support"


def variation(project: Project, name: str, *replacements: tuple[str, str]) -> str:
    """Write a shipped playbook with other paths into the project, under another name; return it."""
    text = (CHECKOUT / "playbooks" / f"{name}.toml").read_text()
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    (project.root / "playbooks" / f"{name}-here.toml").write_text(text)
    return f"{name}-here"


def events(project: Project, run_id: str) -> list[dict[str, object]]:
    folder = project.root / "ctl-runs" / run_id / "events"
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def custom_worker(project: Project) -> str:
    for path in (SUPPORT / "custom_worker_03").glob("*.py"):
        shutil.copy(path, project.root)
    return variation(
        project,
        "speculators-0.3-custom-worker",
        ("/data/eagle3-training/hidden_states/speculators-0.3", "output/speculators-0.3"),
        ("500_000_000_000", "1_000_000"),
        ("7168", "16"),
    )


def test_the_users_own_script_is_uploaded_hooked_cleared_and_summarised(project: Project, custom_worker: str) -> None:
    output = project.workdir / "output" / "speculators-0.3"
    words = ("run", custom_worker, "--host", "demo", "--", "--samples", "5")
    failed = project.ctl(*words)
    assert failed.returncode == 100, failed.stderr
    assert "uploads done" in failed.stderr
    assert "2 files" in failed.stderr
    # What the script itself has to say is the empty string.
    assert "| Error: \n" in failed.stderr
    assert "rank 0: AssertionError" in failed.stderr
    assert "assert not positions.is_floating_point()" in failed.stderr
    problem = project.json("summary", "--last")["problems"][0]
    assert (problem["what"], problem["ranks"][0] in (0, 1)) == ("AssertionError", True)
    assert "in layer" in problem["traceback"]
    assert problem["traceback"].endswith("AssertionError\n")

    worker = project.root / "custom_worker.py"
    worker.write_text(worker.read_text().replace("self.layer(hidden, positions)", "self.layer(positions, hidden)"))
    (output / "data_99.pt").write_bytes(b"half written")
    refused = project.ctl(*words)
    assert refused.returncode == 3
    assert "nobody is there to confirm" in refused.stderr
    assert "1 changed" in refused.stderr, "only the patched worker travels again"
    done = project.ctl(*words[:2], "--yes", *words[2:])
    assert done.returncode == 0, done.stderr
    assert "already there" in done.stderr
    assert "1 entry" in done.stderr
    assert sorted(path.name for path in output.glob("*.pt")) == [f"data_{index}.pt" for index in range(5)]
    summary = project.json("summary", "--last")
    assert (summary["end_reason"], summary["gpus_clean"], summary["problems"]) == ("succeeded", True, [])
    group = summary["survey"]["groups"][0]
    rows = {row["name"]: (row["dtype"], row["shape"], row["count"]) for row in group["tensors"]}
    assert rows == {
        "hidden_states[*]": ("bfloat16", [[4, 8], 16], 20),
        "input_ids": ("int64", [[4, 8]], 5),
        "loss_mask": ("int64", [[4, 8]], 5),
    }
    assert summary["survey"]["nan"]["files"] == 5
    shown = project.ctl("summary", "--last").stdout
    assert "hidden_states[*]" in shown
    assert "4-8 x 16" in shown
    progress = [event for event in events(project, summary["run_id"]) if event["type"] == "progress"]
    assert (progress[-1]["done"], progress[-1]["total"], progress[-1]["unit"]) == (5, 5, "samples")


def test_what_an_extra_argument_or_a_flag_means_is_said(project: Project, custom_worker: str) -> None:
    words = ("run", custom_worker, "--host", "demo", "--dry-run", "--json", "--", "--samples", "2", "--host", "x")
    planned = json.loads(project.ctl(*words).stdout)
    step = next(step for step in planned["steps"] if step["name"] == "command")
    assert step["argv"][-4:] == ["--samples", "2", "--host", "x"]
    assert step["argv"][0] == sys.executable
    assert [step["name"] for step in planned["steps"]] == ["recheck", "place", "clear", "command", "verify"]
    assert planned["command"]["tracebacks"] is True
    assert planned["may_delete"] == [str(project.workdir / "output" / "speculators-0.3")]
    text = project.ctl("run", custom_worker, "--host", "demo", "--dry-run").stdout
    assert "every Python process is hooked" in text
    assert project.ctl("run", "--host", "demo").returncode == 2
    assert "is an extraction" in project.ctl("run", "demo", "--host", "demo").stderr
    assert "is a command" in project.ctl("extract", "--playbook", custom_worker, "--host", "demo").stderr
    assert project.ctl("run", "--host", "demo", "--stale", "clear", "--", "true").returncode == 2
    assert project.ctl("run", custom_worker, "--host", "demo", "--name", "x").returncode == 2
    elsewhere = subprocess.run(
        [*project.argv("run", custom_worker, "--host", "demo", "--dry-run")], cwd=project.root / "playbooks",
        env=project.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert elsewhere.returncode == 2
    assert "02_extract_hidden_states.py to upload" in elsewhere.stderr


def test_stacks_of_a_living_run(project: Project) -> None:
    code = "import time\ndef waiting():\n    time.sleep(300)\nwaiting()"
    started = project.ctl("run", "--host", "demo", "--detach", "--", sys.executable, "-c", code)
    assert started.returncode == 8, started.stderr
    try:
        shown = project.ctl("stacks", "--last")
    finally:
        project.ctl("stop", "--last", "--grace", "1")
    if "no py-spy" in shown.stderr:
        pytest.skip("there is no py-spy: pip install py-spy")
    assert shown.returncode == 0, shown.stderr
    assert "waiting (<string>:3)" in shown.stdout
    assert project.json("stacks", "--last", code=2)["error"]["code"] == "run-ended"


@pytest.mark.engine
def test_a_draft_is_trained_on_what_was_extracted(project: Project) -> None:
    columns, speculators = consumers.install("columns"), consumers.install("speculators-0.9")
    tiny_models.write("llama-tiny", project.workdir / "models")
    project.playbook(
        "llama",
        ("models/kimi-k25-tiny", "models/llama-tiny"),
        ("output/demo", "output/llama"),
        ("tensor_parallel_size = 2", "tensor_parallel_size = 1"),
        ('"0|1"', '"nobind"'),
        ("[env]\n", f'[env]\nPYTHONPATH = "{columns}"\n'),
    )
    extracted = project.ctl("extract", "--host", "demo", "--playbook", "llama", "--max-samples", "24", "--no-canary")
    assert extracted.returncode == 0, extracted.stderr[-3000:]
    path = os.pathsep.join(map(str, (SUPPORT / "speculators_cpu", speculators, columns)))
    name = variation(
        project,
        "speculators-train",
        ("/models/Kimi-K2.5", str(project.workdir / "models" / "llama-tiny")),
        ("/data/eagle3-training/hidden_states/kimi-k2.5-draft", "output/llama-draft"),
        ("/data/eagle3-training/hidden_states/kimi-k2.5", str(project.workdir / "output" / "llama")),
        ('"32000"', '"1024"'),
        ("[env]\n", f'[env]\nPYTHONPATH = "{path}"\n'),
    )
    trained = project.ctl(
        "run", name, "--host", "demo", "--", "--draft-attn-impl", "eager", "--loss-implementation", "eager",
        "--total-seq-len", "128", "--num-workers", "0", "--epochs", "3", "--max-steps", "16",
        "--scheduler-type", "none", "--lr", "3e-3",
    )  # fmt: skip
    log = project.ctl("logs", "--last").stdout
    assert trained.returncode == 0, trained.stderr[-3000:] + log[-3000:]
    losses = [float(loss) for loss in re.findall(r"train/loss=([0-9.eE+-]+)", log)]
    assert len(losses) >= 16, "the trainer takes one step more in an epoch that begins at the limit"
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4]), losses
    summary = project.json("summary", "--last")
    assert (summary["end_reason"], summary["gpus_clean"], summary["problems"]) == ("succeeded", True, [])
    kinds = {group["kind"] for group in summary["survey"]["groups"]}
    assert "safetensors" in kinds
    progress = [event for event in events(project, summary["run_id"]) if event["type"] == "progress"]
    assert progress[-1]["values"]["loss"] == losses[-1]
    assert progress[-1]["unit"] == "steps"

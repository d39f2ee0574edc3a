"""The command that repeats a run plans the same run again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.reported import HOSTILE, write_run

from controller.core.repeat import repeat_command, repeat_text

REPOSITORY = Path(__file__).resolve().parents[2]

PLAN = """
import json, sys
from pathlib import Path
from controller import pipeline
from controller.acting import make_overrides
from controller.core.repeat import repeat_command
from controller.workspace import load_workspace
words = json.loads(sys.argv[1])
overrides = make_overrides(**words)
intention = pipeline.plan_extract(load_workspace(), "gpu1", "eagle3-kimi-k2.5", overrides, wait=True)
print(json.dumps({"plan": intention.plan, "argv": repeat_command(intention.plan)}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "hosts.toml").write_text(
        'schema = 1\n[hosts.gpu1]\naddress = "gpu1"\npython = "/opt/python"\nworkdir = "/root/ctl"\n'
        'output_roots = ["/out"]\ngpus = 8\n'
    )
    return tmp_path


def python(project: Path, *argv: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(project), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *argv], cwd=project, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        {"output": "/out/k"},
        {"output": "/out/a b's", "boundaries": "1,29,57,60", "layer_convention": "specforge", "shard": "2/4",
         "canary": False, "rehearse": "never", "max_samples": 9, "stale": "resume", "adopt": True,
         "store_dtype": "float32", "output_format": "specforge", "data": "/data/x.jsonl", "data_kind": "chat"},
    ],
)  # fmt: skip
def test_the_command_plans_the_same_run(project: Path, words: dict[str, object]) -> None:
    made = json.loads(python(project, "-c", PLAN, json.dumps(words)))
    assert made["argv"][:2] == ["ctl", "extract"]
    assert "--wait" in made["argv"]
    again = json.loads(python(project, "-m", "controller", *made["argv"][1:], "--dry-run", "--json"))
    assert again["outputs"] == [
        {key: output[key] for key in ("path", "root", "stale", "adopt")} for output in made["plan"]["job"]["outputs"]
    ]
    spec = made["plan"]["extract"]
    for name in ("data", "data_kind", "shard", "format", "final_norm", "max_samples", "max_seq_len", "engine"):
        assert again["capture"][name] == spec[name], name
    assert again["capture"]["requested"] == spec["boundaries"]


def test_a_command_is_repeated_with_its_words(tmp_path: Path) -> None:
    plan = write_run(tmp_path).plan
    plan["job"] = {
        **plan["job"], "kind": "command", "name": "train", "cwd": "/x y",
        "steps": [{"name": "command", "kind": "exec", "argv": ["sh", "-c", "echo 'a b' $HOME"]}],
    }  # fmt: skip
    plan["extract"] = None
    argv = repeat_command(plan)  # type: ignore[arg-type]
    assert argv[:4] == ["ctl", "run", "--host", "gpu-host-1"]
    assert argv[argv.index("--") + 1 :] == ["sh", "-c", "echo 'a b' $HOME"]
    assert shlex.split(repeat_text(plan)) == argv  # type: ignore[arg-type]


def test_a_conversion_names_the_run_it_reads(tmp_path: Path) -> None:
    plan = write_run(tmp_path).plan
    argv = [
        "python",
        "-m",
        "x",
        "--run",
        "/root/ctl/runs/20260101-000000-abcdef",
        "--output",
        "/out/c",
        "--to",
        "modelopt",
    ]
    plan["job"] = {**plan["job"], "kind": "convert", "steps": [{"name": "convert", "kind": "exec", "argv": argv}]}
    plan["extract"] = None
    assert repeat_command(plan)[:5] == ["ctl", "convert", "20260101-000000-abcdef", "--to", "modelopt"]  # type: ignore[arg-type]


def test_a_playbook_outside_a_playbooks_folder_is_named_by_its_path(tmp_path: Path) -> None:
    plan = write_run(tmp_path, text=HOSTILE).plan
    assert "--playbook eagle3-kimi-k2.5 " in repeat_text(plan, "/home/me/playbooks/eagle3-kimi-k2.5.toml")  # type: ignore[arg-type]
    assert "--playbook /tmp/mine.toml " in repeat_text(plan, "/tmp/mine.toml")  # type: ignore[arg-type]

"""What preflight is told of earlier runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host.layout import Layout
from remote_payload.host.probe_history import probe_history


def write(workdir: Path, number: int, end: str = "succeeded", **spec: Any) -> str:
    run_id = f"20260101-0000{number:02}-abcdef"
    paths = Layout(str(workdir)).run(run_id)
    Path(paths.folder).mkdir(parents=True)
    plan = {
        "host": {"accelerator": "cpu"},
        "extract": {
            "model": "/m", "engine": {"tensor_parallel_size": 2, "enforce_eager": True}, "format": "modelopt",
            "store_dtype": "fp8", **spec,
        },
    }  # fmt: skip
    summary = {
        "end_reason": end, "capture_path": "hooks", "boundaries": [2, 4], "samples": {"written": 9},
        "tokens_per_s": 50.0, "timings": {"load_s": 5.0, "extract_s": 20.0, "rehearse_s": 1.0},
    }  # fmt: skip
    for path, document in ((paths.plan, plan), (paths.summary, summary), (paths.result, {"duration_s": 40.0})):
        Path(path).write_text(json.dumps(document))
    return run_id


def test_a_record_says_what_a_plan_is_compared_with(tmp_path: Path) -> None:
    run_id = write(tmp_path, 1)
    assert probe_history(lambda text: None, str(tmp_path), "/m")["runs"] == [
        {
            "run_id": run_id, "tensor_parallel_size": 2, "accelerator": "cpu", "capture": "hooks",
            "boundaries": [2, 4], "engine": {"tensor_parallel_size": 2, "enforce_eager": True}, "format": "modelopt",
            "store_dtype": "fp8", "samples": 9, "tokens_per_s": 50.0, "load_s": 5.0, "extract_s": 20.0,
            "rehearse_s": 1.0, "host_s": 40.0,
        }
    ]  # fmt: skip


def test_no_number_of_newer_runs_hides_an_older_one(tmp_path: Path) -> None:
    """The one whose plan is nearest may be behind a dozen trials."""
    written = [write(tmp_path, number) for number in range(15)]
    found = probe_history(lambda text: None, str(tmp_path), "/m")["runs"]
    assert [run["run_id"] for run in found] == written[::-1]


@pytest.mark.parametrize("changes", [{"end": "stopped"}, {"model": "/other"}])
def test_other_runs_tell_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, 1, **changes)
    assert probe_history(lambda text: None, str(tmp_path), "/m")["runs"] == []

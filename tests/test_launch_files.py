"""A launch whose local files are gone by the time they are sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.local_transport import LocalTransport

from controller import pipeline
from controller.core import planner
from controller.core.command import UploadSection
from controller.core.errors import RefusedError
from controller.core.model import Host
from controller.localdata import local_data
from controller.localfiles import local_files
from controller.pipeline import Intention


@pytest.mark.parametrize("kind", ["upload", "data"])
def test_a_file_that_is_gone_when_it_is_sent_refuses_the_run_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    host = Host(
        name="h", address="h", python=sys.executable, bootstrap_python=sys.executable, accelerator="cpu",
        workdir=str(tmp_path / "work"), output_roots=("out",),
    )  # fmt: skip
    file = tmp_path / "d.jsonl"
    file.write_text("{}\n")
    uploads = local_files([UploadSection(path="d.jsonl")], tmp_path, "job.toml") if kind == "upload" else None
    data = local_data("local:d.jsonl", tmp_path) if kind == "data" else None
    intention = Intention(
        plan=planner.make_command_plan(host, ["true"], name="true", **pipeline.stamp()), host=host, playbook=None,
        secret_values={}, runs_dir=tmp_path / "runs", uploads=uploads, data=data,
    )  # fmt: skip
    monkeypatch.setattr(pipeline, "open_transport", lambda *_args, **_words: LocalTransport())
    file.unlink()
    with pytest.raises(RefusedError) as refused:
        pipeline.launch(intention, confirm=lambda _outputs, _listings: True)
    assert refused.value.code == "local-file-gone"
    assert str(file) in refused.value.what
    assert "No such file" in refused.value.why
    (local,) = (tmp_path / "runs").glob("*/local.json")
    assert json.loads(local.read_text())["status"] == "refused"

"""Runs that share an output folder: each says what it adds, none overwrites what another said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.extraction import REPOSITORY, Run
from support.stubengine import StubEngine, make_stub_run, write_model, write_prompts

from remote_payload.extract import output as output_folder
from remote_payload.extract.settings import ConfigError
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST

LENGTHS = [40, 3, 77, 17, 130, 1, 64, 25] * 2
STEPS: dict[str, Any] = {"budget": 64, "chunk": 40, "seqs": 6}
SETTLE = """
import json, os, sys, time
from remote_payload.extract import output
while not os.path.exists(sys.argv[2]):
    time.sleep(0.001)
try:
    output.settle(sys.argv[1], json.loads(sys.argv[3]))
except output.ConfigError as error:
    sys.exit(str(error))
"""
RACERS = 6
RACE_TIMEOUT_S = 120.0


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "data.jsonl", LENGTHS)
    return tmp_path


def share(folder: Path, number: int, **fields: Any) -> Run:
    run_id = f"20260101-000000-{number:06x}"
    return make_stub_run(folder, folder, run_id, stale="resume", shard=[number, 2], **fields)


def test_two_shares_fill_one_folder_at_once(stub: StubEngine, shared: Path) -> None:
    jobs = [stub.start(share(shared, number), **STEPS, step_s=0.01) for number in (1, 2)]
    ended = [job.wait() for job in jobs]
    assert [run.code for run in ended] == [0, 0], [run.log for run in ended]
    written = [{record["index"] for record in run.ledger()} for run in ended]
    assert not written[0] & written[1]
    assert {path.name for path in (shared / "out").glob("hs_*")} == {
        f"hs_{index}.safetensors" for index in written[0] | written[1]
    }
    manifest = shared / "out" / OUTPUT_MANIFEST
    before = (manifest.read_bytes(), manifest.stat().st_ino, manifest.stat().st_mtime_ns)
    again = stub.run(share(shared, 1), **STEPS)
    assert again.code == 0, again.log
    assert (manifest.read_bytes(), manifest.stat().st_ino, manifest.stat().st_mtime_ns) == before


def test_a_share_of_another_kind_is_refused_and_changes_nothing(stub: StubEngine, shared: Path) -> None:
    assert stub.run(share(shared, 1), **STEPS).code == 0
    before = {path: path.stat().st_mtime_ns for path in (shared / "out").rglob("*")}
    other = stub.run(share(shared, 2, boundaries=[2, 4, 6, 8]), **STEPS)
    assert other.code == 2
    assert "runs are not mixed" in other.log
    assert {path: path.stat().st_mtime_ns for path in (shared / "out").rglob("*")} == before


@pytest.mark.parametrize("links", [True, False])
def test_whoever_is_first_says_what_the_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refuse(source: str, target: str) -> None:
            raise PermissionError(1, "Operation not permitted", target)

        monkeypatch.setattr(os, "link", refuse)
    output_folder.settle(str(tmp_path / "out"), {"boundaries": [1]})
    output_folder.settle(str(tmp_path / "out"), {"boundaries": [1]})
    with pytest.raises(ConfigError, match=r"boundaries is \[1\] there and \[2\] here"):
        output_folder.settle(str(tmp_path / "out"), {"boundaries": [2]})
    assert json.loads((tmp_path / "out" / OUTPUT_MANIFEST).read_text())["identity"] == {"boundaries": [1]}
    assert os.listdir(tmp_path / "out" / OUTPUT_LEDGER) == []


def test_of_many_that_begin_at_once_one_kind_goes_on(tmp_path: Path) -> None:
    """Processes that differ in the boundaries; those of the winner's kind go on, all others are refused."""
    out, go = tmp_path / "out", tmp_path / "go"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    kinds = [json.dumps({"boundaries": [number % 2]}) for number in range(RACERS)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", SETTLE, str(out), str(go), kind], env=environment, stderr=subprocess.PIPE
        )
        for kind in kinds
    ]
    go.touch()
    told = [racer.communicate(timeout=RACE_TIMEOUT_S)[1].decode() for racer in racers]
    winner = json.dumps(json.loads((out / OUTPUT_MANIFEST).read_text())["identity"])
    for racer, kind, text in zip(racers, kinds, told, strict=True):
        assert racer.returncode == (0 if kind == winner else 1), text
        assert ("runs are not mixed" in text) == (kind != winner)


@pytest.mark.parametrize("changed", [{"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "fp8"}])
def test_an_engine_that_decided_otherwise_is_refused_once_it_is_known(
    stub: StubEngine, shared: Path, changed: dict[str, str]
) -> None:
    """Two runs that ask for the same, "auto", of engines that make other things of it."""
    first = stub.run(share(shared, 1), **STEPS)
    assert first.code == 0, first.log
    (first.output / "hs_2.safetensors").unlink()  # something to capture
    again = stub.run(share(shared, 1), **STEPS, **changed)
    assert again.code == 1
    ((key, value),) = changed.items()
    (event,) = again.events("exception")
    assert f"were captured with {key} " in event["message"]
    assert f"instead of {value}" in event["message"]
    assert not (first.output / "hs_2.safetensors").exists()

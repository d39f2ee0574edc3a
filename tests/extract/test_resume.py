"""Going on after a kill, a damage or a change: what is there is proved, and nothing is lost, doubled or mixed."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.extraction import Run, execute, header_of
from support.stubengine import (
    BOUNDARIES,
    StubEngine,
    assert_all_samples,
    fates,
    make_stub_run,
    prompts,
    write_model,
    write_prompts,
)  # fmt: skip

from remote_payload.extract import inspector
from remote_payload.extract.formats import TEMPORARY_SUFFIX
from remote_payload.extract.inspector import inspect_all
from remote_payload.extract.output import SEMANTICS
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST

LENGTHS = [100, 40, 300, 1, 77, 17, 130, 64] * 4
INDEXES = [0, *range(2, len(LENGTHS) + 1)]
"""The second record is refused."""

SEEDS = 10
ROUNDS = {"budget": 64, "chunk": 40, "seqs": 6, "preempt": 0.15}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "data.jsonl", LENGTHS)
    return tmp_path


@pytest.fixture
def written(stub: StubEngine, shared: Path) -> Run:
    """A whole run."""
    run = stub.run(new_run(shared, 1), **ROUNDS)
    assert run.code == 0, run.log
    return run


def new_run(shared: Path, number: int, **fields: Any) -> Run:
    return make_stub_run(shared, shared, f"20260101-000000-{number:06x}", **fields)


def assert_whole(run: Run, shared: Path) -> None:
    assert_all_samples(run, shared / "data.jsonl")
    assert execute(run, "summarize").code == 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_job_killed_at_any_moment_resumes_to_the_same_samples(stub: StubEngine, shared: Path, seed: int) -> None:
    generator = random.Random(seed)
    options = {**ROUNDS, "seed": seed, "step_s": 0.015}
    # Small enough that the longest samples are streamed: their temporary files must be swept, too.
    small = {"buffer_bytes": 1 << 20} if seed % 2 else {}
    kills = 0
    for number in range(1, 1 + generator.randint(1, 2)):
        run = new_run(shared, number, stale="resume" if number > 1 else "fail", **small)
        job = stub.start(run, **options)
        moment, deadline = generator.randrange(20), time.monotonic() + 60
        while job.alive() and len(run.ledger()) < moment and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.03))
        kills += job.alive()
        job.kill()
        for index, ids in prompts(shared / "data.jsonl").items():  # whatever has its name is whole, at every moment
            if run.path(index).exists():
                assert load_file(run.path(index))["token_ids"].tolist() == ids
    assert kills
    last = stub.run(new_run(shared, 9, stale="resume", **small), **options)
    assert last.code == 0, last.log
    assert_whole(last, shared)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(data)


def forget(run: Run, index: int) -> None:
    """Take a sample's line out of the ledger in the output folder."""
    for path in (run.output / OUTPUT_LEDGER).iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["index"] != index))


def change_header(run: Run, index: int, key: str, value: str) -> None:
    """Change a header's word for one of the same length, and the ledger's checksum with it: a perfect forgery."""
    path = run.path(index)
    old = header_of(path)["__metadata__"][key]
    assert len(old) == len(value)
    data = path.read_bytes()
    forged = data.replace(json.dumps({key: old})[1:-1].replace(": ", ":").encode(),
                          json.dumps({key: value})[1:-1].replace(": ", ":").encode())  # fmt: skip
    assert forged != data
    path.write_bytes(forged)
    adopt(run, index)


def adopt(run: Run, index: int) -> None:
    """Make the output's ledger believe the file as it is."""
    from remote_payload.host.framing import file_digest

    for ledger in (run.output / OUTPUT_LEDGER).iterdir():
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        for line in lines:
            if line["index"] == index:
                line["sha256"] = file_digest(str(run.path(index)))
        ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_tokens(run: Run) -> None:
    shutil.copyfile(run.path(10), run.path(2))  # whole and finite, of the same length, and another prompt
    adopt(run, 2)


def other_mask(run: Run) -> None:
    spans = header_of(run.path(3))["__metadata__"]["loss_spans"]
    change_header(run, 3, "loss_spans", spans.replace("[[1,", "[[0,"))


def other_engine(run: Run) -> None:
    """As from a share that another host wrote into the same folder."""
    data = run.path(2).read_bytes()
    forged = data.replace(rb"{\"dtype\": \"float32\"}", rb"{\"seed\": 123456789012}")
    assert forged != data
    assert len(forged) == len(data)
    run.path(2).write_bytes(forged)
    adopt(run, 2)


DAMAGES: dict[str, tuple[str, Callable[[Run], Any]]] = {
    "cut": ("damaged", lambda run: os.truncate(run.path(2), 1000)),
    "empty": ("damaged", lambda run: os.truncate(run.path(2), 0)),
    "a flipped byte": ("checksum", lambda run: overwrite(run.path(2), 5000, b"\x55")),
    "a flipped token": ("checksum", lambda run: overwrite(run.path(2), -8, b"\x55")),
    "no ledger line": ("no-record", lambda run: forget(run, 2)),
    "another prompt": ("tokens", other_tokens),
    "another norm": ("header", lambda run: change_header(run, 2, "final_norm", "false"[::-1])),
    "another model": ("header", lambda run: change_header(run, 2, "model", str(run.output.parent / "modex"))),
    "another engine": ("header", other_engine),
    "another mask": ("mask", other_mask),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_is_put_aside_with_its_reason_and_captured_anew(
    stub: StubEngine, shared: Path, written: Run, damage: str
) -> None:
    code, harm = DAMAGES[damage]
    harm(written)
    written.path(20).unlink()  # a hole
    (written.output / f".hs_7.safetensors{TEMPORARY_SUFFIX}").write_bytes(b"half")
    (written.output / f".{OUTPUT_MANIFEST}.k2x8").write_bytes(b"{")
    before = {path.name: path.stat().st_mtime_ns for path in written.output.glob("hs_*")}
    run = stub.run(new_run(shared, 2, stale="resume"), **ROUNDS)
    assert run.code == 0, run.log
    assert_whole(run, shared)
    aside = run.output.with_name(f"{run.output.name}.quarantine-20260101-000000-000002")
    (reason,) = [json.loads(line) for line in (aside / "why.jsonl").read_text().splitlines()]
    assert reason["code"] == code
    assert (aside / reason["file"]).exists()
    again = {r["index"] for r in run.ledger() if not r.get("kept")}
    assert again == {reason["index"], 20}
    kept = [path for path in run.output.glob("hs_*") if path.stat().st_mtime_ns == before.get(path.name)]
    assert len(kept) == len(INDEXES) - 2
    (notice,) = [event for event in run.events("notice") if event["code"] == "resumed"]
    assert f"1 bad files (1 {code})" in notice["text"]
    assert "2 half-written files were deleted" in notice["text"]


def test_what_other_records_left_stays_and_is_told(stub: StubEngine, shared: Path, written: Run) -> None:
    lines = (shared / "data.jsonl").read_text().splitlines(keepends=True)
    (shared / "data.jsonl").write_text("".join(lines[:10]))
    run = stub.run(new_run(shared, 2, stale="resume"), **ROUNDS)
    assert run.code == 0, run.log
    assert len(list(run.output.glob("hs_*"))) == len(INDEXES)
    (notice,) = [event for event in run.events("notice") if event["code"] == "resumed"]
    assert "23 files of other samples were left" in notice["text"]
    assert not [event for event in run.events("phase") if event["name"] == "load"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"boundaries": [2, 4, 6, 8]}, "boundaries is [2, 4, 5, 8] there and [2, 4, 6, 8] here"),
        ({"final_norm": True}, "final_norm is False there and True here"),
        ({"store_dtype": "bfloat16"}, "store_dtype is 'F32' there and 'BF16' here"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' there and 'bfloat16' here"),
        ({"revision": "main"}, "revision is '' there and 'main' here"),
        ({"engine": {"kv_cache_dtype": "fp8"}}, "engine is {} there and {'kv_cache_dtype': 'fp8'} here"),
        ({"engine": {"quantization": "fp8"}}, "engine is {} there and {'quantization': 'fp8'} here"),
        ({"engine": {"attention_backend": "TRITON_MLA"}}, "{'attention_backend': 'TRITON_MLA'} here"),
        ({"engine": {"moe_backend": "marlin"}}, "{'moe_backend': 'marlin'} here"),
        ({"engine": {"linear_backend": "cutlass"}}, "{'linear_backend': 'cutlass'} here"),
        ({"format": "speculators-0.3"}, "format is 'speculators' there"),
        ("model", "model is "),
        ("weights", "model_files is "),
        ("semantics", f"semantics is {SEMANTICS + 1} there and {SEMANTICS} here"),
        ("manifest", f"no {OUTPUT_MANIFEST}"),
        ("damaged manifest", "is not JSON"),
    ],
)
def test_runs_that_differ_are_not_mixed(
    stub: StubEngine, shared: Path, written: Run, changed: Any, words: str
) -> None:
    run = new_run(shared, 2, stale="resume", **(changed if isinstance(changed, dict) else {}))
    manifest = run.output / OUTPUT_MANIFEST
    if changed == "model":
        shutil.copytree(shared / "model", shared / "other")
        plan = (run.folder / "plan.json").read_text()
        (run.folder / "plan.json").write_text(plan.replace(str(shared / "model"), str(shared / "other")))
    elif changed == "weights":
        (shared / "model" / "model.safetensors").write_bytes(b"other weights")
    elif changed == "semantics":
        record = json.loads(manifest.read_text())
        record["identity"]["semantics"] += 1
        manifest.write_text(json.dumps(record))
    elif changed == "manifest":
        manifest.unlink()
    elif changed == "damaged manifest":
        manifest.write_text("{")
    before = {path: path.stat().st_mtime_ns for path in run.output.rglob("*")}
    ended = stub.run(run, **ROUNDS)
    assert ended.code == 2
    assert words in ended.log
    assert {path: path.stat().st_mtime_ns for path in run.output.rglob("*")} == before
    assert not list(shared.glob("out.quarantine*"))


def test_a_run_that_fails_names_every_sample_that_it_did_not_write(stub: StubEngine, shared: Path) -> None:
    run = new_run(shared, 1)
    job = stub.start(run, **ROUNDS, step_s=0.01)
    while not run.ledger():
        time.sleep(0.005)
    run.output.rename(shared / "gone")  # the writers' error ends the run
    ended = job.wait()
    assert ended.code == 1
    assert fates(ended) == Counter(dict.fromkeys(range(len(LENGTHS) + 1), 1))
    failed = [record for record in ended.ledger("driver") if "failed" in record]
    assert failed
    assert "No such file or directory" in failed[0]["why"]


class Harmful:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_a_torch_file_is_read_by_a_child_and_runs_nothing(tmp_path: Path) -> None:
    torch.save({"input_ids": Harmful(tmp_path / "harm")}, tmp_path / "data_0.pt")
    (tmp_path / "data_1.pt").write_bytes(b"no torch file")
    paths = [str(tmp_path / f"data_{number}.pt") for number in (0, 1, 2)]
    harmful, garbage, absent = inspect_all(paths, "speculators", children=1)
    assert not (tmp_path / "harm").exists()
    for found in (harmful, garbage):
        assert found.facts is None
        assert "not a torch file of plain tensors" in found.why
    assert "No such file" in absent.why


def test_a_file_that_takes_its_reader_along_is_damaged_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Run
) -> None:
    monkeypatch.setattr(inspector, "START_S", 5.0)
    os.mkfifo(tmp_path / "hs_0.safetensors")  # reading it never ends, like a disk that hangs
    paths = [str(tmp_path / "hs_0.safetensors"), str(written.path(2))]
    hanging, whole = inspect_all(paths, "speculators", children=1)
    assert "killed its reader" in hanging.why
    assert whole.facts is not None
    assert whole.facts.shape == (LENGTHS[1], len(BOUNDARIES), 128)

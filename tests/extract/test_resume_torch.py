"""Torch formats, killed and resumed: the same files with the same tokens and states, and none that runs code."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extraction import Run, execute
from support.stubengine import BOUNDARIES, StubEngine, fates, make_stub_run, prompts, write_model, write_prompts
from support.stubvllm.vllm.v1.worker.cpu_worker import states

from remote_payload.extract.formats import format_named
from remote_payload.host.framing import file_digest
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST

LENGTHS = [100, 40, 300, 1, 77, 17, 130, 64] * 2
ROUNDS: dict[str, Any] = {"budget": 64, "chunk": 40, "seqs": 6, "preempt": 0.15}
FORMATS = [("speculators-0.3", {}), ("specforge", {"final_norm": True}), ("modelopt", {"buffer_bytes": 1 << 20})]
"""With the smaller buffers the longest samples are streamed, and lie on the disk in parts until they are whole."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "data.jsonl", LENGTHS)
    return tmp_path


def new_run(shared: Path, number: int, form: str, **fields: Any) -> Run:
    return make_stub_run(shared, shared, f"20260101-000000-{number:06x}", format=form, **fields)


def files_of(output: Path) -> set[str]:
    """All files but those in the folder's own records."""
    inside = (path.relative_to(output) for path in output.rglob("*") if path.is_file())
    return {str(path) for path in inside if path.parts[0] not in (OUTPUT_LEDGER, OUTPUT_MANIFEST)}


def assert_whole(run: Run, shared: Path, form: str) -> None:
    """Each sample has its file and no other is there; tokens, masks and states are bit for bit what they must be."""
    layout, wanted = format_named(form), prompts(shared / "data.jsonl")
    assert files_of(run.output) == {layout.file_name(index) for index in wanted}
    for index, ids in wanted.items():
        sample = layout.read(str(run.output / layout.file_name(index)))
        expected = states([(token, position) for position, token in enumerate(ids)])
        assert torch.frombuffer(bytearray(sample.token_ids), dtype=torch.int64).tolist() == ids
        assert bytes(sample.hidden) == torch.stack([expected[b] for b in BOUNDARIES], dim=1).numpy().tobytes()
    assert fates(run) == Counter(dict.fromkeys(range(len(LENGTHS) + 1), 1))
    assert execute(run, "summarize").code == 0


@pytest.mark.parametrize(("form", "fields"), FORMATS, ids=[form for form, _ in FORMATS])
def test_a_killed_job_resumes_to_the_same_samples(
    stub: StubEngine, shared: Path, form: str, fields: dict[str, Any]
) -> None:
    generator = random.Random(form)
    job = stub.start(first := new_run(shared, 1, form, **fields), **ROUNDS, step_s=0.015)
    moment, deadline = generator.randrange(1, 10), time.monotonic() + 60
    while job.alive() and len(first.ledger()) < moment and time.monotonic() < deadline:
        time.sleep(0.001)
    assert job.alive(), (first.folder / "log.txt").read_text()[-4000:]
    job.kill()
    layout, ids = format_named(form), prompts(shared / "data.jsonl")
    for index in ids:  # whatever has its name is whole
        path = first.output / layout.file_name(index)
        if path.exists():
            assert torch.load(path, weights_only=True)["input_ids"].tolist() == ids[index]
    last = stub.run(new_run(shared, 2, form, stale="resume", **fields), **ROUNDS)
    assert last.code == 0, last.log
    assert [line for line in last.ledger("driver") if line.get("kept")]
    assert_whole(last, shared, form)


class Harmful:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def believed(output: Path, index: int, path: Path) -> None:
    """Make the folder's ledger vouch for a file as it is."""
    for ledger in (output / OUTPUT_LEDGER).iterdir():
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        for line in lines:
            if line["index"] == index:
                line["sha256"] = file_digest(str(path))
        ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("damage", "code"), [("code", "damaged"), ("byte", "checksum"), ("prompt", "tokens"), ("hole", None)]
)
def test_a_bad_file_is_put_aside_and_captured_anew(
    stub: StubEngine, shared: Path, damage: str, code: str | None
) -> None:
    form = "speculators-0.3"
    run = stub.run(new_run(shared, 1, form), **ROUNDS)
    assert run.code == 0, run.log
    path = run.output / "data_2.pt"
    if damage == "code":
        torch.save({**torch.load(path), "more": Harmful(shared / "harm")}, path)
        believed(run.output, 2, path)
    elif damage == "byte":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "prompt":
        path.write_bytes((run.output / "data_10.pt").read_bytes())  # of the same length
        believed(run.output, 2, path)
    else:
        path.unlink()
    again = stub.run(new_run(shared, 2, form, stale="resume"), **ROUNDS)
    assert again.code == 0, again.log
    assert not (shared / "harm").exists()
    assert [line["index"] for line in again.ledger()] == [2]
    assert_whole(again, shared, form)
    aside = shared / "out.quarantine-20260101-000000-000002"
    reasons = (aside / "why.jsonl").read_text().splitlines() if code else []
    assert [json.loads(reason)["code"] for reason in reasons] == ([code] if code else [])
    assert (aside / "data_2.pt").exists() is bool(code)

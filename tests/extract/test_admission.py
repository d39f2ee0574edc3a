"""What is admitted when: bounds, pauses, samples that are given up or lost. The engine is a model of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.disk import fill, small_disk

from remote_payload.extract import admission
from remote_payload.extract.admission import Admission, Room
from remote_payload.extract.dataset import Sample, is_mine, writing_rank
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.progress import Counts, LedgerTail, PatientEvents, Progress
from remote_payload.host.files import read_lines
from remote_payload.host.journal import EventWriter, Journal
from remote_payload.host.pause import paused_by

ROW, POOL, RANKS = 100, 1000, 2


class Engine:
    """Computes a request a step. `write` decides what becomes of a computed sample."""

    def __init__(self, folder: Path) -> None:
        self.ledgers = [Journal(str(folder / "ledger" / f"rank-{rank}.jsonl")) for rank in range(RANKS)]
        self.queue: deque[tuple[str, Sample]] = deque()
        self.seen: list[str] = []
        self.held: list[Sample] = []
        self.deferred: list[int] = []
        self.write: Callable[[Sample], None] = self.to_ledger
        self.most = 0
        self.asked: Callable[[], None] = lambda: None

    def to_ledger(self, sample: Sample) -> None:
        size = len(sample.token_ids) * ROW
        record = {"index": sample.index, "file": f"{sample.index}", "tokens": len(sample.token_ids), "bytes": size}
        self.ledgers[sample.index % RANKS].append(record)

    def add(self, request_id: str, sample: Sample) -> None:
        self.seen.append(request_id)
        self.queue.append((request_id, sample))
        for rank in range(RANKS):
            under_way = [*(s for _, s in self.queue), *self.held]
            sizes = [len(s.token_ids) * ROW for s in under_way if s.index % RANKS == rank]
            self.most = max(self.most, sum(min(size, POOL // 2) for size in sizes))

    def step(self) -> None:
        self.write(self.queue.popleft()[1])

    def busy(self) -> bool:
        return bool(self.queue)

    def status(self) -> list[dict[str, Any]]:
        self.asked()
        deferred, self.deferred = self.deferred, []
        return [
            {
                "rank": rank,
                "writing": sum(s.index % RANKS == rank for s in self.held),
                "stalled": "hs_0: no space" if self.held else None,
                "deferred": [index for index in deferred if index % RANKS == rank],
            }
            for rank in range(RANKS)
        ]


class Desk:
    """An Admission with everything around it."""

    def __init__(self, folder: Path, output: Path) -> None:
        self.engine = Engine(folder)
        self.notices: list[str] = []
        events = PatientEvents(EventWriter(str(folder / "events"), "driver", "20260102-030405-abcdef", "here"))
        self.progress = Progress(events, total=99, skipped=0, records=99, kept=Counts())
        room = Room(output=str(output), ranks=RANKS, row_bytes=ROW, buffer_bytes=POOL, side_bytes=8, rewrites=False)
        tail = LedgerTail(str(folder / "ledger"))
        self.admission = Admission(
            self.engine, room, tail, self.progress, lambda level, code, text: self.notices.append(code)
        )


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, tmp_path)


def samples(*lengths: int) -> list[Sample]:
    return [Sample(index=i, token_ids=list(range(n)), loss_mask=None) for i, n in enumerate(lengths)]


def test_every_sample_is_admitted_once_and_the_buffers_hold_what_is_under_way(desk: Desk) -> None:
    desk.admission.run(samples(*[4, 1, 5, 3, 100, 2, 9, 4] * 8))
    assert desk.engine.seen == [str(index) for index in range(64)]
    assert desk.progress.done == 64
    assert 0 < desk.engine.most <= POOL
    assert desk.notices == []


def test_a_sample_that_was_given_up_comes_again_under_another_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "BACKOFF_S", 0.1)
    refused = [3, 3, 5]

    def write(sample: Sample) -> None:
        if sample.index in refused:
            refused.remove(sample.index)
            desk.engine.deferred.append(sample.index)
        else:
            desk.engine.to_ledger(sample)

    desk.engine.write = write
    desk.admission.run(samples(*[4] * 8))
    assert desk.progress.done == 8
    assert sorted(desk.engine.seen) == ["0", "1", "2", "3", "3.1", "3.2", "4", "5", "5.1", "6", "7"]
    assert desk.notices.count("sample-deferred") == 3


def test_a_sample_that_no_writer_has_is_an_error(desk: Desk) -> None:
    def write(sample: Sample) -> None:
        if sample.index != 2:
            desk.engine.to_ledger(sample)

    desk.engine.write = write
    with pytest.raises(CaptureError, match="sample 2 was computed, and no writer has it"):
        desk.admission.run(samples(1, 1, 1, 1))


def test_the_error_of_a_writer_ends_the_wait(desk: Desk) -> None:
    def fail() -> None:
        raise OSError("broken disk")

    desk.engine.write = desk.engine.held.append
    desk.engine.asked = fail
    with pytest.raises(OSError, match="broken disk"):
        desk.admission.run(samples(1))


def test_writers_without_room_pause_admission_and_the_last_sample_ends_the_pause(desk: Desk, tmp_path: Path) -> None:
    """All samples are admitted already: nothing is left that would end the pause."""
    questions = 0

    def free_at_the_third() -> None:
        nonlocal questions
        questions += 1
        if questions == 3:
            assert paused_by(str(tmp_path / "events")) == "disk-full"
            for sample in desk.engine.held:
                desk.engine.to_ledger(sample)
            desk.engine.held.clear()

    desk.engine.write = desk.engine.held.append
    desk.engine.asked = free_at_the_third
    desk.admission.run(samples(1, 2))
    assert desk.notices == ["disk-full", "disk-freed"]
    assert desk.progress.done == 2
    told = [event.get("paused") for event in read_lines(str(tmp_path / "events" / "driver.jsonl"))]
    assert told == ["disk-full", None], "each sign of life says whether it waits"
    assert paused_by(str(tmp_path / "events")) is None


def test_nothing_is_admitted_that_the_disk_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        desk = Desk(tmp_path, disk)
        filler = fill(disk, 100 << 10)  # less than one sample and the reserve need
        waits = 0

        def beat() -> None:
            nonlocal waits
            waits += 1
            assert desk.engine.seen == []
            if waits == 2:
                filler.unlink()

        monkeypatch.setattr(admission, "BEAT_S", 0.3)
        monkeypatch.setattr(desk.progress, "beat", beat)
        desk.admission.run(samples(400, 4))
        assert desk.notices == ["disk-low", "disk-freed"]
        assert desk.engine.seen == ["0", "1"]


def test_a_full_disk_is_told_while_the_engine_still_computes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BUSY_STATUS_S", 0.0)
    told: list[list[str]] = []

    def write(sample: Sample) -> None:
        told.append(list(desk.notices))
        if sample.index < 3:
            desk.engine.held.append(sample)
            return
        for held in desk.engine.held:  # somebody made room
            desk.engine.to_ledger(held)
        desk.engine.held.clear()
        desk.engine.to_ledger(sample)

    desk.engine.write = write
    desk.admission.run(samples(1, 1, 1, 1, 1))
    assert told[1] == ["disk-full"]
    assert desk.notices == ["disk-full", "disk-freed"]
    assert desk.progress.done == 5


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_samples_of_a_share_are_spread_over_all_ranks(shards: int, ranks: int) -> None:
    """By index alone, one of eight ranks would write all of a share of eight."""
    for number in range(1, shards + 1):
        mine = [index for index in range(shards * ranks * 5) if is_mine(index, (number, shards))]
        writers = [writing_rank(index, (number, shards), ranks) for index in mine]
        assert [writers.count(rank) for rank in range(ranks)] == [5] * ranks

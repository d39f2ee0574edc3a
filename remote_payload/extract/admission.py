"""When the next sample goes to the engine: while the ranks' buffers and the disk have room for what is under way.

The parent is the place to wait. A worker that blocks is killed by vLLM's own time-out, an idle engine is not. So a
sample is admitted only if the buffers of its rank add up to hold it even should no writer make progress, and if the
disk has room for it and for all that was admitted before. A sample that a worker had to give up all the same, because
no hole between the others was large enough or the disk was full, is admitted again: before any that is new, and from
the third time on with its rank's buffers to itself, so that small samples never keep a long one out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from remote_payload.extract.dataset import WHOLE, Sample, Shard, writing_rank
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.progress import LedgerTail, Progress
from remote_payload.extract.spill import HEAD_BYTES
from remote_payload.extract.store import is_streamed

WINDOW_TOKENS = 1 << 20
"""Tokens under way at most: many steps of any batch size, so that the engine never waits for the parent."""

WINDOW_SAMPLES = 4096
"""The same bound for data sets of tiny samples."""

POLL_S = 0.02
"""Between two looks at the ledgers while the engine is idle."""

STATUS_S = 1.0
"""Between two questions to idle ranks: what they wait for, and what they gave up."""

BUSY_STATUS_S = 5.0
"""The same while it is busy: a full disk and a writer's error are to be known before the last step."""

DISK_S = 0.2
"""Between two looks at the disk: in that time writers fill less than the reserve."""

BEAT_S = 30.0
"""Between two signs of life during a pause: well below any `silence_timeout`."""

BACKOFF_S = 60.0
"""At most this long until a sample that was given up is tried again: each try costs its computation."""

BACKOFF_DOUBLINGS = 6
"""From one second; a disk that stays full for days means thousands of attempts, and 2.0 ** 1024 is an error."""

ALONE_AFTER = 2
"""Given up so often, a sample comes when its rank holds no other, and none until it is written: any hole will do."""

ALONE_ATTEMPTS = 10
"""Given up so often even then, it never will be written: with waits and backoff that is a quarter of an hour."""

RESERVE_PART, RESERVE_BYTES = 50, 256 << 20
"""Left free: a 50th of the file system, at most 256 MiB, for events, logs and ledgers that share the disk."""

SPAN_BYTES = 20
"""Bytes of a range of tokens in a file's description: "[1048574, 1048576], "."""

SAMPLE_OVERHEAD_BYTES = 128 << 10
"""The room for a head, other names and figures in it, padding, and block rounding of a sample file."""


class Engine(Protocol):
    """What is needed of vLLM."""

    def add(self, request_id: str, sample: Sample) -> None: ...
    def step(self) -> None: ...
    def busy(self) -> bool: ...
    def status(self) -> Sequence[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The sizes that decide. `row_bytes`: bytes of a token's states; `buffer_bytes`: of one rank's buffers.

    `side_bytes`: of a token beside its states (id, mask, scale). `rewrites`: whether a streamed sample's rows are on
    the disk twice while its file is made of them.
    """

    output: str
    ranks: int
    row_bytes: int
    buffer_bytes: int
    side_bytes: int
    rewrites: bool
    shard: Shard = WHOLE

    def rank_of(self, index: int) -> int:
        """The rank that holds and writes a sample."""
        return writing_rank(index, self.shard, self.ranks)

    def charge(self, sample: Sample) -> int:
        """Bytes of buffers that a sample may need at once: a streamed one's pieces get by with half the pool."""
        size = len(sample.token_ids) * self.row_bytes
        return self.buffer_bytes // 2 if is_streamed(size, self.buffer_bytes) else size

    def file_bytes(self, sample: Sample) -> int:
        """Bytes that its file takes on the disk until it is whole, at most."""
        tokens, mask = len(sample.token_ids), sample.loss_mask or b""
        rows, described = tokens * self.row_bytes, (mask.count(b"\0\1") + 1) * SPAN_BYTES
        rewritten = self.rewrites or described > HEAD_BYTES // 2
        again = rows if rewritten and is_streamed(rows, self.buffer_bytes) else 0
        return rows + again + tokens * self.side_bytes + described + SAMPLE_OVERHEAD_BYTES


@dataclass(slots=True, kw_only=True)
class _Again:
    """A sample that was given up, until it is on disk."""

    sample: Sample
    attempts: int = 0  # that failed
    alone: int = 0  # of them with the rank's buffers to itself, and the disk not full
    due: float = 0.0  # time.monotonic()
    waiting: bool = True  # not admitted again yet


class Admission:
    """Feeds samples to the engine until each of them is in a ledger."""

    def __init__(
        self,
        engine: Engine,
        room: Room,
        tail: LedgerTail,
        progress: Progress,
        notice: Callable[[str, str, str], None],
    ) -> None:
        """`notice` takes level, code and text."""
        self._engine, self._room, self._tail, self._progress, self._notice = engine, room, tail, progress, notice
        self._under_way: dict[int, Sample] = {}
        self._charged = [0] * room.ranks
        self._tokens = self._promised = 0
        self._again: dict[int, _Again] = {}
        self._waiting = 0  # of them
        self._alone: set[int] = set()  # ranks whose buffers one sample has to itself
        self._disk = _Disk(room.output)
        self._paused: float | None = None  # time.monotonic() of the beginning
        self._stalled = False  # writers were stuck when last asked
        self._asked = self._beaten = self._collected = 0.0

    def run(self, samples: Iterable[Sample]) -> None:
        """Return when every sample is on disk.

        Raises what a writer raised, and CaptureError if a computed sample never comes to disk, or is given up again
        and again.
        """
        queue = iter(samples)
        following = next(queue, None)
        while True:
            if time.monotonic() - self._collected >= POLL_S:
                self._collect()
            while (due := self._due()) is not None and self._admits(due):
                self._add(due)
            # What is due and has no room comes first, or new samples would take every byte that is given back.
            while due is None and following is not None and not self._is_full() and self._admits(following):
                self._add(following)
                following = next(queue, None)
            if self._engine.busy():
                self._engine.step()
                if time.monotonic() - self._asked >= BUSY_STATUS_S:
                    self._ask()
            elif self._under_way or self._waiting or following is not None:
                self._wait()
            else:
                self._resume()
                return

    def _is_full(self) -> bool:
        """Whether a new sample would be too many. Those to come again count, and are admitted all the same."""
        return self._tokens >= WINDOW_TOKENS or len(self._under_way) + self._waiting >= WINDOW_SAMPLES

    def _due(self) -> Sample | None:
        """Return the sample whose time to come again is longest past."""
        if not self._waiting:
            return None
        first = min((again for again in self._again.values() if again.waiting), key=lambda again: again.due)
        return first.sample if time.monotonic() >= first.due else None

    def _admits(self, sample: Sample) -> bool:
        rank = self._room.rank_of(sample.index)
        held = self._charged[rank]
        if held and (held + self._room.charge(sample) > self._room.buffer_bytes or self._is_to_be_alone(sample)):
            return False
        if rank in self._alone:
            return False
        if self._stalled and self._under_way:
            return False
        needed = self._promised + self._room.file_bytes(sample)
        if self._disk.has(needed):
            self._resume()
            return True
        # Files half written count twice, as promised and as used: only an empty desk shows that there is no room.
        if not self._under_way and self._paused is None:
            self._pause("disk-low", f"{self._room.output} has {max(self._disk.free, 0):,} bytes free for {needed:,}")
        return False

    def _is_to_be_alone(self, sample: Sample) -> bool:
        again = self._again.get(sample.index)
        return again is not None and again.attempts >= ALONE_AFTER

    def _add(self, sample: Sample) -> None:
        again = self._again.get(sample.index)
        if again is None:
            self._engine.add(str(sample.index), sample)
            self._tokens += len(sample.token_ids)
        else:
            self._engine.add(f"{sample.index}.{again.attempts}", sample)
            again.waiting = False
            self._waiting -= 1
        if self._is_to_be_alone(sample):
            self._alone.add(self._room.rank_of(sample.index))
        self._under_way[sample.index] = sample
        self._charge(sample, 1)

    def _charge(self, sample: Sample, sign: int) -> None:
        self._charged[self._room.rank_of(sample.index)] += sign * self._room.charge(sample)
        self._promised += sign * self._room.file_bytes(sample)

    def _collect(self) -> None:
        self._collected = time.monotonic()
        for record in self._tail.read():
            self._progress.add(record)
            self._disk.wrote(record["bytes"])
            sample = self._under_way.pop(record["index"], None)
            if sample is not None:
                self._charge(sample, -1)
                self._tokens -= len(sample.token_ids)
                self._again.pop(sample.index, None)
                self._alone.discard(self._room.rank_of(sample.index))

    def _wait(self) -> None:
        """The engine is idle: writers are at work, or the disk is full."""
        time.sleep(POLL_S)
        now = time.monotonic()
        if self._paused is not None and now - self._beaten >= BEAT_S:
            self._beaten = now
            self._progress.beat()
        if now - self._asked >= STATUS_S and self._under_way:
            writing = self._ask()
            lost = [index for index in self._under_way if not writing[self._room.rank_of(index)]]
            if lost:
                raise CaptureError(f"sample {min(lost)} was computed, and no writer has it")

    def _ask(self) -> dict[int, int]:
        """Learn what became of computed samples; return how many writes each rank still has."""
        self._asked = time.monotonic()
        ranks = self._engine.status()
        self._collect()  # after the answers: a rank without work has written its last line before
        stalled = [rank["stalled"] for rank in ranks if rank["stalled"]]
        if stalled and self._paused is None:
            self._pause("disk-full", f"the writers wait for room: {stalled[0]}")
        elif self._paused is not None and not stalled and self._disk.has(self._promised):
            self._resume()
        self._stalled = bool(stalled)
        for index in (index for rank in ranks for index in rank["deferred"]):
            self._defer(index)
        return {rank["rank"]: rank["writing"] for rank in ranks}

    def _defer(self, index: int) -> None:
        sample = self._under_way.pop(index, None)
        if sample is None:
            return
        self._charge(sample, -1)
        again = self._again.setdefault(index, _Again(sample=sample))
        again.attempts += 1
        again.waiting = True
        self._waiting += 1
        again.due = time.monotonic() + min(BACKOFF_S, 2.0 ** min(again.attempts - 1, BACKOFF_DOUBLINGS))
        if (rank := self._room.rank_of(index)) in self._alone:
            self._alone.discard(rank)
            again.alone += not self._stalled
        if again.alone >= ALONE_ATTEMPTS:
            raise CaptureError(
                f"sample {index} of {len(sample.token_ids):,} tokens was given up {again.attempts} times, the last "
                f"with the {self._room.buffer_bytes:,} bytes of a rank's buffers to itself: the disk is too slow to "
                "take its states in pieces; use a faster one, more buffer_bytes, or a smaller max_seq_len"
            )
        text = f"the buffers had no room for sample {index}, attempt {again.attempts}: it will be captured again"
        self._notice("warn", "sample-deferred", text)

    def _pause(self, code: str, why: str) -> None:
        self._paused = self._beaten = time.monotonic()
        self._progress.paused = code
        self._notice("warn", code, f"{why}. No sample is admitted until space is freed; none is lost")
        self._progress.beat()  # the latest of these says whether the run is paused: see `host.pause`

    def _resume(self) -> None:
        if self._paused is None:
            return
        seconds = time.monotonic() - self._paused
        self._paused = self._progress.paused = None
        self._notice("info", "disk-freed", f"{self._room.output} has room again; goes on after {seconds:.0f} s")
        self._progress.beat()


class _Disk:
    """Free bytes for this user, looked up now and then: a look may cost milliseconds on a network file system."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._looked = 0.0
        self.free = 0

    def wrote(self, size: int) -> None:
        """Files of `size` bytes became whole since the last look."""
        self.free -= size

    def has(self, needed: int) -> bool:
        """Whether `needed` bytes fit and leave the reserve."""
        now = time.monotonic()
        if now - self._looked >= DISK_S:
            found = os.statvfs(self._path)
            total = found.f_blocks * found.f_frsize
            self.free = found.f_bavail * found.f_frsize - min(RESERVE_BYTES, total // RESERVE_PART)
            self._looked = now
        return self.free >= needed

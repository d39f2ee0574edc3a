"""When the next sample goes to the engine: while the ranks' buffers and the disk have room for what is under way.

The parent is the place to wait. A worker that blocks is killed by vLLM's own time-out, an idle engine is not. So a
sample is admitted only if the buffers of its rank add up to hold it even should no writer make progress, and if the
disk has room for it and for all that was admitted before. A sample that a worker had to give up all the same, because
no hole between the others was large enough or the disk was full, is admitted again.
"""

from __future__ import annotations

import os
import time
from collections import deque
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
        self._again: deque[Sample] = deque()
        self._attempts: dict[int, int] = {}
        self._disk = _Disk(room.output)
        self._paused: float | None = None  # time.monotonic() of the beginning
        self._stalled = False  # writers were stuck when last asked
        self._asked = self._beaten = self._collected = self._retry_at = 0.0

    def run(self, samples: Iterable[Sample]) -> None:
        """Return when every sample is on disk.

        Raises what a writer raised, and CaptureError if a computed sample never comes to disk.
        """
        queue = iter(samples)
        following = next(queue, None)
        while True:
            if time.monotonic() - self._collected >= POLL_S:
                self._collect()
            while self._again and time.monotonic() >= self._retry_at and self._admits(self._again[0]):
                self._add(self._again.popleft())
            while following is not None and self._admits(following):
                self._add(following)
                following = next(queue, None)
            if self._engine.busy():
                self._engine.step()
                if time.monotonic() - self._asked >= BUSY_STATUS_S:
                    self._ask()
            elif self._under_way or self._again or following is not None:
                self._wait()
            else:
                self._resume()
                return

    def _admits(self, sample: Sample) -> bool:
        rank = self._room.rank_of(sample.index)
        full = self._tokens >= WINDOW_TOKENS or len(self._under_way) >= WINDOW_SAMPLES
        held = self._charged[rank]
        if full or (held and held + self._room.charge(sample) > self._room.buffer_bytes):
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

    def _add(self, sample: Sample) -> None:
        attempt = self._attempts.get(sample.index, 0)
        self._engine.add(f"{sample.index}.{attempt}" if attempt else str(sample.index), sample)
        self._under_way[sample.index] = sample
        self._account(sample, 1)

    def _account(self, sample: Sample, sign: int) -> None:
        self._charged[self._room.rank_of(sample.index)] += sign * self._room.charge(sample)
        self._tokens += sign * len(sample.token_ids)
        self._promised += sign * self._room.file_bytes(sample)

    def _collect(self) -> None:
        self._collected = time.monotonic()
        for record in self._tail.read():
            self._progress.add(record)
            self._disk.wrote(record["bytes"])
            sample = self._under_way.pop(record["index"], None)
            if sample is not None:
                self._account(sample, -1)

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
        self._account(sample, -1)
        attempts = self._attempts[index] = self._attempts.get(index, 0) + 1
        self._retry_at = time.monotonic() + min(BACKOFF_S, 2.0 ** (attempts - 1))
        self._again.append(sample)
        text = f"the buffers had no room for sample {index}, attempt {attempts}: it will be captured again"
        self._notice("warn", "sample-deferred", text)

    def _pause(self, code: str, why: str) -> None:
        self._paused = self._beaten = time.monotonic()
        self._notice("warn", code, f"{why}. No sample is admitted until space is freed; none is lost")

    def _resume(self) -> None:
        if self._paused is None:
            return
        seconds = time.monotonic() - self._paused
        self._paused = None
        self._notice("info", "disk-freed", f"{self._room.output} has room again; goes on after {seconds:.0f} s")


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

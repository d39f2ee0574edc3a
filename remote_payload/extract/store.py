"""From states on the device to files: bounded host buffers, a side stream, writer threads.

The engine's thread only enqueues copies. A sample of usual length owns one buffer from its first row to its file; a
long one is streamed: its rows go to its temporary file piece by piece, so that it never lies in memory whole. All
buffers together stay below the pool's limit. Where there is no room and none is coming (the disk is full), a sample
is given up and reported as deferred; the driver sends it again.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from remote_payload.extract.formats import Format, SampleData, Sink, mask_of_spans, named, publish, token_digest
from remote_payload.extract.pool import DEFAULT_BUFFER_BYTES, Abandoned, BufferPool
from remote_payload.extract.quantize import to_fp8
from remote_payload.extract.spill import Spill
from remote_payload.extract.statistics import STATISTICS, measure, summarize_states
from remote_payload.host.journal import Journal

WRITERS = 8
"""Threads a rank. The engine's last step leaves that many files at once to write and hash, while the GPU is idle."""

PIECES = 8
"""A streamed piece is at most this part of the pool: two samples fill pieces while as many are being written."""

DTYPE_NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
"""safetensors' names."""


@dataclass(slots=True, kw_only=True, eq=False)
class Buffer:
    """A sample under way: `hidden` [tokens, states, hidden] in store dtype, `statistics` [tokens, states, 4] fp32.

    A streamed sample has a `spill` instead of `hidden`; `writes` are its pieces on their way there.
    """

    index: int
    token_ids: bytes
    loss_spans: list[list[int]] | None
    hidden: torch.Tensor | None
    place: int | None  # of `hidden` in the pool
    statistics: torch.Tensor
    started: float  # time.monotonic()
    record_id: str | None = None
    scales: torch.Tensor | None = None  # fp32 [tokens], with fp8
    spill: Spill | None = None
    writes: list[Future[None]] = field(default_factory=list)
    wanted: bool = True
    copied: Any = None  # a CUDA event after the last copy

    @property
    def tokens(self) -> int:
        return self.statistics.shape[0]


class SampleStore:
    """Copies, measures and writes samples. All methods are called by the engine's thread."""

    def __init__(
        self,
        *,
        output: str,
        form: Format,
        boundaries: Sequence[int],
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        ledgers: Sequence[Journal],
        metadata: Callable[[Buffer, list[dict[str, Any]], str], dict[str, str]],
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> None:
        """`metadata` makes a file's own description from buffer, per-state statistics and token digest.

        Every ledger gets the same line of each sample, in the order given. Raises ValueError if `buffer_bytes` cannot
        hold PIECES rows.
        """
        os.makedirs(output, exist_ok=True)
        self._output, self._form, self._boundaries, self._hidden = output, form, tuple(boundaries), hidden
        self._dtype, self._ledgers, self._metadata = dtype, tuple(ledgers), metadata
        self._fp8 = dtype == torch.float8_e4m3fn
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.row_bytes = len(self._boundaries) * hidden * dtype.itemsize
        if buffer_bytes < PIECES * self.row_bytes:
            raise ValueError(
                f"buffer_bytes {buffer_bytes} is less than {PIECES:,} tokens of {self.row_bytes:,} bytes"
            )
        self.pool = BufferPool(buffer_bytes)
        # Whole and at once: too little memory shows at load, and no step waits for pages to be pinned.
        self._memory = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        self._piece_rows = buffer_bytes // PIECES // self.row_bytes
        prepare_for_threads()
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="ctl-writer")
        self._futures: deque[Future[None]] = deque()
        self._deferred: deque[int] = deque()  # also filled by writers

    def open(
        self, index: int, token_ids: list[int], loss_spans: list[list[int]] | None, record_id: str | None = None
    ) -> Buffer | None:
        """Return a buffer for a sample; None if there is no room for it: it is deferred.

        Raises the error of a failed write.
        """
        tokens, size = len(token_ids), len(token_ids) * self.row_bytes
        streamed = is_streamed(size, self.pool.limit)
        place = None if streamed else self.pool.acquire(size, self.check)
        if not streamed and place is None:
            self._deferred.append(index)
            return None
        pinned = self._stream is not None
        return Buffer(
            index=index,
            token_ids=array("q", token_ids).tobytes(),
            loss_spans=loss_spans,
            record_id=record_id,
            hidden=None if place is None else self._rows_at(place, tokens),
            place=place,
            spill=self._spill(index, tokens) if streamed else None,
            statistics=torch.empty(
                (tokens, len(self._boundaries), STATISTICS), dtype=torch.float32, pin_memory=pinned
            ),
            started=time.monotonic(),
            scales=torch.empty(tokens, dtype=torch.float32, pin_memory=pinned) if self._fp8 else None,
        )

    def block(self, states: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the rows of `spans` (row, count), one after another, as [rows, states, hidden] in store dtype.

        With fp8 in the model's own dtype: `copy` quantises, once it has measured. Every row is copied once, and spans
        that follow one another together: the engine's own stream runs no other kernel for the store.
        """
        first = states[0]
        dtype, rows = first.dtype if self._fp8 else self._dtype, sum(count for _, count in spans)
        block = torch.empty((rows, len(states), self._hidden), dtype=dtype, device=first.device)
        done = 0
        for row, count in _joined(spans):
            for place, state in enumerate(states):
                block[done : done + count, place].copy_(state[row : row + count])
            done += count
        return block

    def copy(self, block: torch.Tensor, parts: Sequence[tuple[Buffer, int, int]]) -> list[Buffer]:
        """Copy consecutive rows of `block` into (buffer, first position, count) parts, with their statistics.

        Return the buffers that had to be deferred; they are discarded already.
        """
        if self._stream is None:
            return self._measured_copy(block, parts)
        self._stream.wait_stream(torch.cuda.current_stream())
        block.record_stream(self._stream)  # its memory must not be reused before the copy
        with torch.cuda.stream(self._stream):
            deferred = self._measured_copy(block, parts)
            done = self._recorded()
        for buffer, _, _ in parts:
            buffer.copied = done
        return deferred

    def finish(self, buffer: Buffer) -> None:
        """Hand a filled buffer to the writers."""
        if buffer.hidden is not None:
            self.pool.writing()
        self._submit(self._write, buffer)

    def discard(self, buffer: Buffer) -> None:
        """Forget a sample that starts again, or is given up."""
        buffer.wanted = False
        if buffer.place is not None:
            self.pool.release(buffer.place, written=False)
        else:
            self._submit(self._drop, buffer)

    def check(self) -> None:
        """Raise the first error of a writer, if there was one; never waits."""
        while self._futures and self._futures[0].done():
            self._futures.popleft().result()
        for future in self._futures:
            if future.done():
                future.result()

    def status(self) -> dict[str, Any]:
        """Return {"writing": samples handed over, "stalled": why or None, "deferred": indexes since the last call}.

        Raises the error of a failed write; never waits.
        """
        self.check()
        deferred = [self._deferred.popleft() for _ in range(len(self._deferred))]
        return {"writing": len(self._futures), "stalled": self.pool.stalled, "deferred": deferred}

    def drain(self) -> None:
        """Wait until every sample handed over is on disk and in the ledger. Raises the error of a failed write."""
        while self._futures:
            self._futures.popleft().result()

    # ---------------------------------------------------------------------------------- inside

    def _spill(self, index: int, tokens: int) -> Spill:
        states = len(self._boundaries)
        return Spill(self._output, self._form, index, tokens, states, self.row_bytes // states)

    def _rows_at(self, place: int, tokens: int) -> torch.Tensor:
        """Return the pool's memory from `place` on as [tokens, states, hidden] in store dtype."""
        rows = self._memory[place : place + tokens * self.row_bytes].view(self._dtype)
        return rows.view(tokens, len(self._boundaries), self._hidden)

    def _recorded(self) -> Any:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _measured_copy(self, block: torch.Tensor, parts: Sequence[tuple[Buffer, int, int]]) -> list[Buffer]:
        """Measure, quantise and copy, all on the current stream, to which what is made here belongs."""
        statistics = measure(block)
        if not self._fp8:
            return self._copy(block, statistics, None, parts)
        values, scales = to_fp8(block)
        return self._copy(values, statistics, scales, parts)

    def _copy(
        self,
        block: torch.Tensor,
        statistics: torch.Tensor,
        scales: torch.Tensor | None,
        parts: Sequence[tuple[Buffer, int, int]],
    ) -> list[Buffer]:
        deferred, row = [], 0
        for buffer, start, count in parts:
            rows = block[row : row + count]
            if buffer.hidden is not None:
                buffer.hidden[start : start + count].copy_(rows, non_blocking=True)
            elif not self._stream_rows(buffer, start, rows):
                self._deferred.append(buffer.index)
                self.discard(buffer)
                deferred.append(buffer)
            buffer.statistics[start : start + count].copy_(statistics[row : row + count], non_blocking=True)
            if scales is not None and buffer.scales is not None:
                buffer.scales[start : start + count].copy_(scales[row : row + count], non_blocking=True)
            row += count
        return deferred

    def _stream_rows(self, buffer: Buffer, start: int, rows: torch.Tensor) -> bool:
        """Hand rows to the writers in pieces; False if there was no room for one."""
        for first in range(0, len(rows), self._piece_rows):
            part = rows[first : first + self._piece_rows]
            place = self.pool.acquire(part.nbytes, self.check)
            if place is None:
                return False
            piece = self._rows_at(place, len(part))
            piece.copy_(part, non_blocking=True)
            self.pool.writing()
            buffer.writes.append(
                self._submit(self._write_piece, buffer, start + first, piece, place, self._recorded())
            )
        return True

    def _submit(self, task: Callable[..., None], *arguments: Any) -> Future[None]:
        future = self._threads.submit(task, *arguments)
        self._futures.append(future)
        return future

    def _write_piece(self, buffer: Buffer, start: int, piece: torch.Tensor, place: int, copied: Any) -> None:
        spill = buffer.spill
        assert spill is not None
        try:
            if copied is not None:
                copied.synchronize()
            for plane, (first, last) in enumerate(spill.planes):
                rows = piece[:, first:last].contiguous()
                if buffer.wanted:
                    self.pool.patiently(partial(spill.write, plane, start, _bytes_of(rows)), lambda: buffer.wanted)
        except Abandoned:
            pass  # reported as deferred by whoever gave it up
        finally:
            self.pool.release(place, written=True)

    def _drop(self, buffer: Buffer) -> None:
        assert buffer.spill is not None
        for write in buffer.writes:  # they were submitted earlier, so some thread is at work on them
            write.result()
        buffer.spill.close()

    def _write(self, buffer: Buffer) -> None:
        try:
            for write in buffer.writes:
                write.result()
            if buffer.copied is not None:
                buffer.copied.synchronize()
            states = summarize_states(self._boundaries, buffer.statistics)
            digest = token_digest(buffer.token_ids)
            name = self._form.file_name(buffer.index)
            size, sha256 = self._publish(
                buffer, os.path.join(self._output, name), self._describe(buffer, states, digest)
            )
            record = {
                "index": buffer.index, "file": name, "tokens": buffer.tokens, "bytes": size, "sha256": sha256,
                "token_sha256": digest, "states": states, "seconds": round(time.monotonic() - buffer.started, 6),
                "t": round(time.time(), 3),
            }  # fmt: skip
            record = named(record, buffer.record_id)
            for ledger in self._ledgers:
                self.pool.patiently(lambda ledger=ledger: ledger.append(record))  # type: ignore[misc]  # bound early
        except Abandoned:
            self._deferred.append(buffer.index)
        finally:
            if buffer.place is not None:
                self.pool.release(buffer.place, written=True)

    def _describe(self, buffer: Buffer, states: list[dict[str, Any]], digest: str) -> SampleData:
        return SampleData(
            token_ids=buffer.token_ids,
            loss_mask=mask_of_spans(buffer.loss_spans, buffer.tokens),
            hidden=_bytes_of(buffer.hidden) if buffer.hidden is not None else memoryview(b""),
            shape=(buffer.tokens, len(self._boundaries), self._hidden),
            dtype=DTYPE_NAMES[self._dtype],
            scales=_bytes_of(buffer.scales) if buffer.scales is not None else None,
            metadata=self._metadata(buffer, states, digest),
        )

    def _publish(self, buffer: Buffer, path: str, data: SampleData) -> tuple[int, str]:
        if buffer.spill is not None:
            spill = buffer.spill
            try:
                return self.pool.patiently(lambda: spill.publish(path, data))
            finally:
                spill.close()

        def write(sink: Sink) -> None:
            self._form.write(data, sink)

        return self.pool.patiently(lambda: publish(path, write))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same rows as fewer (row, count), in the same order."""
    joined: list[tuple[int, int]] = []
    for row, count in spans:
        if joined and sum(joined[-1]) == row:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((row, count))
    return joined


def prepare_for_threads() -> None:
    """Let torch rebuild its CPU thread pool now, in one thread; call it before threads use torch.

    A forked process, as vLLM's workers are, has a pool whose threads are gone. Each thread's first operation replaces
    it, without a lock: two at once find none ("Invalid thread pool!", aten/src/ATen/ParallelOpenMP.cpp).
    """
    torch.set_num_threads(torch.get_num_threads())


def is_streamed(size: int, buffer_bytes: int) -> bool:
    """Whether a sample of `size` bytes goes to its file in pieces: two that do not must fit the pool."""
    return size > buffer_bytes // 2


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data.cast("B")

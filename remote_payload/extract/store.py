"""From states on the device to files: bounded host buffers, a side stream, writer threads.

The engine's thread only enqueues copies. A sample owns one buffer from its first row to its file; buffers come from
torch's pinned-memory cache, so that reuse costs no allocation, and their total is bounded by `BufferBudget`.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from remote_payload.extract.formats import Format, SampleData, Sink, mask_of_spans, publish, token_digest
from remote_payload.extract.quantize import to_fp8
from remote_payload.host.journal import Journal

WRITERS = 4
"""Threads a rank. With 8 ranks, 32 streams: enough for one NVMe array or a parallel file system."""

LARGEST_SAMPLES = 8
"""Buffers are bounded to this many samples of full length: those being written, and as many being filled."""

BUDGET_FLOOR, BUDGET_CEILING = 256 << 20, 4 << 30
"""Bytes a rank. The ceiling keeps 8 ranks below 32 GiB of pinned host memory."""

DTYPE_NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
"""safetensors' names."""

STATISTICS = 4  # norm, NaN count, Inf count, whether the row is zero


@dataclass(slots=True, kw_only=True, eq=False)
class Buffer:
    """A sample under way: `hidden` [tokens, states, hidden] in store dtype, `statistics` [tokens, states, 4] fp32."""

    index: int
    token_ids: bytes
    loss_spans: list[list[int]] | None
    hidden: torch.Tensor
    statistics: torch.Tensor
    started: float  # time.monotonic()
    scales: torch.Tensor | None = None  # fp32 [tokens], with fp8
    copied: Any = None  # a CUDA event after the last copy


class BufferBudget:
    """Bounds the bytes of all buffers, without ever deadlocking.

    Half-filled samples hold buffers until later steps complete them, so waiting is only right while a writer is
    about to free one; otherwise the bound is exceeded.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._writing = 0
        self._changed = threading.Condition()

    def acquire(self, size: int, check: Callable[[], None]) -> None:
        """Wait for room. `check` runs about once a second meanwhile and may raise."""
        with self._changed:
            while self._used + size > self._limit and self._writing:
                self._changed.wait(1.0)
                check()
            self._used += size

    def writing(self) -> None:
        with self._changed:
            self._writing += 1

    def release(self, size: int, *, written: bool) -> None:
        with self._changed:
            self._used -= size
            self._writing -= written
            self._changed.notify_all()


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
        max_tokens: int,
        ledger: Journal,
        metadata: Callable[[Buffer, list[dict[str, Any]], str], dict[str, str]],
    ) -> None:
        """`metadata` makes a file's own description from buffer, per-state statistics and token digest."""
        os.makedirs(output, exist_ok=True)
        self._output, self._form, self._boundaries, self._hidden = output, form, tuple(boundaries), hidden
        self._dtype, self._ledger, self._metadata = dtype, ledger, metadata
        self._fp8 = dtype == torch.float8_e4m3fn
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        largest = max_tokens * len(self._boundaries) * hidden * dtype.itemsize
        self._budget = BufferBudget(min(max(LARGEST_SAMPLES * largest, BUDGET_FLOOR), BUDGET_CEILING))
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="ctl-writer")
        self._futures: deque[Future[None]] = deque()

    def open(self, index: int, token_ids: list[int], loss_spans: list[list[int]] | None) -> Buffer:
        """Return a buffer for a sample, waiting for room. Raises the error of a failed write."""
        shape = (len(token_ids), len(self._boundaries))
        size = shape[0] * shape[1] * self._hidden * self._dtype.itemsize
        self._budget.acquire(size, self.check)
        pinned = self._stream is not None
        return Buffer(
            index=index,
            token_ids=array("q", token_ids).tobytes(),
            loss_spans=loss_spans,
            hidden=torch.empty((*shape, self._hidden), dtype=self._dtype, pin_memory=pinned),
            statistics=torch.empty((*shape, STATISTICS), dtype=torch.float32, pin_memory=pinned),
            started=time.monotonic(),
            scales=torch.empty(shape[0], dtype=torch.float32, pin_memory=pinned) if self._fp8 else None,
        )

    def block(self, states: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the rows of `spans` (row, count), one after another, as [rows, states, hidden] in store dtype.

        With fp8 in the model's own dtype: `copy` quantises, once it has measured.
        """
        picked = [torch.cat([state[row : row + count] for row, count in spans]) for state in states]
        return torch.stack([rows if self._fp8 else rows.to(self._dtype) for rows in picked], dim=1)

    def copy(self, block: torch.Tensor, parts: Sequence[tuple[Buffer, int, int]]) -> None:
        """Copy consecutive rows of `block` into (buffer, first position, count) parts, with their statistics."""
        statistics = measure(block)
        scales = None
        if self._fp8:
            block, scales = to_fp8(block)
        if self._stream is None:
            self._copy(block, statistics, scales, parts)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(block, statistics, scales, parts)
            done = torch.cuda.Event()
            done.record(self._stream)
        for tensor in (block, statistics) if scales is None else (block, statistics, scales):
            tensor.record_stream(self._stream)  # their memory must not be reused before the copy
        for buffer, _, _ in parts:
            buffer.copied = done

    @staticmethod
    def _copy(
        block: torch.Tensor,
        statistics: torch.Tensor,
        scales: torch.Tensor | None,
        parts: Sequence[tuple[Buffer, int, int]],
    ) -> None:
        row = 0
        for buffer, start, count in parts:
            buffer.hidden[start : start + count].copy_(block[row : row + count], non_blocking=True)
            buffer.statistics[start : start + count].copy_(statistics[row : row + count], non_blocking=True)
            if scales is not None and buffer.scales is not None:
                buffer.scales[start : start + count].copy_(scales[row : row + count], non_blocking=True)
            row += count

    def finish(self, buffer: Buffer) -> None:
        """Hand a filled buffer to the writers."""
        self._budget.writing()
        self._futures.append(self._pool.submit(self._write, buffer))

    def discard(self, buffer: Buffer) -> None:
        """Forget a sample that starts again."""
        self._budget.release(buffer.hidden.nbytes, written=False)

    def check(self) -> None:
        """Raise the first error of a writer, if there was one; never waits."""
        while self._futures and self._futures[0].done():
            self._futures.popleft().result()
        for future in self._futures:
            if future.done():
                future.result()

    def drain(self) -> None:
        """Wait until every sample handed over is on disk and in the ledger. Raises the error of a failed write."""
        while self._futures:
            self._futures.popleft().result()

    def _write(self, buffer: Buffer) -> None:
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            states = summarize_states(self._boundaries, buffer.statistics)
            digest = token_digest(buffer.token_ids)
            data = SampleData(
                token_ids=buffer.token_ids,
                loss_mask=mask_of_spans(buffer.loss_spans, buffer.hidden.shape[0]),
                hidden=buffer.hidden.view(torch.uint8).numpy().data.cast("B"),
                shape=(buffer.hidden.shape[0], len(self._boundaries), self._hidden),
                dtype=DTYPE_NAMES[self._dtype],
                scales=buffer.scales.numpy().data.cast("B") if buffer.scales is not None else None,
                metadata=self._metadata(buffer, states, digest),
            )
            name = self._form.file_name(buffer.index)

            def write(sink: Sink) -> None:
                self._form.write(data, sink)

            size, sha256 = publish(os.path.join(self._output, name), write)
            self._ledger.append(
                {
                    "index": buffer.index, "file": name, "tokens": data.shape[0], "bytes": size, "sha256": sha256,
                    "token_sha256": digest, "states": states,
                    "seconds": round(time.monotonic() - buffer.started, 6),
                }
            )  # fmt: skip
        finally:
            self._budget.release(buffer.hidden.nbytes, written=True)


def measure(block: torch.Tensor) -> torch.Tensor:
    """Return, on the block's device, fp32 [rows, states, 4]: L2 norm, NaN count, Inf count, 1.0 for a zero row."""
    norm = torch.linalg.vector_norm(block, dim=-1, dtype=torch.float32)
    nan = block.isnan().sum(-1, dtype=torch.float32)
    inf = block.isinf().sum(-1, dtype=torch.float32)
    zero = (~block.any(-1)).float()
    return torch.stack([norm, nan, inf, zero], dim=-1)


def summarize_states(boundaries: Sequence[int], statistics: torch.Tensor) -> list[dict[str, Any]]:
    """Return the ledger's per-state figures; norms are over the rows where they are finite, None if there is none."""
    figures = []
    for place, boundary in enumerate(boundaries):
        norm, nan, inf, zero = statistics[:, place].unbind(-1)
        finite = norm[norm.isfinite()]
        figures.append(
            {
                "boundary": boundary,
                "norm_mean": float(finite.mean()) if len(finite) else None,
                "norm_max": float(finite.max()) if len(finite) else None,
                "nan": int(nan.sum()),
                "inf": int(inf.sum()),
                "zero_rows": int(zero.sum()),
            }
        )
    return figures

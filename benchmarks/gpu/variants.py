"""The product's worker with parts of its work left out or altered between rounds, and a clock on each part."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from remote_payload.extract import formats, store
from remote_payload.extract.worker import CaptureWorker


class _NoDigest:
    """Takes sha256's place: what hashing costs is the difference."""

    def __init__(self, data: bytes = b"") -> None: ...

    def update(self, data: Any) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 64


class _NoHash:
    sha256 = _NoDigest


def _no_measure(block: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*block.shape[:2], store.STATISTICS), device=block.device)


class VariantWorker(CaptureWorker):
    """Named like the worker that it extends in `worker_cls`; `bench_variant` chooses what is altered."""

    def init_device(self) -> None:
        super().init_device()
        self._seconds: dict[str, float] = defaultdict(float)
        self._profiler: Any = None
        self._left = 0
        self._table = ""
        self._rank0 = False

    def bench_variant(self, names: list[str]) -> None:
        """Names: nohash, nomeasure, nowrite, rank0 (it alone writes), fp8, to=FOLDER; none: as the product."""
        settings = self._settings
        self._settings = dataclasses.replace(settings, store_dtype="fp8" if "fp8" in names else settings.store_dtype)
        self._store = self._make_store(self.model_config.get_hidden_size())
        self._settings = settings
        self._clock_store()
        for name in names:
            if name.startswith("to="):
                self._store._output = name.removeprefix("to=")
        self._rank0 = "rank0" in names
        formats.hashlib = _NoHash if "nohash" in names else hashlib
        store.measure = _no_measure if "nomeasure" in names else MEASURE
        store.publish = _no_publish if "nowrite" in names else PUBLISH
        self._seconds.clear()

    def bench_seconds(self) -> dict[str, float]:
        """Return the seconds of the engine's thread by part, since the variant was chosen."""
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    def bench_memory(self) -> dict[str, int]:
        """Return bytes: torch's on the GPU now, at the peak since the last call, and reserved; and our RSS."""
        torch.cuda.synchronize()
        found = {
            "allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(), "rss": resident_bytes(), "pool_peak": self._store.pool.peak,
        }  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        return found

    def bench_profile(self, steps: int) -> None:
        """Profile the next steps."""
        self._left = steps
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        )
        self._profiler.start()

    def bench_table(self) -> str:
        """Return the profiled steps: where the GPU's time went, and how much of it no kernel ran."""
        return self._table

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._timed("execute_model", super().execute_model, scheduler_output, *args, **kwargs)
        if self._left and scheduler_output.total_num_scheduled_tokens:
            self._left -= 1
            if not self._left:
                torch.cuda.synchronize()
                self._profiler.stop()
                self._table = _describe(self._profiler)
        return output

    def _keep_samples(self, *args: Any) -> None:
        self._timed("keep", super()._keep_samples, *args)

    def _is_mine(self, request: Any) -> bool:
        return (self.rank == 0 and not request.probe) if self._rank0 else super()._is_mine(request)

    def ctl_status(self) -> dict[str, Any]:
        status = super().ctl_status()
        if self._rank0 and self.rank:
            status["writing"] = 1  # rank 0 has this rank's samples, and nobody may call them lost
        return status

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._clock_store()

    def _clock_store(self) -> None:
        methods = [(self._store, name) for name in ("open", "block", "copy", "finish", "check")]
        for owner, name in (*methods, (self._store.pool, "acquire")):  # acquire: waiting for the disk
            method = getattr(owner, name)
            setattr(owner, name, lambda *a, _n=name, _m=method: self._timed(_n, _m, *a))

    def _timed(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            self._seconds[name] += time.monotonic() - started


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


MEASURE, PUBLISH = store.measure, store.publish


def _no_publish(path: str, write: Any) -> tuple[int, str]:
    return 0, "0" * 64


def _describe(profiler: Any) -> str:
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    table = str(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))
    if not kernels:
        return table
    first, last = kernels[0][0], max(end for _, end, _ in kernels)
    busy, until = 0.0, first
    gaps = []
    for start, end, name in kernels:
        if name.startswith("Memcpy DtoH"):
            continue
        if start > until:
            gaps.append((start - until, name))
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    longest = "\n".join(f"  {gap / 1e3:8.3f} ms before {name[:90]}" for gap, name in sorted(gaps)[-12:][::-1])
    return f"wall {(last - first) / 1e3:.1f} ms, a kernel ran {busy / 1e3:.1f} ms; longest gaps:\n{longest}\n{table}"

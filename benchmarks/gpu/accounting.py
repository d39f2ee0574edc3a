"""Workers that count their process's GPU memory at each stage of their life: vLLM's own, and the product's."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from bench import gpu_mib_below
from vllm.platforms import current_platform

from remote_payload.extract import versions
from remote_payload.extract.worker import CaptureWorker

Base: Any = versions.worker_class(current_platform.is_cpu())


class Account(Base):
    """Records after each stage of the load; `bench_account` adds the present."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stages: dict[str, dict[str, int]] = {}
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        self._count("device")

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._count("model")

    def determine_available_memory(self) -> Any:
        found = super().determine_available_memory()
        self._count("trial step")
        return found

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        self._count("cache")

    def compile_or_warm_up_model(self) -> Any:
        found = super().compile_or_warm_up_model()
        self._count("warm-up")
        return found

    def bench_account(self) -> dict[str, Any]:
        """Return bytes by stage, "now" the last, and how many segments of each size (bytes) the allocator holds."""
        self._count("now")
        segments = Counter(str(segment["total_size"]) for segment in torch.cuda.memory_snapshot())
        return {"stages": self._stages, "segments": dict(segments)}

    def _count(self, stage: str) -> None:
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        process = gpu_mib_below(os.getpid()) << 20
        self._stages[stage] = {
            "allocated": allocated, "kept": reserved - allocated, "beyond": process - reserved, "process": process,
        }  # fmt: skip


class PlainAccount(Account):
    """vLLM's own worker."""


class CaptureAccount(Account, CaptureWorker):
    """The product's worker."""

    def _make_store(self, hidden: int) -> Any:
        self._count("before the store")
        store = super()._make_store(hidden)
        self._count("store")
        return store

    def _keep_samples(self, *args: Any) -> None:
        first = "first captured step" not in self._stages
        if first:
            self._count("first step, uncaptured")
        super()._keep_samples(*args)
        if first:
            self._count("first captured step")

"""A console to print on, and the summary of a run that failed its proof."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from support.recorded import RUN


class Paper:
    """A console of 80 columns that is no terminal, and what was written on it."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self._raw = io.BytesIO()
        self._encoding = encoding
        file = io.TextIOWrapper(self._raw, encoding=encoding, write_through=True)
        self.console = Console(file=file, width=80, highlight=False)

    @property
    def text(self) -> str:
        return self._raw.getvalue().decode(self._encoding)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.text.splitlines()]


SUMMARY: dict[str, Any] = {
    "schema_version": 1,
    "run_id": RUN,
    "end_reason": "verify-failed",
    "hosts": ["gpu-host-1"],
    "samples": {"expected": 1000, "written": 990, "skipped": 2, "failed": 1, "missing": [4, 5, 6, 7, 8, 9, 10]},
    "tokens": 730_000,
    "bytes": 41 * 2**30,
    "tokens_per_s": 5371.2,
    "bytes_per_s": 3e8,
    "shape": {"hidden": 7168, "states": 4, "dtype": "bfloat16"},
    "format": "speculators",
    "model": "/models/Kimi-K2.5",
    "num_layers": 61,
    "timings": {"push_s": 0.52, "load_s": 511.8},
    "gpus_clean": "unknown",
    "states": [
        {"boundary": 2, "norm_mean": 12.31, "norm_max": 88.1, "nan": 0, "inf": 0, "zero_rows": 0},
        {"boundary": 61, "norm_mean": None, "norm_max": 1880.4, "nan": 3, "inf": 0, "zero_rows": 0},
    ],
}

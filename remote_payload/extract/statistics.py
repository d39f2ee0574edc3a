"""What is measured of every state: on the device, while it is captured, so that no tensor is read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

STATISTICS = 4
"""Figures of a row: norm, NaN count, Inf count, whether it is zero."""


def measure(block: torch.Tensor) -> torch.Tensor:
    """Return, on the block's device, fp32 [rows, states, 4]: L2 norm, NaN count, Inf count, 1.0 for a zero row.

    A row is zero if its norm is, in fp32.
    """
    if block.is_cuda:
        from remote_payload.extract import measure_kernel  # triton is there where a GPU is

        with torch.cuda.device(block.device):  # triton launches on the current device
            return measure_kernel.measure(block.contiguous())
    return measure_by_operations(block)


def measure_by_operations(block: torch.Tensor) -> torch.Tensor:
    """The same on a CPU, and the meaning of each figure.

    Nothing is counted where all norms are finite, for then there is nothing to count, and counting takes 30 times as
    long as the norms.
    """
    norm = torch.linalg.vector_norm(block, dim=-1, dtype=torch.float32)
    figures = torch.zeros((*norm.shape, STATISTICS), dtype=torch.float32, device=block.device)
    figures[..., 0] = norm
    figures[..., 3] = norm == 0
    if not norm.isfinite().all():
        figures[..., 1] = block.isnan().sum(-1)
        figures[..., 2] = block.isinf().sum(-1)
    return figures


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

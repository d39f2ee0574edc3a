"""fp8 storage: e4m3 values and one fp32 scale a token, over all its states together, as hs-connectors has it."""

from __future__ import annotations

import torch

SMALLEST_SCALE = 1e-12
"""A row of zeros has no largest value to divide by."""


def to_fp8(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values of [rows, states, hidden] and fp32 scales [rows]; value * scale is the state again."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    wide = block.float()
    scale = (wide.abs().amax(dim=(1, 2), keepdim=True) / largest).clamp(min=SMALLEST_SCALE)
    return (wide / scale).to(torch.float8_e4m3fn), scale[:, 0, 0]


def from_fp8(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the states [rows, states, hidden] in `dtype`."""
    return (values.float() * scales[:, None, None]).to(dtype)

"""fp8 storage: e4m3 values and one fp32 scale a token, over all its states together, as hs-connectors has it."""

from __future__ import annotations

import torch

SMALLEST_SCALE = 1e-12
"""A row of zeros has no largest value to divide by."""


ROWS = 512
"""Rows quantised at a time: the fp32 copies beside a step's states stay below 200 MB at 4 states of 7,168."""


def to_fp8(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values of [rows, states, hidden] and fp32 scales [rows]; value * scale is the state again."""
    values = torch.empty(block.shape, dtype=torch.float8_e4m3fn, device=block.device)
    scales = torch.empty(block.shape[0], dtype=torch.float32, device=block.device)
    largest = torch.finfo(torch.float8_e4m3fn).max
    for start in range(0, block.shape[0], ROWS):
        piece = block[start : start + ROWS].float()
        scale = (piece.abs().amax(dim=(1, 2)) / largest).clamp(min=SMALLEST_SCALE)
        values[start : start + ROWS] = (piece / scale[:, None, None]).to(torch.float8_e4m3fn)
        scales[start : start + ROWS] = scale
    return values, scales

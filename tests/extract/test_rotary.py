"""The corrected call of vLLM's rotary kernel on a CPU."""

from __future__ import annotations

import pytest
import torch

from remote_payload.extract.rotary import flattened

ROTARY, LATENT = 4, 6


def double(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None) -> None:
    """Stand in for the kernel: in place, and only for 2-D tensors."""
    assert query.dim() == 2
    query.mul_(2)
    if key is not None:
        assert key.dim() == 2
        key.mul_(2)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_slices_are_rotated_in_place_whatever_the_number_of_tokens(tokens: int) -> None:
    # As MLA passes them: the rotary parts of wider tensors, the key without a dimension of heads in memory.
    queries, compressed = torch.ones(tokens, 2, LATENT + ROTARY), torch.ones(tokens, LATENT + ROTARY)
    query, key = queries[..., LATENT:], compressed[:, LATENT:].unsqueeze(1)
    flattened(double)(torch.arange(tokens), query, key)
    assert query.eq(2).all()
    assert key.eq(2).all()
    assert queries[..., :LATENT].eq(1).all()
    assert compressed[:, :LATENT].eq(1).all()
    flattened(double)(torch.arange(tokens), query, None)
    assert query.eq(4).all()

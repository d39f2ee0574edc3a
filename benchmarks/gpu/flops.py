"""How many operations a prefill takes, so that its speed can be held against the chip's matrix rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def prefill_flops(config: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> float:
    """Return the floating-point operations of a prefill: two a weight that a token passes, and attention's products.

    Causal attention of n tokens takes n(n+1)/2 scores a head, each a product over the width of queries and one over
    that of values. Norms, softmax, router and embedding are left out; the output projection counts once a prompt.
    """
    hidden, heads, layers = (config[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if config.get("kv_lora_rank"):
        latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        query, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
        attention = (
            hidden * config["q_lora_rank"] + config["q_lora_rank"] * heads * query + hidden * (latent + rope)
            + latent * heads * (config["qk_nope_head_dim"] + value) + heads * value * hidden
        )  # fmt: skip
    else:
        query = value = config["head_dim"]
        attention = hidden * query * 2 * (heads + config["num_key_value_heads"])
    dense = config.get("first_k_dense_replace", layers) if config.get("n_routed_experts") else layers
    experts = config.get("num_experts_per_tok", 0) + config.get("n_shared_experts", 0)
    feed_forward = dense * config["intermediate_size"] + (layers - dense) * experts * config.get(
        "moe_intermediate_size", 0
    )
    weights = layers * attention + 3 * hidden * feed_forward
    tokens, scores = sum(map(len, prompts)), sum(len(ids) * (len(ids) + 1) / 2 for ids in prompts)
    output = len(prompts) * hidden * config["vocab_size"]
    return 2.0 * (tokens * weights + output) + 2.0 * layers * heads * scores * (query + value)

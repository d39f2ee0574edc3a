"""The model's final norm by itself, read from the checkpoint: what turns the last state before it into that after.

Only for models whose norm is known to be x / rms(x) * weight; of any other nothing is assumed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

from remote_payload.extract.settings import ConfigError

PLAIN_RMS = frozenset(
    {
        "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3",
        "kimi_k2", "gpt_oss", "glm4_moe", "phi3", "olmo3", "minimax_m2",
    }
)  # fmt: skip
"""`model_type` of the text model. Gemma, for one, multiplies by 1 + weight instead."""

NORM_NAME = re.compile(r"(?:^|\.)model\.norm\.weight$")


def load_final_norm(model: str) -> Callable[[Any], Any]:
    """Return a function of [..., hidden] in any float dtype, computed in fp32 as the model does.

    Raises ConfigError if the checkpoint's norm is not of the known kind or cannot be read.
    """
    try:
        with open(os.path.join(model, "config.json"), "rb") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read config.json of the model {model}: {error}") from error
    text = config.get("text_config") or config
    kind, eps = text.get("model_type"), text.get("rms_norm_eps")
    if kind not in PLAIN_RMS or not isinstance(eps, float | int):
        raise ConfigError(
            f"the final norm of a {kind} model is not known to be a plain RMS norm: extract with final_norm = true"
        )
    weight = _weight(model)

    def norm(states: Any) -> Any:
        wide = states.float()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * scale * weight).to(states.dtype)

    return norm


def _weight(model: str) -> Any:
    from safetensors import safe_open

    shards = sorted(name for name in os.listdir(model) if name.endswith(".safetensors"))
    index = os.path.join(model, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, "rb") as file:
            places = json.load(file)["weight_map"]
        shards = sorted({place for name, place in places.items() if NORM_NAME.search(name)})
    found = []
    for shard in shards:
        with safe_open(os.path.join(model, shard), framework="pt") as file:
            found += [file.get_tensor(name) for name in file.keys() if NORM_NAME.search(name)]  # noqa: SIM118
    if len(found) != 1:
        raise ConfigError(f"{model} has {len(found)} tensors named model.norm.weight: one was expected")
    return found[0].float()

"""States by transformers: forward hooks on its own decoder layers, one prompt at a time, in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def load(folder: Path, scratch: Path) -> Any:
    """Return the text model of a tiny model's folder; Kimi's is taken out of its wrapper first."""
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        prefix = "language_model."
        weights = load_file(folder / "model.safetensors")
        text = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        scratch.mkdir(parents=True, exist_ok=True)
        save_file(text, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps({**config["text_config"], "model_type": "deepseek_v3"}))
        folder = scratch
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    scaling = config.get("llama_4_scaling")
    if scaling:
        _scale_queries(model, scaling["original_max_position_embeddings"], scaling["beta"])
    return model


def _scale_queries(model: Any, original: int, beta: float) -> None:
    """Multiply each query by 1 + beta * log(1 + floor(position / original)); rotation is linear, so before it."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(output.shape[1])
        return output * (1 + beta * torch.log(1 + torch.floor(positions / original)))[None, :, None]

    for layer in model.model.layers:
        layer.self_attn.q_b_proj.register_forward_hook(hook)


@torch.inference_mode()
def states(model: Any, token_ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the states at boundaries 0..N, each [tokens, hidden], and the last one after the final norm."""
    found: list[torch.Tensor] = []

    def hook(module: Any, args: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    modules = [model.model.embed_tokens, *model.model.layers, model.model.norm]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        model(input_ids=torch.tensor([token_ids]))
    finally:
        for handle in handles:
            handle.remove()
    return found[:-1], found[-1]


def relative_error(state: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest relative L2 error of any token; tensors are [tokens, hidden]."""
    return float(((state.float() - reference).norm(dim=-1) / reference.norm(dim=-1)).max())

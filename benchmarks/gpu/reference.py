"""transformers' layers on the captured states: what each layer should have made of the state before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from bench import MODELS, ROOT
from safetensors.torch import load_file


class Reference:
    """transformers' model of one checkpoint, in bf16 on the GPU."""

    def __init__(self, name: str) -> None:
        self._model = _load(name)
        self._outputs: list[torch.Tensor] = []
        self._choices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._given: torch.Tensor | None = None
        layers = self._model.model.layers
        for number, layer in enumerate(layers, start=1):
            layer.register_forward_pre_hook(self._feed(number), with_kwargs=True)
            layer.register_forward_hook(self._keep)
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._route(number))

    def run(self, prompt: Sequence[int], given: torch.Tensor | None = None) -> tuple[list[torch.Tensor], Any]:
        """Return the states after each layer, [tokens, hidden] in fp32, and layer -> (margins, experts chosen).

        A margin is the least gap between a router score (0 to 1) that was chosen and one that was not.

        With `given` [tokens, layers, hidden], each layer but the first reads the given state of the one before, so
        that rounding does not add up: what is returned is off by one layer's rounding only.
        """
        self._outputs, self._choices, self._given = [], {}, given
        with torch.inference_mode():
            self._model.model(input_ids=torch.tensor([list(prompt)], device="cuda"))
        return self._outputs, self._choices

    def _feed(self, number: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            if self._given is None or number == 1:
                return None
            state = self._given[:, number - 2].to("cuda", torch.bfloat16)[None]
            return (state, *args[1:]), {k: v for k, v in kwargs.items() if k != "hidden_states"}

        return hook

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        self._outputs.append((output[0] if isinstance(output, tuple) else output)[0].float().cpu())

    def _route(self, number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            margin, experts = _choice(module, args[0], self._model.config)
            self._choices[number] = margin.cpu(), experts.cpu()

        return hook


def _load(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    folder = MODELS / name
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        text = ROOT / "right" / f"{name}-text"
        if not text.exists():
            from safetensors.torch import save_file

            prefix = "language_model."
            weights = load_file(folder / "model.safetensors")
            text.mkdir(parents=True)
            save_file(
                {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)},
                text / "model.safetensors", metadata={"format": "pt"},
            )  # fmt: skip
            inner = {**config["text_config"], "model_type": "deepseek_v3"}
            (text / "config.json").write_text(json.dumps(inner))
        folder = text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    return model.eval().to("cuda")


def _choice(gate: Any, hidden: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each token, the margin of its choice, and the experts chosen [tokens, top k], sorted."""
    rows = hidden.reshape(-1, hidden.shape[-1]).float()
    scores = torch.sigmoid(rows @ gate.weight.float().T) + gate.e_score_correction_bias.float()
    groups, kept, top = config.n_group, config.topk_group, config.num_experts_per_tok
    margin = torch.full((rows.shape[0],), float("inf"), device=rows.device)
    if groups > kept:
        grouped = scores.view(rows.shape[0], groups, -1)
        ranked, order = grouped.topk(2, dim=-1)[0].sum(-1).sort(descending=True)
        margin = ranked[:, kept - 1] - ranked[:, kept]
        mask = torch.zeros_like(ranked).scatter_(1, order[:, :kept], 1.0)
        scores = torch.where(mask[:, :, None].bool(), grouped, -1e9).view(rows.shape[0], -1)
    best, experts = scores.topk(top + 1, dim=-1)
    return torch.minimum(margin, best[:, top - 1] - best[:, top]), experts[:, :top].sort(dim=-1)[0]

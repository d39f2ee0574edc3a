"""Is it right: captured states against transformers, and against each other by every path, in bf16 on the GPU.

    python right.py            one GPU: qwen3, deepseek and kimi, several engines at once
    python right.py --tp 2     the same models on one GPU and on two

Each engine is a run of the product's own job (`remote_payload.extract.engine`), which stores the state after every
layer. transformers' layers are run on the captured state of the layer before, so that a difference is one layer's
own, and its cosine must exceed 0.999. Below it may be only rows of MoE layers where rounding to bf16 chose another
expert: the margin by which transformers chose is given for them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from bench import DATA, HOST_ENV, MODELS, OUT, ROOT, print_table, write_result
from safetensors.torch import load_file, safe_open
from support.extraction import Run, execute, make_run

COSINE = 0.999
LAYERS = 8  # of the models; the state after each is captured
AT_ONCE = 8  # engines; each takes about 8 GB of the GPU and two cores while it loads
KV_BYTES = 2 << 30
CHUNK = 512  # tokens a step: prompts are batched and the longer ones cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine. `engine` and `env` are added to the common arguments."""

    model: str
    name: str
    capture: str = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


V1, V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
EAGER = {"enforce_eager": True}
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 2048}
WHOLE = {"max_num_batched_tokens": 16384}
ONE_GPU = (
    Variant(model="qwen3-truth", name="auto-compiled"),
    Variant(model="deepseek-truth", name="auto-compiled"),
    Variant(model="kimi-truth", name="auto-compiled"),
    Variant(model="qwen3-truth", name="hooks", capture="hooks"),
    Variant(model="deepseek-truth", name="hooks", capture="hooks"),
    Variant(model="kimi-truth", name="hooks", capture="hooks"),
    Variant(model="qwen3-truth", name="native-eager", capture="native", engine=EAGER),
    Variant(model="qwen3-truth", name="hooks-v1", capture="hooks", env=V1),
    Variant(model="deepseek-truth", name="hooks-v2", capture="hooks", env=V2),
    Variant(model="kimi-truth", name="hooks-v2", capture="hooks", env=V2),
    # On its own V2 runner vLLM 0.24 fails in its warm-up with one sequence.
    Variant(model="qwen3-truth", name="hooks-alone", capture="hooks", env=V1, engine=ALONE),
    Variant(model="deepseek-truth", name="hooks-alone", capture="hooks", env=V1, engine=ALONE),
    Variant(model="qwen3-truth", name="hooks-whole", capture="hooks", engine=WHOLE),
    Variant(model="deepseek-truth", name="hooks-whole", capture="hooks", engine=WHOLE),
)  # fmt: skip


def two_gpus(size: int) -> Iterator[Variant]:
    for model in ("qwen3-truth", "deepseek-truth", "kimi-truth"):
        yield Variant(model=model, name="hooks", capture="hooks")
        yield Variant(model=model, name=f"hooks-tp{size}", capture="hooks", engine={"tensor_parallel_size": size})


def start(variant: Variant) -> Run:
    folder = ROOT / "right" / f"{variant.model}-{variant.name}"
    engine = {
        "gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": KV_BYTES, "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 16, **variant.engine,
    }  # fmt: skip
    run = make_run(
        folder, model=str(MODELS / variant.model), data=str(DATA / "truth.jsonl"), dtype="bfloat16",
        trust_remote_code=variant.model.startswith("kimi"), max_seq_len=1024,
        boundaries=list(range(1, LAYERS + 1)), capture=variant.capture,
        engine=engine, accelerator="cuda",
    )  # fmt: skip
    ended = execute(run, "engine", **HOST_ENV, **variant.env)
    log = OUT / "logs" / f"right-{variant.model}-{variant.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(ended.log)
    return ended


class Reference:
    """transformers' model of one checkpoint, in bf16 on the GPU."""

    def __init__(self, name: str) -> None:
        self._model = _load(name)
        self._outputs: list[torch.Tensor] = []
        self._margins: dict[int, torch.Tensor] = {}
        self._given: torch.Tensor | None = None
        layers = self._model.model.layers
        for number, layer in enumerate(layers, start=1):
            layer.register_forward_pre_hook(self._feed(number), with_kwargs=True)
            layer.register_forward_hook(self._keep)
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._route(number))

    def run(self, prompt: Sequence[int], given: torch.Tensor | None = None) -> tuple[list[torch.Tensor], Any]:
        """Return the states after each layer, [tokens, hidden] in fp32, and layer -> margins of expert choices.

        With `given` [tokens, layers, hidden], each layer but the first reads the given state of the one before, so
        that rounding does not add up: what is returned is off by one layer's rounding only.
        """
        self._outputs, self._margins, self._given = [], {}, given
        with torch.inference_mode():
            self._model.model(input_ids=torch.tensor([list(prompt)], device="cuda"))
        return self._outputs, self._margins

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
            self._margins[number] = _margin(module, args[0], self._model.config).cpu()

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


def _margin(gate: Any, hidden: torch.Tensor, config: Any) -> torch.Tensor:
    """Return, for each token, the least gap between a score that was chosen and one that was not."""
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
    best = scores.topk(top + 1, dim=-1)[0]
    return torch.minimum(margin, best[:, top - 1] - best[:, top])


def captured(run: Run) -> tuple[dict[int, torch.Tensor], str]:
    """Return index -> states [tokens, layers, hidden] in fp32, and the capture path."""
    states, path = {}, ""
    for record in run.ledger():
        file = run.output / record["file"]
        with safe_open(file, "pt") as stream:
            path = stream.metadata()["capture_path"]
        states[record["index"]] = load_file(file)["hidden_states"].float()
    return states, path


def cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1)


def against_reference(
    states: Mapping[int, torch.Tensor], prompts: Sequence[Sequence[int]], reference: Reference
) -> dict[str, Any]:
    """Return how near the captured rows are to transformers', layer by layer and from the embeddings on.

    A margin is the least gap between a router score (0 to 1) that was chosen and one that was not.
    """
    layer_cosines, whole_cosines, margins, low_margins, dense = [], [], [], [], []
    for index, sample in states.items():
        outputs, chosen = reference.run(prompts[index], sample)
        for layer, theirs in enumerate(outputs, start=1):
            similar = cosine(sample[:, layer - 1], theirs)
            layer_cosines.append(similar)
            if layer in chosen:
                margins.append(chosen[layer])
                low_margins.append(chosen[layer][similar <= COSINE])
            else:
                dense.append(similar)
        whole, _ = reference.run(prompts[index])
        whole_cosines.extend(cosine(sample[:, place], theirs) for place, theirs in enumerate(whole))
    cosines, low = torch.cat(layer_cosines), torch.cat(low_margins) if low_margins else torch.empty(0)
    every = torch.cat(margins) if margins else None
    return {
        "rows": len(cosines), "layer_cosine_min": round(float(cosines.min()), 6),
        "dense_layer_cosine_min": round(float(torch.cat(dense).min()), 6),
        "rows_below": int((cosines <= COSINE).sum()),
        "below_margin_max": round(float(low.max()), 5) if len(low) else "",
        "margin_median": round(float(every.median()), 5) if every is not None else "",
        "rows_of_such_margin": int((every <= low.max()).sum()) if every is not None and len(low) else "",
        "whole_cosine_median": round(float(torch.cat(whole_cosines).median()), 6),
        "whole_cosine_min": round(float(torch.cat(whole_cosines).min()), 6),
    }  # fmt: skip


def against_each_other(one: Mapping[int, torch.Tensor], other: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    similar = torch.cat([cosine(one[index], other[index]).flatten() for index in one])
    equal = sum(int((one[index] == other[index]).all(-1).sum()) for index in one)
    return {
        "rows": len(similar), "cosine_min": round(float(similar.min()), 6),
        "rows_below": int((similar <= COSINE).sum()), "bitwise_equal": f"{equal / len(similar):.1%}",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1)
    size = parser.parse_args().tp
    variants = ONE_GPU if size == 1 else tuple(two_gpus(size))
    part = "right" if size == 1 else f"right-tp{size}"
    prompts = [json.loads(line)["input_ids"] for line in (DATA / "truth.jsonl").open()]
    with ThreadPoolExecutor(AT_ONCE if size == 1 else 3) as pool:
        runs = list(zip(variants, pool.map(start, variants), strict=True))
    golden: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for model in sorted({variant.model for variant in variants}):
        reference = Reference(model)
        base: dict[int, torch.Tensor] = {}
        mine = [(variant, run) for variant, run in runs if variant.model == model]
        for variant, run in sorted(mine, key=lambda pair: pair[0].name != "hooks"):
            states, path = captured(run)
            row = {"model": model, "engine": variant.name, "exit": run.code, "path": path}
            if run.code != 0 or len(states) != len(prompts):
                golden.append({**row, "error": run.log[-1500:]})
                continue
            golden.append({**row, **against_reference(states, prompts, reference)})
            if base:
                pairs.append({"model": model, "pair": f"{variant.name} / hooks", **against_each_other(states, base)})
            else:
                base = states
            write_result(part, {"command": " ".join(sys.argv), "golden": golden, "pairs": pairs})
    shown = [{k: v for k, v in row.items() if k != "error"} for row in golden]
    print_table("Captured states against transformers, bf16", sorted(shown, key=lambda row: -len(row)))
    print_table("Paths against each other, bf16", pairs)
    return 0 if all(row["exit"] == 0 for row in golden) else 1


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())

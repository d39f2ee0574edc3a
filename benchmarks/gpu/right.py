"""Is it right: captured states against transformers, and against each other by every path, in bf16 on the GPU.

    python right.py            one GPU: qwen3, deepseek and kimi, several engines at once
    python right.py --tp 2     the same models on one GPU and on two; on one alone, see one_gpu.py

Each engine is a run of the product's own job (`remote_payload.extract.engine`), which stores the state after every
layer. transformers' layers are run on the captured state of the layer before, so that a difference is one layer's
own, and its cosine must exceed 0.999. Below it may be only rows of MoE layers where rounding to bf16 chose another
expert: vLLM says which it chose (`enable_return_routed_experts`), and every other row must reach the cosine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import one_gpu
import torch
from bench import DATA, HOST_ENV, MODELS, OUT, ROOT, gpu_count, print_table, write_result
from reference import Reference
from safetensors.torch import load_file, safe_open
from support.extraction import Run, execute_module, make_run

COSINE = 0.999
LAYERS = 8  # of the models; the state after each is captured
AT_ONCE = 8  # engines; each takes about 8 GB of a GPU and two cores a rank while it loads
SHARED_AT_ONCE = 3  # where all ranks of an engine share one GPU
KV_BYTES = 2 << 30
ENGINE = "remote_payload.extract.engine"
CHUNK = 512  # tokens a step: prompts are batched and the longer ones cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine. `engine` and `env` are added to the common arguments."""

    model: str
    name: str
    capture: str = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


ROUTED = {"enable_return_routed_experts": True}
V1, V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
EAGER = {"enforce_eager": True}
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 2048}
WHOLE = {"max_num_batched_tokens": 16384}
ONE_GPU = (
    Variant(model="qwen3-truth", name="auto-compiled"),
    Variant(model="deepseek-truth", name="auto-compiled"),
    Variant(model="kimi-truth", name="auto-compiled"),
    Variant(model="qwen3-truth", name="hooks", capture="hooks"),
    Variant(model="deepseek-truth", name="hooks", capture="hooks", engine=ROUTED),
    Variant(model="kimi-truth", name="hooks", capture="hooks", engine=ROUTED),
    Variant(model="qwen3-truth", name="native-eager", capture="native", engine=EAGER),
    Variant(model="deepseek-truth", name="native-eager", capture="native", engine=EAGER),
    Variant(model="kimi-truth", name="native-eager", capture="native", engine=EAGER),
    Variant(model="qwen3-truth", name="hooks-v1", capture="hooks", env=V1),
    Variant(model="deepseek-truth", name="hooks-v2", capture="hooks", env=V2),
    Variant(model="kimi-truth", name="hooks-v2", capture="hooks", env=V2),
    # On its own V2 runner vLLM 0.24 fails in its warm-up with one sequence.
    Variant(model="qwen3-truth", name="hooks-alone", capture="hooks", env=V1, engine=ALONE),
    Variant(model="deepseek-truth", name="hooks-alone", capture="hooks", env=V1, engine=ALONE),
    Variant(model="qwen3-truth", name="hooks-whole", capture="hooks", engine=WHOLE),
    Variant(model="deepseek-truth", name="hooks-whole", capture="hooks", engine=WHOLE),
)  # fmt: skip


def tensor_parallel(size: int) -> Iterator[Variant]:
    shared = gpu_count() < size
    env = one_gpu.environment(ROOT / "plugins", size) if shared else {}
    engine = {"tensor_parallel_size": size, **(one_gpu.ENGINE if shared else {})}
    name = f"hooks-tp{size}{'-one-gpu' if shared else ''}"
    for model in ("qwen3-truth", "deepseek-truth", "kimi-truth"):
        yield Variant(model=model, name="hooks", capture="hooks")
        yield Variant(model=model, name=name, capture="hooks", engine=engine, env=env)
    experts = {**engine, "enable_expert_parallel": True}
    yield Variant(model="kimi-truth", name=f"{name}-experts", capture="hooks", engine=experts, env=env)


def start(variant: Variant) -> Run:
    folder = ROOT / "right" / f"{variant.model}-{variant.name}"
    shutil.rmtree(folder, ignore_errors=True)  # of another part: the same engine is compared with more than one
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
    module = "routing" if "enable_return_routed_experts" in variant.engine else ENGINE
    ended = execute_module(run, module, **{**HOST_ENV, "PYTHONPATH": os.environ["PYTHONPATH"], **variant.env})
    log = OUT / "logs" / f"right-{variant.model}-{variant.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(ended.log)
    return ended


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
    run: Run, states: Mapping[int, torch.Tensor], prompts: Sequence[Sequence[int]], reference: Reference,
    whole: dict[int, list[torch.Tensor]],
) -> dict[str, Any]:  # fmt: skip
    """Return how near the captured rows are to transformers', layer by layer and from the embeddings on.

    `whole` keeps transformers' own states between calls. "flipped": rows for which vLLM chose other experts.
    """
    routed = np.load(run.folder / "routed.npz") if (run.folder / "routed.npz").exists() else {}
    dense, moe, margins, flipped, whole_cosines = [], [], [], [], []
    for index, sample in states.items():
        outputs, choices = reference.run(prompts[index], sample)
        for layer, theirs in enumerate(outputs, start=1):
            similar = cosine(sample[:, layer - 1], theirs)
            if layer not in choices:
                dense.append(similar)
                continue
            margin, experts = choices[layer]
            moe.append(similar)
            margins.append(margin)
            if routed:
                chosen = torch.from_numpy(routed[str(index)][:, layer - 1].astype("int64")).sort(dim=-1)[0]
                flipped.append((chosen != experts).any(-1))
        if index not in whole:
            whole[index], _ = reference.run(prompts[index])
        whole_cosines.extend(cosine(sample[:, place], theirs) for place, theirs in enumerate(whole[index]))
    found: dict[str, Any] = {
        "rows": sum(map(len, dense + moe)), "dense_layer_cosine_min": least(dense), "moe_rows": sum(map(len, moe)),
    }  # fmt: skip
    if moe:
        similar, margin = torch.cat(moe), torch.cat(margins)
        below = similar <= COSINE
        found |= {
            "rows_below": int(below.sum()), "margin_median": round(float(margin.median()), 5),
            "below_margin_max": round(float(margin[below].max()), 5) if below.any() else "",
        }  # fmt: skip
        if flipped:
            other = torch.cat(flipped)
            found |= {
                "flipped": int(other.sum()), "below_and_flipped": int((below & other).sum()),
                "unflipped_cosine_min": least([similar[~other]]),
                "flipped_margin_max": round(float(margin[other].max()), 5) if other.any() else "",
            }  # fmt: skip
    every = torch.cat(whole_cosines)
    return {**found, "whole_cosine_median": round(float(every.median()), 6), "whole_cosine_min": least([every])}


def least(cosines: Sequence[torch.Tensor]) -> float:
    return round(float(torch.cat(list(cosines)).min()), 6)


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
    parser.add_argument("--only", default="", help="models, separated by commas")
    arguments = parser.parse_args()
    size = arguments.tp
    variants = ONE_GPU if size == 1 else tuple(tensor_parallel(size))
    if arguments.only:
        variants = tuple(variant for variant in variants if variant.model in arguments.only.split(","))
    part = "-".join(filter(None, ("right", f"tp{size}" if size > 1 else "", arguments.only.replace(",", "-"))))
    prompts = [json.loads(line)["input_ids"] for line in (DATA / "truth.jsonl").open()]
    with ThreadPoolExecutor(AT_ONCE if gpu_count() >= size else SHARED_AT_ONCE) as pool:
        runs = list(zip(variants, pool.map(start, variants), strict=True))
    golden: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for model in sorted({variant.model for variant in variants}):
        reference = Reference(model)
        base: dict[int, torch.Tensor] = {}
        whole: dict[int, list[torch.Tensor]] = {}
        mine = [(variant, run) for variant, run in runs if variant.model == model]
        for variant, run in sorted(mine, key=lambda pair: pair[0].name != "hooks"):
            states, path = captured(run)
            row = {"model": model, "engine": variant.name, "exit": run.code, "path": path}
            if run.code != 0 or len(states) != len(prompts):
                golden.append({**row, "error": run.log[-1500:]})
                continue
            golden.append({**row, **against_reference(run, states, prompts, reference, whole)})
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

"""Write docs/compatibility.md from what was read of vLLM's releases, and read releases anew.

python tools/make_compatibility.py                       the page, from tests/data/vllm-capability.json
python tools/make_compatibility.py --read SOURCES_DIR    that file too, from tools/fetch_vllm_sources.py's folders
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from remote_payload.host.capability import read_capability  # noqa: E402 - needs the path above
from remote_payload.host.vllm_source import VllmSource  # noqa: E402
from remote_payload.host.vllm_types import engine_types  # noqa: E402

FACTS = REPOSITORY / "tests" / "data" / "vllm-capability.json"
PAGE = REPOSITORY / "docs" / "compatibility.md"

MODELS: dict[str, dict[str, Any]] = {
    "Kimi-K2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 384},
    },
    "DeepSeek-V3": {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256},
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "Qwen3-MoE": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
    "Llama": {"architectures": ["LlamaForCausalLM"]},
}
"""What of each model's config.json decides over its class."""

TYPED = ("max_num_seqs", "enforce_eager", "gpu_memory_utilization", "dtype", "data_parallel_backend", "quantization")
"""Engine arguments of which the facts keep the types, where a release leaves them no choice."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Something that was done with a release: `date` of the outcome that is kept here, by which command."""

    date: str
    where: str
    command: str
    outcome: str


RUN: dict[str, tuple[Ran, ...]] = {
    "0.24.0": (
        Ran(
            date="2026-11-29",
            where="one H200",
            command="vLLM's own extraction (tests/data/vllm-logs)",
            outcome="DeepSeek-V3: the last boundary is dropped, as read",
        ),
        Ran(
            date="2026-11-30",
            where="one, two and four H200",
            command="`benchmarks/gpu/run.sh right product fast`",
            outcome="in bf16 all are as in transformers but for flipped experts: DeepSeek-V3 and Qwen3 by hooks and "
            "natively, eager and compiled, Kimi-K2.5 by hooks; a whole `ctl extract` at TP=2",
        ),
    ),
    "0.28.0": (
        Ran(
            date="2026-11-30",
            where="CPU, each commit",
            command="`make test`",
            outcome="Qwen3, native and compiled, is as in transformers (1e-5), its canary passes at both ends; every "
            "private name is there; 49 tests, 90 s on a busy machine",
        ),
        Ran(
            date="2026-11-30",
            where="CPU, each night",
            command="`make test-older`, without those of its tests that start an engine in test_captured_formats, "
            "test_long_samples, test_rehearse and test_resume_engine",
            outcome="444 passed and 1 skipped of those without an engine; 35 passed, 21 skipped and 2 failed (a "
            "sliding window in blocks of another size than below) of those with one. Qwen3 (native, and chunked by "
            "hooks), Llama, an int8 Qwen3 and Qwen3-MoE on two ranks are as in transformers (1e-5; int8 within its "
            "precision), every seeded fault stops the canary",
        ),
        Ran(
            date="2026-11-30",
            where="CPU, each night",
            command="`pytest -m engine` of those four files (test_long_samples has no such test), and what is about "
            "a sliding window in test_golden and test_older_vllm",
            outcome="16 of the 19 passed and 3 are skipped, being about MLA (a deep DeepSeek, its `topk_method`, "
            "Kimi's head dimension); in 5 of the 16 Qwen3-MoE stands in for Kimi or DeepSeek. Mistral's sliding "
            "window is as in transformers (1e-5)",
        ),
    ),
    "0.32.0": (
        Ran(
            date="2026-11-30",
            where="CPU, each commit",
            command="`make test`",
            outcome="Kimi-K2.5, DeepSeek-V3, Qwen3, Qwen3-MoE with experts in parallel and Mistral's sliding window "
            "are as in transformers (1e-5); Llama and an int8 Qwen3 each night",
        ),
    ),
}
"""Releases that were run, and with what. All others are only read."""

CANNOT: dict[str, tuple[str, ...]] = {
    "0.28.0": (
        "MLA models (Kimi-K2.5, DeepSeek-V3) do not load on a CPU: this release chooses an MLA prefill backend there "
        "as on a GPU, and importing one fails, since `vllm.v1.attention.backends.fa_utils` defines "
        "`compile_flash_attn_varlen_func_from_specs` on GPUs alone. 0.32 has the same module, and does not import it "
        "on a CPU.",
        "Experts in parallel do not run on a CPU: its kernel routes by itself and cannot be told which experts a "
        "rank holds. The run is refused with that reason.",
        "Models with a sliding window run on a CPU with `block_size = 16` alone, and with it are as in transformers: "
        "they get blocks of 16 whatever is asked for, and the attention kernel that is chosen for any other size "
        "refuses them at the first step (`block_size % attn_impl::BlockSizeAlignment`).",
    ),
}
"""What such a release cannot run; tests/extract/test_older_vllm.py proves each."""

HEAD = """\
# What each vLLM release can capture

Generated by `tools/make_compatibility.py` from the source of the releases, as `ctl preflight` reads it on a host
(`remote_payload/host/capability.py`); do not edit. **Read** means that nothing of the release was run.

- *native*: the boundaries that the class returns by itself. `0` is the embeddings, `N` the last layer before the
  final norm, *inner* what lies between. What is missing is captured with hooks, in eager mode; but where
  `DeepseekV2Model` lacks `N` alone, a layer behind the last makes it native (decision 0122).
- *layer*: the parameters of the decoder layer's `forward`; `?` marks those with a default.
- *runner*: vLLM's model runner on a GPU, if nobody asks for another.
- *missing*: names of vLLM that the capture uses and that are not there, and what needs them.
"""


def read_releases(sources: Path) -> dict[str, Any]:
    """Read every release below `sources`: {version: {"torch", "models", "engine_types"}}.

    `models` is {name: what `read_capability` says}, `engine_types` what is told of the arguments TYPED.
    """
    found = {}
    for site in sorted(sources.iterdir(), key=lambda path: _order(path.name)):
        models = {name: read_capability(str(site), config, "cuda") for name, config in MODELS.items()}
        (metadata,) = site.glob("vllm-*.dist-info/METADATA")
        torch = re.search(r"^Requires-Dist: torch ?\(?==([\d.]+)", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        found[site.name] = {"torch": torch[1] if torch else None, "models": models}
        types = engine_types(VllmSource(str(site)))
        found[site.name]["engine_types"] = {name: types[name] for name in TYPED if name in types}
    return found


def page(releases: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = [HEAD, "| vllm | torch | read or run |", "|---|---|---|"]
    for version in sorted(releases, key=_order):
        lines.append(f"| {version} | {releases[version]['torch']} | {'run' if version in RUN else 'read'} |")
    lines += ["\n## What was run\n", "| vllm | where | command | date | outcome |", "|---|---|---|---|---|"]
    for version in sorted(RUN, key=_order):
        lines += [f"| {version} | {ran.where} | {ran.command} | {ran.date} | {ran.outcome} |" for ran in RUN[version]]
    for version in sorted(CANNOT, key=_order):
        lines += [f"\nWhat {version} cannot, and is skipped with the reason in its tests:\n"]
        lines += [f"- {each}" for each in CANNOT[version]]
    for name in MODELS:
        lines += [
            f"\n## {name}\n",
            "| vllm | class | native | layer | embedding | `llama_4_scaling` | runner | missing |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_row(version, releases[version]["models"][name]) for version in sorted(releases, key=_order)]
    return "\n".join(lines) + "\n"


def _row(version: str, found: Mapping[str, Any]) -> str:
    if found["class"] is None:
        return f"| {version} | none | | | | | | |"
    native = found["native"]
    able = native["method"] and found["runner"]["state"]
    ways = [word for word, key in (("0", "first"), ("inner", "inner"), ("N", "last")) if native[key]] if able else []
    missing = [f"`{each['name'].rpartition('.')[2]}` ({each['need']})" for each in found["missing"]]
    inner = f" over `{found['text_class']}`" if found["text_class"] != found["class"] else ""
    cells = [
        version, f"`{found['class']}`{inner}", ", ".join(ways) or "no",
        f"`{found['layer']}({', '.join(found['layer_parameters'])})`", f"`{found['embedding']}`",
        "yes" if found["llama_4_scaling"]["known"] else "no", found["runner"]["default"], ", ".join(missing),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--read"] and len(arguments) == 2:
        FACTS.write_text(json.dumps(read_releases(Path(arguments[1])), indent=1) + "\n", encoding="utf-8")
    elif arguments:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(page(json.loads(FACTS.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

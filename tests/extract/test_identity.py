"""What decides the values of states beside the model: comparable before the load, and after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remote_payload.extract.identity import asked, asked_in, difference, engine_key, resolved


def spec(**engine: Any) -> dict[str, Any]:
    return {"dtype": "bfloat16", "engine": {"tensor_parallel_size": 8, "max_num_seqs": 4, **engine}}


def test_only_what_changes_values_is_in_the_key() -> None:
    assert engine_key(spec(), {}) == engine_key(spec(max_num_batched_tokens=99, gpu_memory_utilization=0.5), {})


@pytest.mark.parametrize(
    ("engine", "environ"),
    [
        ({"quantization": "fp8"}, {}),
        ({"kv_cache_dtype": "fp8"}, {}),
        ({"attention_config": {"backend": "FLASHINFER_MLA"}}, {}),
        ({"kernel_config": {"moe_backend": "marlin"}}, {}),
        ({}, {"VLLM_ATTENTION_BACKEND": "TRITON_MLA"}),
    ],
)
def test_another_engine_is_another_key(engine: dict[str, Any], environ: dict[str, str]) -> None:
    assert engine_key(spec(**engine), environ) != engine_key(spec(), {})


def test_what_a_file_says_was_asked_for_is_what_its_plan_asks() -> None:
    plan = spec(quantization="fp8", seed=3)
    assert asked_in({"engine_key": engine_key(plan, {})}) == asked(plan, {}) == {"quantization": "fp8", "seed": 3}
    assert asked_in({}) is None


class Experts(torch.nn.Module):
    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = SimpleNamespace(fp8_backend="marlin")


def test_several_backends_are_all_named() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization="fp8"), cache_config=SimpleNamespace(cache_dtype="fp8_e4m3")
    )
    backends = [SimpleNamespace(backend=SimpleNamespace(get_name=lambda name=name: name)) for name in ("B", "A", "B")]
    runner = SimpleNamespace(attn_groups=[backends[:2], backends[2:]])
    model = torch.nn.Sequential(Experts(), torch.nn.Linear(1, 1))
    assert resolved(config, runner, model) == {
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "attention_backend": "A+B",
        "moe_backend": "SimpleNamespace:marlin",
    }
    assert resolved(config, SimpleNamespace(), model)["attention_backend"] == "unknown"


def test_a_difference_is_said_unless_it_cannot_be_known() -> None:
    kept = {"quantization": "none", "kv_cache_dtype": "auto", "attention_backend": "FLASHINFER_MLA"}
    now = {**kept, "moe_backend": "x"}
    assert difference(kept, now) == ""
    assert difference({}, now) == ""
    assert difference(kept, {**now, "attention_backend": "unknown"}) == ""
    said = difference(kept, {**now, "attention_backend": "TRITON_MLA", "kv_cache_dtype": "fp8"})
    assert said == "kv_cache_dtype auto instead of fp8, attention_backend FLASHINFER_MLA instead of TRITON_MLA"

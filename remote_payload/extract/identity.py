"""What beside model and boundaries decides the values of states: samples that differ in it must not be mixed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from remote_payload.host.protocol import VALUE_ARGUMENTS

VARIABLES = (
    "VLLM_ATTENTION_BACKEND",
    "VLLM_MLA_DISABLE",
    "VLLM_USE_FLASHINFER_MOE_FP4",
    "VLLM_USE_FLASHINFER_MOE_FP8",
)
"""What does so by environment, see VALUE_ARGUMENTS; newer versions of vLLM ignore some."""

RESOLVED = ("quantization", "kv_cache_dtype", "attention_backend", "moe_backend")


def asked(spec: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what the plan and the environment ask of the engine: comparable before anything is loaded."""
    found = {name: spec["engine"][name] for name in VALUE_ARGUMENTS if spec["engine"].get(name) is not None}
    return {**found, **{name: environ[name] for name in VARIABLES if environ.get(name)}}


def engine_key(spec: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> str:
    """Return `asked` and the plan's dtype as JSON, for the description of a file."""
    return json.dumps({"dtype": spec["dtype"], **asked(spec, environ)}, sort_keys=True, default=str)


def asked_in(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what `asked` was for the engine of a file, None if the file does not say.

    Without the dtype: "auto" may stand for the very dtype that another plan names.
    """
    if "engine_key" not in metadata:
        return None
    return {name: value for name, value in json.loads(metadata["engine_key"]).items() if name != "dtype"}


def resolved(vllm_config: Any, runner: Any, model: Any) -> dict[str, str]:
    """Return what the engine decided: one word for each of RESOLVED, several joined by "+", "none" for absent.

    Call it when the KV cache is set up. "unknown": this version of vLLM does not tell.
    """
    return {
        "quantization": str(vllm_config.model_config.quantization or "none"),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "attention_backend": _attention(runner),
        "moe_backend": _experts(model),
    }


def difference(kept: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return in words how a kept sample's engine differs from this one, "" if it does not."""
    return ", ".join(
        f"{name} {kept[name]} instead of {now[name]}"
        for name in RESOLVED
        if name in kept and "unknown" not in (kept[name], now[name]) and kept[name] != now[name]
    )


def _attention(runner: Any) -> str:
    groups = getattr(runner, "attn_groups", None)
    if not groups:
        return "unknown"
    return _joined(group.backend.get_name() for kind in groups for group in kind)


def _experts(model: Any) -> str:
    """Name the quantisation method and the kernel of each layer of routed experts."""
    methods = (getattr(module, "quant_method", None) for module in model.modules() if hasattr(module, "top_k"))
    found = _joined(_method(method) for method in methods if method is not None)
    named = any("moe" in type(module).__name__.lower() for module in model.modules())
    return "unknown" if found == "none" and named else found


def _method(method: Any) -> str:
    backends = (getattr(method, name) for name in sorted(vars(method)) if name.endswith("_backend"))
    chosen = [str(getattr(backend, "value", backend)) for backend in backends if backend is not None]
    return ":".join([type(method).__name__, *chosen])


def _joined(words: Any) -> str:
    return "+".join(sorted(set(words))) or "none"

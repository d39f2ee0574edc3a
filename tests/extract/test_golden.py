"""Captured states against transformers' own layers, on real engines in fp32, by every path."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from safetensors.torch import load_file
from support.extraction import Run, header_of
from support.reference import relative_error

from tools import tiny_models

TOLERANCE = 1e-5
"""Relative L2 error of any token. fp32 kernels that sum in another order differ by about 1e-6."""

APART = 0.1
"""Neighbouring boundaries of the tiny models differ by this at least, so that no other boundary can pass."""

RUNS = (
    ("qwen_chunked", "qwen3-tiny", "hooks"),
    ("qwen_native", "qwen3-tiny", "native"),
    ("deepseek_hidden", "deepseek-v3-tiny", "hooks"),
    ("deepseek_filled", "deepseek-v3-tiny", "native+hooks"),
    ("deepseek_past_last", "deepseek-v3-tiny", "native"),
    ("llama4_hooks", "deepseek-v3-llama4-tiny", "hooks"),
    ("llama4_native", "deepseek-v3-llama4-tiny", "native"),
    ("kimi_hooks", "kimi-k25-tiny", "hooks"),
    ("kimi_native", "kimi-k25-tiny", "native"),
    ("qwen_moe", "qwen3-moe-tiny", "native"),
    ("mistral", "mistral-sliding-tiny", "native"),
    pytest.param("llama", "llama-tiny", "native", marks=pytest.mark.slow),
    pytest.param("deepseek_experts", "deepseek-v3-tiny", "hooks", marks=pytest.mark.slow),
)
SLOW = ("llama", "llama4_native", "qwen_int8")
INT8_ERROR = 0.1
"""Relative error of a whole state against the unquantised model: far below the distance of neighbours."""

SAMPLES = 20  # 12 chats and 8 lists of tokens; 2 records are refused


@pytest.mark.engine
@pytest.mark.parametrize(("fixture", "name", "path"), RUNS)
def test_captured_states_are_those_of_transformers(
    request: pytest.FixtureRequest, expected: Any, fixture: str, name: str, path: str
) -> None:
    run: Run = request.getfixturevalue(fixture)
    assert run.code == 0, run.log[-4000:]
    assert not run.events("exception")
    assert len(run.ledger()) == SAMPLES
    worst: dict[int, float] = {}
    for record in run.ledger():
        file = run.output / record["file"]
        metadata = header_of(file)["__metadata__"]
        assert metadata["capture_path"] == path
        captured = load_file(file)
        states, normed = expected(name, captured["token_ids"].tolist())
        boundaries = json.loads(metadata["boundaries"])
        assert captured["hidden_states"].shape == (record["tokens"], len(boundaries), 128)
        for place, boundary in enumerate(boundaries):
            last_normed = boundary == tiny_models.LAYERS and json.loads(metadata["final_norm"])
            reference = normed if last_normed else states[boundary]
            error = relative_error(captured["hidden_states"][:, place], reference)
            worst[boundary] = max(worst.get(boundary, 0.0), error)
    print(f"{fixture}: {', '.join(f'{b}: {error:.1e}' for b, error in sorted(worst.items()))}")
    assert max(worst.values()) <= TOLERANCE, worst


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-tiny", "deepseek-v3-tiny", "deepseek-v3-llama4-tiny", "kimi-k25-tiny", "qwen3-moe-tiny", "llama-tiny",
        "mistral-sliding-tiny",
    ],
)  # fmt: skip
def test_neighbouring_boundaries_of_the_tiny_models_are_far_apart(expected: Any, name: str) -> None:
    states, normed = expected(name, list(range(20, 60)))
    neighbours = [*pairwise(states), (states[-1], normed)]
    for one, other in neighbours:
        assert float((one - other).norm() / one.norm()) >= APART


def test_llama_4_scaling_changes_the_states(expected: Any) -> None:
    prompt = list(range(20, 80))
    plain, _ = expected("deepseek-v3-tiny", prompt)
    scaled, _ = expected("deepseek-v3-llama4-tiny", prompt)
    start = tiny_models.LLAMA_4_SCALING["original_max_position_embeddings"]
    assert relative_error(scaled[-1][start:], plain[-1][start:]) > 0.01
    assert relative_error(scaled[-1][:start], plain[-1][:start]) < TOLERANCE


@pytest.mark.engine
def test_chunked_prefill_gives_what_whole_prompts_give(qwen_chunked: Run, qwen_native: Run) -> None:
    for record in qwen_native.ledger():
        whole, chunked = (
            load_file(qwen_native.output / record["file"]),
            load_file(qwen_chunked.output / record["file"]),
        )
        assert chunked["token_ids"].equal(whole["token_ids"])
        pairs = zip(chunked["hidden_states"].unbind(1), whole["hidden_states"].unbind(1), strict=True)
        assert all(relative_error(one, other) <= TOLERANCE for one, other in pairs)


@pytest.mark.engine
@pytest.mark.parametrize(
    "fixture",
    ["qwen_native", "kimi_native", "qwen_moe", "mistral", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)],
)
def test_both_paths_give_the_same_states(request: pytest.FixtureRequest, fixture: str) -> None:
    """Every engine with native states runs its probe both ways; the driver tells how far they are apart."""
    run: Run = request.getfixturevalue(fixture)
    assert run.code == 0, run.log[-4000:]
    (told,) = [event["text"] for event in run.events("notice") if event["code"] == "capture-path"]
    assert told.startswith("states are captured by: native (")
    errors = [float(error) for error in re.findall(r"\d+: ([0-9.e+-]+)", told)]
    assert len(errors) == 4
    assert max(errors) <= TOLERANCE


@pytest.mark.engine
@pytest.mark.slow
def test_a_quantised_model_is_captured_within_its_own_precision(qwen_int8: Run, expected: Any) -> None:
    assert qwen_int8.code == 0, qwen_int8.log[-4000:]
    for record in qwen_int8.ledger():
        captured = load_file(qwen_int8.output / record["file"])
        states, _ = expected("qwen3-tiny", captured["token_ids"].tolist())
        for place, boundary in enumerate((2, 4, 5, 8)):
            error = (captured["hidden_states"][:, place] - states[boundary]).norm() / states[boundary].norm()
            assert 1e-4 < error < INT8_ERROR

"""Bytes, memory and architectures by hand-computed examples."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from controller.core.arithmetic import cache_bytes_per_token, written
from controller.core.checks_functional import has_kernels
from controller.core.checks_health import describe_links
from controller.core.finding import span
from controller.stages.preflight import clock_offset

CASES = Path(__file__).resolve().parents[1] / "cases"


def test_bytes_by_the_lengths_the_states_and_the_share() -> None:
    report = json.loads((CASES / "probe-8x-rtx-pro-6000.json").read_text())
    plan: Any = json.loads((CASES / "plan-8x-rtx-pro-6000.json").read_text())
    sizes = written(report, plan)
    assert sizes is not None
    assert sizes.token_bytes == 4 * 7168 * 2 + 16
    assert sizes.bytes == 16_384_000 * sizes.token_bytes + 10_000 * 4096
    assert sizes.bytes_at_most - sizes.bytes == 327_680 * sizes.token_bytes
    half = copy.deepcopy(plan)
    half["extract"].update(shard=[1, 2], store_dtype="fp8", boundaries=[1, 2])
    smaller = written(report, half)
    assert smaller is not None
    assert (smaller.samples, smaller.tokens, smaller.token_bytes) == (5000, 8_192_000, 2 * 7168 + 16)
    report["sections"]["lengths"]["data"]["lengths"] = None
    assert written(report, plan) is None


@pytest.mark.parametrize(
    ("config", "engine", "ranks", "expected"),
    [
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, {}, 8, 61 * 576 * 2),
        ({"num_hidden_layers": 32, "kv_heads": 8, "head_dim": 128}, {}, 4, 32 * 2 * 2 * 128 * 2),
        ({"num_hidden_layers": 32, "kv_heads": 2, "head_dim": 128}, {}, 8, 32 * 2 * 1 * 128 * 2),
        ({"num_hidden_layers": 2, "attention_heads": 8, "hidden_size": 512}, {}, 1, 2 * 2 * 8 * 64 * 2),
        ({"num_hidden_layers": 2, "kv_heads": 1, "head_dim": 64}, {"kv_cache_dtype": "fp8"}, 1, 2 * 2 * 64),
        ({"num_hidden_layers": 2}, {}, 1, None),
        ({}, {}, 1, None),
    ],
)
def test_the_cache_of_a_token(config: dict[str, Any], engine: dict[str, Any], ranks: int, expected: Any) -> None:
    assert cache_bytes_per_token(config, {"engine": engine}, ranks) == expected


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ([9, 0], ["sm_80", "sm_90"], True),
        ([12, 0], ["sm_80", "sm_90", "sm_100"], False),
        ([12, 0], ["sm_90", "compute_90"], True),
        ([8, 9], ["sm_80"], True),
        ([8, 0], ["sm_86"], False),
        ([12, 1], ["sm_120a"], False),
        ([12, 0], ["sm_120a"], True),
        ([10, 3], ["sm_100"], True),
        ([9, 0], ["gfx942"], False),
    ],
)
def test_which_kernels_run_on_a_gpu(capability: list[int], archs: list[str], runs: bool) -> None:
    assert has_kernels(capability, archs) is runs


def test_the_clocks_difference_is_that_of_two_ways_of_equal_length() -> None:
    clock = {"begun": 1100.25, "ended": 1109.25}
    assert clock_offset(clock, 1000.0, 1009.5) == {"offset_s": 100.0, "uncertain_s": 0.25}


def test_links_are_counted_by_pair_among_the_jobs_gpus() -> None:
    matrix = {
        "GPU0": {"GPU1": "NV18", "GPU2": "SYS"}, "GPU1": {"GPU0": "NV18", "GPU2": "SYS"},
        "GPU2": {"GPU0": "SYS", "GPU1": "SYS"},
    }  # fmt: skip
    assert describe_links(matrix) == "1 x NV18, 2 x SYS"
    assert describe_links(matrix, {"GPU0", "GPU1"}) == "1 x NV18"
    assert describe_links(None) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (9272, "2 h 34 min"), (90000, "1 d 1 h")],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text

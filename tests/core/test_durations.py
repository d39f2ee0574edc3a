"""Which earlier runs tell how long a run takes, at their borders; the sentences are in tests/cases/checks.json."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.durations import RATED_S, RATED_TOKENS, duration, tells_rate


@pytest.mark.parametrize(
    ("seconds", "rate", "told"),
    [
        (RATED_S, 1.0, True),
        (RATED_S - 0.1, 1.0, False),
        (0.5, RATED_TOKENS / 0.5, True),
        (0.2, 920.0, False),
        (0.0, 0.0, False),
        (None, 920.0, False),
    ],
)
def test_a_rate_needs_tokens_or_seconds(seconds: float | None, rate: float, told: bool) -> None:
    assert tells_rate({"extract_s": seconds, "tokens_per_s": rate}) is told


def known(run_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "run_id": run_id, "tensor_parallel_size": 1, "accelerator": "cpu", "boundaries": [2, 4],
        "format": "speculators", "store_dtype": "auto", "engine": {"tensor_parallel_size": 1}, "tokens_per_s": 100.0,
        "extract_s": 100.0, "load_s": 5.0, **changes,
    }  # fmt: skip


def chosen(*runs: dict[str, Any], tokens: int = 10_000) -> str:
    report: Any = {"sections": {"history": {"ok": True, "data": {"runs": list(runs), "rehearsals": []}}}}
    plan: Any = {
        "host": {"accelerator": "cpu"},
        "extract": {
            "engine": {"tensor_parallel_size": 1}, "boundaries": [2, 4], "format": "speculators",
            "store_dtype": "auto",
        },
    }  # fmt: skip
    found = duration(report, plan, tokens)
    return found.extract_from if found else "none"


@pytest.mark.parametrize(
    "other",
    [
        {"engine": {"tensor_parallel_size": 1, "max_num_seqs": 1}},
        {"boundaries": [2, 4, 5]},
        {"format": "modelopt"},
        {"store_dtype": "fp8"},
        {"extract_s": 20.0},
        {"extract_s": 2000.0},
    ],
)
def test_the_run_that_is_nearest_counts_before_the_newest(other: dict[str, Any]) -> None:
    assert chosen(known("newest", **other), known("near")) == "near"


def test_of_equals_the_newest_counts() -> None:
    assert chosen(known("newest"), known("older")) == "newest"


@pytest.mark.parametrize("other", [{"tensor_parallel_size": 2}, {"accelerator": "cuda"}])
def test_another_machine_or_number_of_ranks_tells_nothing(other: dict[str, Any]) -> None:
    assert chosen(known("other", **other)) == "none"


def test_a_record_of_an_earlier_version_counts_where_there_is_no_nearer_one() -> None:
    old = known("old", accelerator=None, engine=None, format=None, store_dtype=None)
    assert (chosen(old), chosen(old, known("near"))) == ("old", "near")

"""GPU-hours and what they cost."""

from __future__ import annotations

import pytest

from controller.core.usage import usage


def test_every_gpu_of_the_host_counts_for_the_whole_run() -> None:
    used = usage({"host": {"gpus": 8}}, {"duration_s": 5400.0}, 2.5)
    assert used == {"gpu_hours": 12.0, "cost": {"price_per_gpu_hour": 2.5, "total": 30.0}}


def test_without_a_price_there_are_hours_and_no_cost() -> None:
    assert usage({"host": {"gpus": 2}}, {"duration_s": 1800}, None) == {"gpu_hours": 1.0, "cost": None}


def test_a_price_of_nothing_is_a_price() -> None:
    assert usage({"host": {"gpus": 1}}, {"duration_s": 3600}, 0.0)["cost"]["total"] == 0


@pytest.mark.parametrize(
    ("plan", "result"), [({"host": {"gpus": 0}}, {"duration_s": 9.0}), (None, {"duration_s": 9.0}), ({}, None)]
)
def test_what_is_not_known_is_null(plan: dict[str, object] | None, result: dict[str, object] | None) -> None:
    assert usage(plan, result, 1.0) == {"gpu_hours": None, "cost": None}

"""Boundaries: what `eagle3` means, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.boundaries import resolve_boundaries
from controller.core.errors import ConfigError


@pytest.mark.parametrize(
    ("layers", "expected"), [(61, (2, 30, 58, 61)), (8, (2, 4, 5, 8)), (7, (2, 3, 4, 7)), (36, (2, 18, 33, 36))]
)
def test_eagle3(layers: int, expected: tuple[int, ...]) -> None:
    assert resolve_boundaries("eagle3", layers) == expected


@pytest.mark.parametrize("layers", range(7))
def test_eagle3_is_refused_on_models_too_small_for_it(layers: int) -> None:
    with pytest.raises(ConfigError, match="eagle3") as caught:
        resolve_boundaries("eagle3", layers)
    assert caught.value.code == "boundaries"
    assert "[capture]" in caught.value.fix


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "no boundary"),
        ([2, 2], r"\[2\] are given twice"),
        ([9], r"\[9\] do not exist"),
        ([-1, 3], r"\[-1\] do not exist"),
        ([True], "do not exist"),
        ([2.0], "do not exist"),
        ("eagle2", "not a set of boundaries"),
    ],
)
def test_refusals(spec: list[int] | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_boundaries(spec, 8)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n), min_size=1))))
def test_every_list_of_distinct_boundaries_is_kept_as_it_is(case: tuple[int, set[int]]) -> None:
    layers, chosen = case
    for order in (sorted(chosen), sorted(chosen, reverse=True)):
        assert resolve_boundaries(order, layers) == tuple(order)

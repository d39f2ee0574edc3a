"""Ledgers as the values of charts, however large or odd they are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reported import ledger

from controller.core.figures import lengths, manifest, norm_map
from controller.core.ledger import Fate, LedgerLine, StateFigures, latest, parse_line, truncated_indexes


def written(index: int, norms: dict[int, float | None], *, tokens: int = 10, nan: int = 0) -> LedgerLine:
    states = tuple(StateFigures(b, norm, nan, 0, 0) for b, norm in norms.items())
    return LedgerLine(index=index, fate=Fate.WRITTEN, rank=0, tokens=tokens, bytes=1, file="f", states=states)


def test_a_norm_is_weighted_by_tokens_within_its_bucket() -> None:
    lines = [
        written(0, {2: 1.0}, tokens=30),
        written(1, {2: 5.0}, tokens=10),
        written(2, {2: 9.0}),
        written(3, {2: 9.0}),
    ]
    found = norm_map(lines, most=2)
    assert found is not None
    assert found.rows == ((2.0, 9.0),)
    assert (found.first, found.last, found.broken) == ((0, 2), 3, 0)


def test_one_value_that_is_no_number_marks_its_bucket_and_no_other() -> None:
    found = norm_map(
        [written(0, {2: 1.0, 4: 3.0}), written(1, {2: None, 4: 3.0}, nan=1), written(2, {2: 1.0})], most=3
    )
    assert found is not None
    first, second = found.rows
    assert (first[0], second[0], second[2]) == (1.0, 3.0, None)
    assert math.isnan(first[1] or 0.0)
    assert found.broken == 2  # `nan` counts for both states of the sample


def test_no_sample_gives_no_chart() -> None:
    assert norm_map([]) is None
    assert lengths([], 10, 0) is None
    assert manifest({}, range(0)).cells == ()


def test_a_cell_shows_the_worst_of_its_samples() -> None:
    lines = {index: written(index, {}) for index in range(10)}
    del lines[3]
    found = manifest(lines, range(10), bad=[7], most=5)
    assert found.per_cell == 2
    assert found.cells == (Fate.WRITTEN, Fate.MISSING, Fate.WRITTEN, Fate.FAILED, Fate.WRITTEN)
    assert found.counts == {Fate.WRITTEN: 8, Fate.SKIPPED: 0, Fate.FAILED: 1, Fate.MISSING: 1}


def test_a_share_of_the_samples_is_not_missing_the_others() -> None:
    lines = {index: written(index, {}) for index in range(1, 100, 4)}
    assert manifest(lines, range(1, 100, 4)).counts[Fate.MISSING] == 0


@pytest.mark.parametrize(("longest", "width"), [(1, 1), (59, 1), (60, 2), (4096, 80), (131_072, 4000)])
def test_lengths_fall_into_bins_of_a_round_width(longest: int, width: int) -> None:
    found = lengths([written(0, {}, tokens=longest), written(1, {}, tokens=0)], 4096, 1)
    assert found is not None
    assert found.width == width
    assert len(found.counts) <= 60
    assert (found.counts[0], found.counts[-1], found.samples) == ((1, 1, 2) if longest >= width else (2, 2, 2))


def test_a_sample_written_in_a_second_try_counts_as_written() -> None:
    tries = [
        {"index": 1, "failed": "job-failed", "why": "x"},
        {"index": 1, "file": "hs_1", "tokens": 3, "bytes": 9},
        {"index": 1, "skipped": "late", "why": ""},
    ]
    found = latest(filter(None, (parse_line(each, None) for each in tries)))
    assert found[1].fate is Fate.WRITTEN


@pytest.mark.parametrize(
    "record",
    [None, 7, "x", [], {}, {"index": True, "skipped": "x"}, {"index": -1, "file": "x", "tokens": 1, "bytes": 1},
     {"index": 0, "file": "x", "tokens": "1", "bytes": 1}, {"index": 0, "notice": "truncated"}],
)  # fmt: skip
def test_what_is_no_line_of_a_ledger_is_passed_over(record: object) -> None:
    assert parse_line(record, 0) is None


KEYS = st.sampled_from(["boundary", "norm_mean", "nan", "inf", "x"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
)


@settings(max_examples=50, deadline=None)
@given(ANYTHING)
def test_states_of_any_form_never_break_a_chart(states: object) -> None:
    line = parse_line({"index": 0, "file": "x", "tokens": 1, "bytes": 1, "states": states, "t": states}, 0)
    assert line is not None
    norm_map([line])


def test_many_samples_stay_small() -> None:
    records = ledger(10_000, 8, 7200.0)
    lines = latest(filter(None, (parse_line(record, 0) for record in records)))
    found = norm_map(lines.values())
    assert found is not None
    assert len(found.first) <= 120
    assert len(manifest(lines, range(10_000)).cells) <= 1500
    assert len(truncated_indexes(records)) > 10

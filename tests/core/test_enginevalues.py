"""Values of engine arguments: what is refused here is refused by pydantic, and in which words."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from controller.core.enginevalues import refused, wants, written

KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
PLAIN = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.text(), st.from_regex(r"\s*[+-]?[\d_]+(\.\d*)?(e\d)?\s*"),
    st.sampled_from(["yes", "ON", " true ", "inf", "nan", "8", "8.0", "1_000", "eight", ""]),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(), st.integers(), max_size=1),
)  # fmt: skip


def wanted(*types: str, choices: tuple[Any, ...] = (), **bounds: float) -> dict[str, Any]:
    return {"types": list(types), "choices": list(choices), "bounds": bounds}


def taken(value: Any, kind: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@given(value=PLAIN, kind=st.sampled_from(sorted(KINDS)))
def test_nothing_is_refused_that_pydantic_takes(value: Any, kind: str) -> None:
    if refused(value, wanted(kind)):
        assert not taken(value, KINDS[kind])


@given(value=PLAIN)
def test_nothing_is_refused_that_a_literal_takes(value: Any) -> None:
    if refused(value, wanted(choices=("a", "8", 1))):
        assert not taken(value, Literal["a", "8", 1])


@pytest.mark.parametrize(
    ("value", "kind"),
    [("eight", "int"), (1.5, "int"), ("", "int"), ([], "int"), ({}, "int"), ("1e3", "int"), ("on", "int"),
     ("high", "float"), ([0.9], "float"), ("maybe", "bool"), (2, "bool"), (0.5, "bool"), (8, "str"), (True, "str")],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(value: Any, kind: str) -> None:
    assert refused(value, wanted(kind))
    assert not taken(value, KINDS[kind])


@pytest.mark.parametrize(
    ("value", "types"),
    [(8, ["int"]), ("8", ["int"]), (8.0, ["int"]), (True, ["int"]), (1, ["float"]), ("0.9", ["float"]),
     ("Yes", ["bool"]), (1, ["bool"]), (0.0, ["bool"]), ("x", ["bool", "str"]), (None, ["int"])],
)  # fmt: skip
def test_what_vllm_takes_is_taken(value: Any, types: list[str]) -> None:
    assert not refused(value, wanted(*types))


@pytest.mark.parametrize(
    ("value", "wrong"), [(0, True), (1, False), (8, False), (9, True), (False, True), ("0", False)]
)
def test_a_number_outside_plain_limits_is_refused(value: Any, wrong: bool) -> None:
    assert refused(value, wanted("int", ge=1, lt=9)) is wrong


def test_what_is_wanted_in_words() -> None:
    assert wants(wanted("int", ge=1)) == "an integer of at least 1"
    assert wants(wanted("float", gt=0, le=1)) == "a number above 0 and of at most 1"
    assert wants(wanted("bool", "str")) == "true or false or a string"
    assert wants(wanted(choices=("a", 8))) == 'one of "a", 8'
    assert wants(wanted("str", choices=("a",))) == "a string"


def test_a_value_is_written_as_in_the_playbook_and_a_long_one_is_cut() -> None:
    assert [written(value) for value in ("eight", True, 1.5, [1])] == ['"eight"', "true", "1.5", "[1]"]
    assert len(written("x" * 500)) == 60

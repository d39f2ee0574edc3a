"""What a survey found, held against a playbook's `[summary.expect]`: every difference is a problem of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from remote_payload.survey.groups import Group, pattern

Problem = dict[str, str]


def compare(
    expect: Mapping[str, Any], groups: list[Group], totals: Mapping[str, int], nan: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield a problem for each expectation that does not hold.

    `expect` may have files, bytes, records and nan (a number, or {"min", "max"}), and `tensors`: by name, with `*`
    for numbers, {"dtype", "shape"}, where `"*"` in a shape is any length.
    """
    for name in ("files", "bytes", "records"):
        if name in expect:
            yield from _number(name, expect[name], totals[name])
    if "nan" in expect:
        yield from _number("nan", expect["nan"], nan["nan"])
    rows = [row for group in groups for row in group.tensors()]
    for name, wanted in expect.get("tensors", {}).items():
        same = [row for row in rows if row["name"] == pattern(name)]
        if not same:
            yield _problem("tensor", "no file holds `%s`" % name)
        for row in same:
            yield from _tensor(name, wanted, row)


def _number(name: str, wanted: Any, found: int) -> Iterator[Problem]:
    low, high = (wanted.get("min"), wanted.get("max")) if isinstance(wanted, Mapping) else (wanted, wanted)
    if low is not None and found < low:
        yield _problem(name, "%s: %d, expected %s%d" % (name, found, "" if low == high else "at least ", low))
    elif high is not None and found > high:
        yield _problem(name, "%s: %d, expected %s%d" % (name, found, "" if low == high else "at most ", high))


def _tensor(name: str, wanted: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Problem]:
    dtype, shape = wanted.get("dtype"), wanted.get("shape")
    if dtype is not None and row["dtype"] != dtype:
        yield _problem("dtype", "`%s` is %s, expected %s" % (name, row["dtype"], dtype))
    if shape is not None and not _fits(shape, row["shape"]):
        yield _problem("shape", "`%s` is %s, expected %s" % (name, text_of(row["shape"]), text_of(shape)))


def _fits(wanted: list[Any], found: list[Any]) -> bool:
    if len(wanted) != len(found):
        return False
    return all(want in ("*", size) for want, size in zip(wanted, found))


def text_of(shape: list[Any]) -> str:
    """Return a shape for a person: `[7-512, 4, 128]`."""
    return "[%s]" % ", ".join("%d-%d" % tuple(size) if isinstance(size, list) else str(size) for size in shape)


def _problem(code: str, what: str) -> Problem:
    return {"code": "expect-%s" % code, "what": what, "why": "[summary.expect] of the playbook says so", "fix": ""}

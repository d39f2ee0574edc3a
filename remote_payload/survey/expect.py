"""What a survey found, held against a playbook's `[summary.expect]`: every difference is a problem of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from remote_payload.survey.groups import Group, Unread, pattern

Problem = dict[str, str]


def compare(
    expect: Mapping[str, Any],
    groups: list[Group],
    totals: Mapping[str, int],
    nan: Mapping[str, Any],
    *,
    unread: Unread,
    unsearched: Unread,
) -> Iterator[Problem]:
    """Yield a problem for each expectation that does not hold, or of which it is not known whether it does.

    `unread` are files whose contents could not be looked into, `unsearched` those whose values could not.
    `expect` may have files, bytes, records and nan (a number, or {"min", "max"}), and `tensors`: by name, with `*`
    for numbers, {"dtype", "shape"}, where `"*"` in a shape is any length.
    """
    for name in ("files", "bytes"):
        if name in expect:
            yield from _number(name, expect[name], totals[name])
    if "records" in expect:
        yield from _records(expect["records"], groups, totals["records"], unread)
    if "nan" in expect:
        yield from _nan(expect["nan"], nan, unread, unsearched)
    if "tensors" in expect and expect["tensors"] and unread.files:
        yield _unknown("tensor", "tensors", "in %s: %s" % (_count(unread.files), unread.reason()))
    rows = [row for group in groups for row in group.tensors()]
    for name, wanted in expect.get("tensors", {}).items():
        same = [row for row in rows if row["name"] == pattern(name)]
        if not same:
            yield _problem("tensor", "no file holds `%s`" % name)
        for row in same:
            yield from _tensor(name, wanted, row)


def _records(wanted: Any, groups: list[Group], found: int, unread: Unread) -> Iterator[Problem]:
    missed = unread.reason("parquet")
    if missed:
        yield _unknown("records", "records", missed)
    elif all(group.records is None for group in groups):
        yield _unknown("records", "records", "no file there is one of records")
    else:
        yield from _number("records", wanted, found)


def _nan(wanted: Any, nan: Mapping[str, Any], unread: Unread, unsearched: Unread) -> Iterator[Problem]:
    missed = unread.files + unsearched.files
    if missed:
        reason = unread.reason() or unsearched.reason()
        yield _unknown("nan", "nan", "in %s: %s" % (_count(missed), reason))
    elif not nan["values"]:
        yield _unknown("nan", "nan", "no file there holds a number that could be NaN")
    if nan["values"]:
        yield from _number("nan", wanted, nan["nan"])


def _count(files: int) -> str:
    return "%d file%s" % (files, "" if files == 1 else "s")


def _unknown(code: str, name: str, why: str) -> Problem:
    """Return the problem of an expectation that nothing was held against: what was not seen satisfies none."""
    return {
        **_problem(code, "%s: not looked at: %s" % (name, why)),
        "fix": "let the playbook's `python` be one that can read them, or name in `paths` of [summary] what it can",
    }


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

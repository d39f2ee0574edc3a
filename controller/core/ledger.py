"""Ledger lines as values: what became of each sample, read from what a host wrote and therefore distrusted.

A rank's ledger has a line for each sample that it wrote; the driver's has one for each that was skipped, kept from an
earlier run or lost with the job. A line that is not of that form is passed over: it may be cut, or of a newer wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeGuard

from controller.core.numbers import finite


class Fate(StrEnum):
    """What became of a sample."""

    WRITTEN = "written"
    SKIPPED = "skipped"  # the data set's record gave no sample
    FAILED = "failed"  # its file is not what was written, or the job broke under it
    MISSING = "missing"  # nothing was heard of it


class StateFigures(NamedTuple):
    """One state of one sample. `norm` is the mean L2 norm of its finite rows, None if there is none.

    A tuple: a run has hundreds of thousands of them, and a frozen dataclass takes four times as long to make.
    """

    boundary: int
    norm: float | None
    nan: int
    inf: int
    zero_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One line. `t` is seconds since the epoch by the host's clock, None in ledgers that do not tell it.

    `seconds` is the time from the sample's first captured row to its file. `code` and `why` say why there is none.
    """

    index: int
    fate: Fate
    rank: int | None
    tokens: int = 0
    bytes: int = 0
    file: str = ""
    t: float | None = None
    seconds: float | None = None
    kept: bool = False
    truncated: bool = False
    states: tuple[StateFigures, ...] = ()
    code: str = ""
    why: str = ""
    record_id: str | None = None
    """What the data set itself calls the record."""


def parse_line(record: Any, rank: int | None) -> LedgerLine | None:
    """Return the line of a record, None for one that tells no sample's fate. `rank` None is the driver."""
    if not isinstance(record, Mapping) or not _is_count(record.get("index")):
        return None
    index, why = int(record["index"]), str(record.get("why") or "")
    name = record["record_id"] if isinstance(record.get("record_id"), str) else None
    for key, fate in (("skipped", Fate.SKIPPED), ("failed", Fate.FAILED)):
        if key in record:
            return LedgerLine(index=index, fate=fate, rank=rank, code=str(record[key]), why=why, record_id=name)
    if "file" not in record or not _is_count(record.get("tokens")) or not _is_count(record.get("bytes")):
        return None
    states = record.get("states")
    return LedgerLine(
        index=index,
        fate=Fate.WRITTEN,
        rank=rank,
        tokens=int(record["tokens"]),
        bytes=int(record["bytes"]),
        file=str(record["file"]),
        t=finite(record.get("t")),
        seconds=finite(record.get("seconds")),
        kept=bool(record.get("kept")),
        states=tuple(filter(None, map(_state, states))) if isinstance(states, list) else (),
        record_id=name,
    )


def truncated_indexes(records: Iterable[Any]) -> set[int]:
    """Return the samples that were cut to `max_seq_len`: the driver's ledger has a notice for each."""
    return {
        int(record["index"])
        for record in records
        if isinstance(record, Mapping) and record.get("notice") == "truncated" and _is_count(record.get("index"))
    }


def latest(lines: Iterable[LedgerLine]) -> dict[int, LedgerLine]:
    """Return the line that counts for each index: the last one, yet a written sample beats what was said before."""
    found: dict[int, LedgerLine] = {}
    for line in lines:
        known = found.get(line.index)
        if known is None or line.fate is Fate.WRITTEN or known.fate is not Fate.WRITTEN:
            found[line.index] = line
    return found


def _state(record: Any) -> StateFigures | None:
    if not isinstance(record, dict) or not _is_count(record.get("boundary")):
        return None
    nan, inf, zero = record.get("nan"), record.get("inf"), record.get("zero_rows")
    return StateFigures(
        boundary=record["boundary"],
        norm=finite(record.get("norm_mean")),
        nan=nan if _is_count(nan) else 0,
        inf=inf if _is_count(inf) else 0,
        zero_rows=zero if _is_count(zero) else 0,
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0  # a bool is no count

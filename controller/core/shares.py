"""Ledgers of several runs, shards of one data set, joined: what is there, what is missing, what is there twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from controller.core.errors import UsageError
from controller.core.runview import ProgressView
from remote_payload.host.protocol import VALUE_ARGUMENTS

SAME = ("model", "revision", "boundaries", "final_norm", "store_dtype", "dtype", "format", "max_seq_len", "over_long")
"""Fields of an ExtractSpec in which shares of one whole must agree."""

LISTED = 50
"""Ranges and doubles listed at most; the counts are of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One run: its ExtractSpec, the records of its data set, its ledger lines.

    `records` is None where it never got as far as to count them, or where only `at_least` is known.
    """

    run_id: str
    host: str
    spec: Mapping[str, Any]
    records: int | None
    ledger: Sequence[Mapping[str, Any]]
    at_least: int = 0


def counted(progress: ProgressView | None, shard: Sequence[int]) -> tuple[int | None, int]:
    """Return (records of the data set or None, the fewest that there are) by the progress of share N of M.

    Payloads that did not tell the records told those of the share: of one of several that leaves M numbers open.
    """
    if progress is None:
        return None, 0
    if progress.records is not None:
        return progress.records, progress.records
    if progress.total is None:
        return None, 0
    number, count = shard
    mine = progress.total + progress.skipped
    fewest = number + (mine - 1) * count if mine else 0
    return (fewest if count == 1 else None), fewest


def merge(shares: Sequence[Share]) -> dict[str, Any]:
    """Return {"complete", "counted", "records", "written", "skipped", "holes", ..., "lines"}; see docs/shards.md.

    An index is a hole if no share wrote or skipped it, a double if several wrote it; `differing` are doubles whose
    token ids are not the same. `lines` is the joined ledger by index: of a double the first share's line.
    Raises UsageError if the shares do not belong together.
    """
    _check(shares)
    written: dict[int, list[tuple[str, Mapping[str, Any]]]] = {}
    skipped: dict[int, Mapping[str, Any]] = {}
    for share in shares:
        last = {line["index"]: line for line in share.ledger if "file" in line}  # of a resumed run the latest counts
        for index, line in last.items():
            written.setdefault(index, []).append((share.run_id, {**line, "run": share.run_id, "host": share.host}))
        skips = (line for line in share.ledger if "skipped" in line)
        skipped.update((line["index"], {**line, "run": share.run_id, "host": share.host}) for line in skips)
    told = [share.records for share in shares if share.records is not None]
    # Where no run got as far as to count them, there may be more: nothing is complete.
    known = max([*written, *skipped, *(share.at_least - 1 for share in shares)], default=-1) + 1
    records = max(told) if told else known
    holes = [index for index in range(records) if index not in written and index not in skipped]
    doubles = {index: found for index, found in sorted(written.items()) if len(found) > 1}
    differing = [i for i, found in doubles.items() if len({line.get("token_sha256") for _, line in found}) > 1]
    lines = {**skipped, **{index: found[0][1] for index, found in written.items()}}
    return {
        "schema_version": 1,
        "runs": [
            {"run_id": share.run_id, "host": share.host, "shard": list(share.spec["shard"]),
             "written": sum(1 for found in written.values() for run, _ in found if run == share.run_id)}
            for share in shares
        ],
        "complete": bool(told) and not holes and not doubles,
        "counted": bool(told),
        "records": records,
        "written": len(written),
        "skipped": len(skipped),
        "holes": len(holes),
        "hole_ranges": _ranges(holes)[:LISTED],
        "doubles": len(doubles),
        "double_samples": [
            {"index": index, "runs": [run for run, _ in found]} for index, found in [*doubles.items()][:LISTED]
        ],
        "differing": differing[:LISTED],
        "tokens": sum(found[0][1]["tokens"] for found in written.values()),
        "bytes": sum(found[0][1]["bytes"] for found in written.values()),
        "lines": [lines[index] for index in sorted(lines)],
    }  # fmt: skip


_NOT_SHARES = (
    "name runs of one playbook and one data set, which `--shard` told apart; `ctl diff {one} {other}` shows all that "
    "is different"
)


def _check(shares: Sequence[Share]) -> None:
    for one, other in pairwise(shares):
        here, there = _compared(one.spec), _compared(other.spec)
        differ = [name for name in here if here[name] != there[name]]
        if differ:
            raise UsageError(
                f"runs {one.run_id} and {other.run_id} are not shares of one extraction",
                why=", ".join(f"{name}: {here[name]!r} and {there[name]!r}" for name in differ),
                fix=_NOT_SHARES.format(one=one.run_id, other=other.run_id),
                code="not-shares",
            )
        if None not in (one.records, other.records) and one.records != other.records:
            raise UsageError(
                f"runs {one.run_id} and {other.run_id} read different data",
                why=f"{one.records:,} records and {other.records:,}",
                fix=_NOT_SHARES.format(one=one.run_id, other=other.run_id),
                code="not-shares",
            )


def _compared(spec: Mapping[str, Any]) -> dict[str, Any]:
    engine = spec.get("engine") or {}
    return {name: spec.get(name) for name in SAME} | {f"engine.{name}": engine.get(name) for name in VALUE_ARGUMENTS}


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Return rising numbers as [first, last] ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges

"""Ledgers of shards, joined."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.errors import UsageError
from controller.core.runview import ProgressView
from controller.core.shares import Share, counted, merge

SPEC = {"model": "m", "boundaries": [2, 8], "format": "speculators", "shard": [1, 2]}


def line(index: int, text: str = "a") -> dict[str, Any]:
    return {"index": index, "file": f"hs_{index}.safetensors", "tokens": 3, "bytes": 100, "token_sha256": text}


def share(number: int, *lines: dict[str, Any], records: int | None = 6, **spec: Any) -> Share:
    return Share(
        run_id=f"run-{number}", host=f"h{number}", spec={**SPEC, "shard": [number, 2], **spec}, records=records,
        ledger=lines,
    )  # fmt: skip


def test_two_whole_shares_are_complete() -> None:
    one = share(1, line(0), line(2), line(4))
    other = share(2, line(1), {"index": 3, "line": 4, "skipped": "empty", "why": ""}, line(5))
    merged = merge([one, other])
    assert merged["complete"]
    assert (merged["records"], merged["written"], merged["skipped"]) == (6, 5, 1)
    assert [entry["index"] for entry in merged["lines"]] == [0, 1, 2, 3, 4, 5]
    assert [entry["host"] for entry in merged["lines"]] == ["h1", "h2", "h1", "h2", "h1", "h2"]
    assert [run["written"] for run in merged["runs"]] == [3, 2]
    assert (merged["tokens"], merged["bytes"]) == (15, 500)


def test_holes_are_shown_as_ranges() -> None:
    merged = merge([share(1, line(0)), share(2, line(5), records=8)][:1])
    assert not merged["complete"]
    assert (merged["holes"], merged["hole_ranges"]) == (5, [[1, 5]])
    merged = merge([share(1, line(0), line(4)), share(2, line(3), records=None)])
    assert merged["hole_ranges"] == [[1, 2], [5, 5]]


def test_doubles_are_shown_with_their_runs() -> None:
    merged = merge([share(1, line(0), line(1), line(2), line(3)), share(2, line(1), line(3, "b"), line(4), line(5))])
    assert not merged["complete"]
    assert merged["doubles"] == 2
    assert merged["double_samples"][0] == {"index": 1, "runs": ["run-1", "run-2"]}
    assert merged["differing"] == [3]
    assert merged["written"] == 6


def test_runs_that_never_counted_their_data_are_not_complete() -> None:
    merged = merge([share(1, line(0), records=None), share(2, line(1), records=None)])
    assert (merged["complete"], merged["records"], merged["written"], merged["holes"]) == (False, 2, 2, 0)
    merged = merge([share(1, records=None), share(2, records=None)])
    assert (merged["complete"], merged["records"]) == (False, 0)


def progress(total: int | None, skipped: int, records: int | None) -> ProgressView:
    return ProgressView(
        t=0.0, done=0, total=total, tokens=0, bytes=0, skipped=skipped, failed=0, records=records
    )  # fmt: skip


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_a_driver_counted_tells_how_many_records_there_are(size: int, count: int) -> None:
    mine = [len(range(number - 1, size, count)) for number in range(1, count + 1)]
    for number, own in enumerate(mine, start=1):
        assert counted(progress(own, 0, size), (number, count)) == (size, size)
    # Earlier payloads told only those of the share: what leaves no doubt counts, and together the shares know.
    older = [counted(progress(own - (own > 1), int(own > 1), None), (n, count)) for n, own in enumerate(mine, 1)]
    assert max(fewest for _, fewest in older) == size
    assert all(exact == (size if count == 1 else None) for exact, _ in older)
    assert counted(None, (1, count)) == counted(progress(None, 0, None), (1, count)) == (None, 0)


def test_records_that_only_a_share_of_an_earlier_payload_counted_are_holes_but_may_be_more() -> None:
    one = Share(run_id="run-1", host="h1", spec={**SPEC, "shard": [1, 2]}, records=None, at_least=5, ledger=[line(0)])
    merged = merge([one])
    assert (merged["counted"], merged["complete"]) == (False, False)
    assert (merged["records"], merged["hole_ranges"]) == (5, [[1, 4]])
    merged = merge([one, share(2, line(1), records=6)])
    assert (merged["counted"], merged["records"], merged["hole_ranges"]) == (True, 6, [[2, 5]])


def test_only_engine_arguments_that_change_values_must_agree() -> None:
    engines = (
        {"tensor_parallel_size": 4, "kv_cache_dtype": "fp8"},
        {"tensor_parallel_size": 8, "kv_cache_dtype": "fp8"},
    )
    shares = [
        share(1, line(0), line(2), line(4), engine=engines[0]),
        share(2, line(1), line(3), line(5), engine=engines[1]),
    ]
    assert merge(shares)["complete"]


def test_a_resumed_sample_is_no_double() -> None:
    kept = {**line(0), "kept": True}
    assert merge([share(1, line(0), kept, *(line(index) for index in range(1, 6)))])["complete"]


@pytest.mark.parametrize(
    ("spec", "records", "says"),
    [
        ({"boundaries": [2, 7]}, 6, "boundaries: [2, 8] and [2, 7]"),
        ({"engine": {"kv_cache_dtype": "fp8"}}, 6, "engine.kv_cache_dtype: None and 'fp8'"),
        ({}, 7, "6 records and 7"),
    ],
)
def test_what_does_not_belong_together_is_refused(spec: dict[str, Any], records: int, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        merge([share(1, line(0)), share(2, line(1), records=records, **spec)])
    assert says in caught.value.why
    assert "`ctl diff run-1 run-2`" in caught.value.fix
    assert caught.value.code == "not-shares"

"""Which lines of a log are wanted, and when they were printed."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from controller.core.errors import UsageError
from controller.core.loglines import Selection, TimeIndex, parse_moment, parse_pattern, parse_span

T0 = datetime(2026, 11, 29, 21, 45, tzinfo=UTC).timestamp()


def index(*records: tuple[float, int, int]) -> TimeIndex:
    return TimeIndex(json.dumps({"t": t, "segment": s, "offset": o}).encode() for t, s, o in records)


def test_a_byte_came_when_the_last_note_before_it_says() -> None:
    times = index((T0, 1, 0), (T0 + 1, 1, 100), (T0 + 9, 2, 0))
    assert times.at((1, 0)) == times.at((1, 99)) == T0
    assert times.at((1, 100)) == times.at((1, 5000)) == T0 + 1
    assert times.at((2, 7)) == T0 + 9
    assert index((T0, 1, 10)).at((1, 9)) is None


def test_bytes_are_cut_where_a_time_was_noted() -> None:
    times = index((T0, 1, 10), (T0 + 1, 1, 14), (T0 + 9, 2, 0))
    assert list(times.parts((1, 8), b"abcdefgh")) == [(None, b"ab"), (T0, b"cdef"), (T0 + 1, b"gh")]
    assert list(times.parts((1, 10), b"abcd")) == [(T0, b"abcd")]
    assert list(times.parts((2, 3), b"x")) == [(T0 + 9, b"x")]


def test_a_cut_note_and_one_out_of_order_are_passed_over() -> None:
    lines = [b'{"t": 5.0, "segment": 2, "offset": 0}', b'{"t": 1.0, "segment": 1, "offset": 0}', b'{"t": 6.0, "seg']
    times = TimeIndex(lines)
    assert (times.at((2, 0)), times.at((1, 0))) == (5.0, None)


def test_since_until_and_timestamps() -> None:
    chosen = Selection(since=T0, until=T0 + 10, timestamps=True)
    assert chosen.shown(b"in\n", T0 + 1) == b"2026-11-29T21:45:01Z in\n"
    assert chosen.shown(b"early\n", T0 - 1) is None
    assert chosen.shown(b"late\n", T0 + 11) is None
    assert chosen.shown(b"of unknown time\n", None) is None
    assert Selection(timestamps=True).shown(b"x\n", None) == b"-                    x\n"


def test_rank_and_prefix_come_from_the_name_of_the_process() -> None:
    worker = b"(Worker_TP3 pid=77) INFO 11-29 21:45:18 [a.py:3] loaded\n"
    assert Selection(rank=3).shown(worker, None) == worker
    assert Selection(rank=2).shown(worker, None) is None
    assert Selection(rank=3).shown(b"of nobody\n", None) is None
    assert Selection(prefix=True).shown(worker, None) == b"[Worker_TP3] " + worker
    assert Selection(prefix=True).shown(b"of nobody\n", None) == b"[job] of nobody\n"


def test_search_minds_case_only_where_the_pattern_has_capitals() -> None:
    assert Selection(search=parse_pattern("err")).shown(b"an ERROR\n", None) == b"an ERROR\n"
    assert Selection(search=parse_pattern("Err")).shown(b"an ERROR\n", None) is None


def test_bytes_that_are_no_text_pass_unchanged() -> None:
    raw = b"\xff\xfe\x1b[31m err\n"
    assert Selection(search=parse_pattern("err")).shown(raw, None) == raw


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400)])
def test_spans_count_back(text: str, seconds: float) -> None:
    assert parse_span(text, 10_000.0) == 10_000.0 - seconds


@pytest.mark.parametrize("text", ["", "none", "5", "five minutes", "m5"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_span(text, 0.0)


def test_moments_are_iso_8601() -> None:
    assert parse_moment("2026-11-29T21:45:00Z") == T0
    with pytest.raises(UsageError):
        parse_moment("yesterday")


def test_a_broken_pattern_is_shown_as_it_could_be_written() -> None:
    with pytest.raises(UsageError) as caught:
        parse_pattern("a(b")
    assert "a\\(b" in caught.value.fix

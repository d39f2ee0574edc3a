from __future__ import annotations

import pytest

from controller.ui.charts import bar, sparkline
from controller.ui.formats import (
    bytes_text,
    count_text,
    duration_text,
    end_text,
    memory_text,
    plural,
    state_word,
)
from remote_payload.host.protocol import EndReason


def test_a_sparkline_has_a_fixed_scale() -> None:
    assert sparkline([0, 50, 100], 3) == "▁▄▇"
    assert sparkline([1, 2, 3], 3) == "▁▁▁"
    assert sparkline([-20, 900], 2) == "▁▇"


def test_a_sparkline_fills_its_width_with_the_newest_on_the_right() -> None:
    assert sparkline([0, None, 100], 5) == "  ▁·▇"
    assert sparkline([100] * 9 + [0], 3) == "▇▇▁"
    assert sparkline([], 4) == "    "
    assert sparkline([1], 0) == ""
    assert sparkline([0, None, 100], 3, ascii_only=True) == "_.#"


@pytest.mark.parametrize(("fraction", "filled"), [(None, 0), (0.0, 0), (0.5, 5), (1.0, 10), (7.0, 10), (-1.0, 0)])
def test_a_bar(fraction: float | None, filled: int) -> None:
    assert bar(fraction, 10) == ("━" * filled, "─" * (10 - filled))
    assert bar(fraction, 10, ascii_only=True) == ("=" * filled, "-" * (10 - filled))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (76_450_123_776, "71.2 GiB"),
        (1023.9 * 2**20, "1.00 GiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_sizes(count: float | None, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (187_200, "2 d 04 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_growing_duration_shows_whole_seconds() -> None:
    assert [duration_text(each, running=True) for each in (-1.0, 4.9, 59.9)] == ["0 s", "4 s", "59 s"]


def test_counts_and_memory() -> None:
    assert (count_text(1234567), count_text(None)) == ("1,234,567", "-")
    assert (plural(1, "line"), plural(2000, "line")) == ("1 line", "2,000 lines")
    assert memory_text(None, 95 * 2**30) == "-/95.0 GiB"
    assert memory_text(None, None) == "-"


def test_every_end_reason_has_words() -> None:
    assert all(
        " " in end_text(reason.value) or end_text(reason.value) in ("failed", "succeeded") for reason in EndReason
    )
    assert state_word("running") == "running"

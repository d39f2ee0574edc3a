"""The table of several runs: the stage, how many samples of how many, and for how long, also on a narrow terminal."""

from __future__ import annotations

import pytest
from support.recorded import START, Script, failing, finished, healthy, loading, paused, started, view_of

from controller.ui.board import Snapshot
from controller.ui.fleet import STATE, fleet_lines
from controller.ui.formats import end_word
from controller.ui.glyphs import ASCII
from controller.ui.keymap import UiState
from remote_payload.host.protocol import REFUSED, EndReason


def rows(*scripts: Script, width: int, now: float) -> list[str]:
    shots = [Snapshot(view=view_of(each.events), now=START + now, host_now=START + now) for each in scripts]
    lines = fleet_lines(shots, UiState(opened=None), width, 20, ASCII)
    assert all(line.cell_len <= width for line in lines)
    return [line.plain.rstrip() for line in lines[2:]]


@pytest.mark.parametrize(
    ("script", "now", "words"),
    [
        (started, 75.0, ["load", "1 min 15 s", "for 1 s"]),
        (loading, 265.2, ["load", "0 %", "0/1,000", "for 3 min 12 s"]),
        (healthy, 641.2, ["capture", "41 %", "412/1,000", "1 min 20 s to last"]),
        (finished, 900.0, ["succeeded", "100 %", "1,000/1,000"]),
        (failing, 900.0, ["failed", "in load, 18 s"]),
    ],
)
@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_row_says_where_a_run_is_and_how_far(script: object, now: float, words: list[str], width: int) -> None:
    assert callable(script)
    (row,) = rows(script(), width=width, now=now)
    places = [row.find(word) for word in words]
    assert -1 not in places, row
    assert places == sorted(places), row


def test_the_rate_has_room_on_a_wide_terminal() -> None:
    (row,) = rows(healthy(), width=120, now=641.2)
    assert row.endswith("5,361 tokens/s"), row
    assert "1 min 20 s to last sample" in row


def test_the_columns_of_rows_stand_below_each_other() -> None:
    first, second = rows(loading(), healthy(), width=100, now=641.2)
    assert first.index("0/1,000") == second.index("412/1,000")
    assert first.index("for ") == second.index("1 min 20 s")


def ended(reason: str) -> Script:
    add = loading()
    add(300.0, "supervisor", "end", end_reason=reason, exit_code=None, signal=None, message="", gpus_clean=True)
    return add


def test_a_stop_that_somebody_asked_for_is_no_failure() -> None:
    scripts = [finished(), ended("stopped"), ended("cancelled"), ended("job-signaled"), ended("lease-busy")]
    shots = [Snapshot(view=view_of(each.events), now=START + 900, host_now=START + 900) for each in scripts]
    head, _, *table = fleet_lines(shots, UiState(opened=None), 200, 20, ASCII)
    assert head.plain.startswith(" 5 runs, 0 under way, 1 succeeded, 2 stopped, 2 failed ")
    words = ["succeeded", "stopped", "cancelled", "killed", "refused"]
    assert [next(word for word in words if f" {word} " in row.plain) for row in table] == words
    colours = [{str(span.style) for span in row.spans} & {"red", "yellow", "green"} for row in table]
    assert colours == [{"green"}, {"yellow"}, {"yellow"}, {"red"}, {"red"}]


def test_every_end_is_a_word_that_a_row_has_room_for() -> None:
    assert max(len(end_word(reason.value)) for reason in EndReason) <= STATE
    assert {end_word(reason.value) for reason in REFUSED} == {"refused"}
    assert [reason.value for reason in EndReason if end_word(reason.value) == "refused"] == [
        reason.value for reason in EndReason if reason in REFUSED
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_paused_run_is_no_run_at_work(width: int) -> None:
    (row,) = rows(paused(), width=width, now=714.0)
    places = [row.find(word) for word in ("paused", "41 %", "412/1,000", "disk full 1 min 04 s")]
    assert -1 not in places, row
    assert places == sorted(places)
    shots = [Snapshot(view=view_of(each().events), now=START, host_now=START) for each in (paused, healthy)]
    head, *_ = fleet_lines(shots, UiState(opened=None), 120, 20, ASCII)
    assert head.plain.startswith(" 2 runs, 2 under way (1 paused)")

"""Events as charts over time: two clocks, many samples, ledgers with and without times."""

from __future__ import annotations

import pytest
from support import recorded

from controller.core.events import Event
from controller.core.ledger import Fate, LedgerLine
from controller.core.runview import ProgressView, RunView, StageView, Status
from controller.core.timelines import gauges, rates, spans


def line(rank: int, t: float | None, tokens: int, *, kept: bool = False) -> LedgerLine:
    return LedgerLine(index=0, fate=Fate.WRITTEN, rank=rank, tokens=tokens, t=t, seconds=0.0, kept=kept)


def report(t: float, tokens: int) -> ProgressView:
    return ProgressView(t=t, done=1, total=2, tokens=tokens, bytes=0, skipped=0, failed=0)


def test_tokens_a_second_by_rank_add_up_to_all() -> None:
    found = rates(
        [line(0, 100.0, 50), line(1, 100.0, 30), line(1, 110.0, 70), line(0, 105.0, 999, kept=True)], [], most=10
    )
    assert found is not None
    assert (found.start, found.step_s) == (100.0, 1.0)
    assert found.total[0] == 80.0
    assert found.by_rank[1][-1] == 70.0
    assert sum(found.total) * found.step_s == 150


def test_without_times_in_the_ledger_the_reports_of_progress_tell_the_total() -> None:
    found = rates([line(0, None, 50)], [report(10.0, 0), report(12.0, 300), report(14.0, 300)])
    assert found is not None
    assert found.by_rank == {}
    assert sum(found.total) * found.step_s == 300
    assert rates([], []) is None
    assert rates([], [report(10.0, 0), report(12.0, 0)]) is None, "a command that counts no tokens has no throughput"


def test_what_is_done_here_after_the_end_is_no_part_of_the_run() -> None:
    ours = tuple(
        StageView(name=name, status=Status.DONE, started=t, seconds=1.0)
        for name, t in (("launch", 100.0), ("watch", 101.0), ("connect", 900.0), ("stop", 901.0))
    )
    theirs = (StageView(name="command", status=Status.DONE, started=101.0, seconds=9.0),)
    found = spans(RunView(stages=ours, steps=theirs, ended=110.0))
    assert [span.name for span in found] == ["launch", "watch", "command"]


def test_stages_of_both_clocks_share_an_axis() -> None:
    """A host an hour ahead: its first step is moved into our launch, and lengths are not touched."""
    ours = (StageView(name="launch", status=Status.DONE, started=100.0, seconds=2.0),)
    theirs = (
        StageView(name="recheck", status=Status.DONE, started=3700.0, seconds=1.0),
        StageView(name="extract", status=Status.STARTED, started=3701.0),
    )
    found = spans(RunView(stages=ours, steps=theirs))
    assert [(span.row, span.name, span.begin, span.end) for span in found] == [
        ("ctl", "launch", 0.0, 2.0), ("host", "recheck", 2.0, 3.0), ("host", "extract", 3.0, None),
    ]  # fmt: skip
    assert spans(RunView()) == []


def test_clocks_that_agree_are_left_alone() -> None:
    view = recorded.view_of(recorded.healthy().events)
    found = {(span.row, span.name): span.begin for span in spans(view)}
    assert found["host", "recheck"] == pytest.approx(8.1, abs=1e-6)
    assert found["job", "load"] == pytest.approx(73.2, abs=1e-6)


def test_each_gpu_is_a_line_and_long_runs_are_averaged() -> None:
    script = recorded.Script()
    for place in range(1000):
        recorded.sample(script, 2.0 * place, 50.0)
    found = gauges(script.events, most=100)
    assert found is not None
    assert [gauge.name for gauge in found.devices] == [f"gpu {number}" for number in range(8)]
    assert len(found.times) == 100
    assert found.times[0] == 9.0  # the mean of the first ten
    assert all(40 < (value or 0) < 60 for value in found.devices[0].util)


def test_a_host_without_gpus_shows_its_cpu_and_odd_values_are_gaps() -> None:
    data = [{"gpus": [], "cpu_percent": 7.0}, {"gpus": "none", "cpu_percent": "hot"}, {"cpu_percent": 9.0}]
    events = [
        Event(type="sample", run="r", host="h", writer="supervisor", seq=seq, t=float(seq), data=each)
        for seq, each in enumerate(data)
    ]
    found = gauges(events)
    assert found is not None
    assert [gauge.name for gauge in found.devices] == ["cpu"]
    assert found.devices[0].util == (7.0, None, 9.0)
    assert gauges([]) is None

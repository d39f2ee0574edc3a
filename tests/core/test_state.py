"""The reducer: the same events give the same view, whatever else arrives."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.recorded import START, Script, failing, freed, healthy, paused, sample, started, view_of

from controller.core.events import Event, parse_event
from controller.core.runview import Contact, Status
from controller.core.state import HISTORY, NOTICES, RunView, reduce, replay
from controller.core.tracebacks import range_text


def test_a_healthy_run() -> None:
    view = view_of(healthy().events)
    assert (view.run, view.host, view.playbook) == ("20261129-184150-a1b2c3", "gpu-host-1", "eagle3-kimi-k2.5")
    assert (view.state, view.step) == ("running", "extract")
    assert [(stage.name, stage.status) for stage in view.stages] == [
        ("connect", Status.DONE),
        ("push", Status.DONE),
        ("preflight", Status.DONE),
        ("confirm", Status.DONE),
        ("launch", Status.DONE),
        ("watch", Status.STARTED),
    ]
    assert view.phase is not None
    assert view.phase.name == "capture"
    assert view.progress is not None
    assert view.progress.fraction == pytest.approx(0.412)
    # Since capturing began: the report before the load is no part of it, nor are drain and the last canary.
    assert view.tokens_per_s == pytest.approx(412 * 730 / 56.1)
    assert view.tokens_per_s_overall == pytest.approx(412 * 730 / 56.1)
    assert view.eta_s == pytest.approx(588 / (412 / 56.1))
    assert len(view.samples[-1].gpus) == 8
    assert view.elapsed_s(START + 700) == 700
    assert view.end is None


def test_a_failing_run_names_the_first_rank_and_folds_the_others() -> None:
    view = view_of(failing().events)
    first, echo = view.exceptions
    assert first.first.rank == 3
    assert first.ranks == tuple(range(8))
    assert first.same_text == "same on ranks 0-2, 4-7"
    assert echo.first.label == "driver"
    assert view.end is not None
    assert (view.end.end_reason, view.end.exit_code, view.end.gpus_clean) == ("job-failed", 1, True)
    assert view.elapsed_s(START + 9999) == 94.0


def test_the_order_in_which_writers_arrive_does_not_matter() -> None:
    events = failing().events
    by_writer = sorted(events, key=lambda event: event.writer)  # as an attach reads file after file
    assert view_of(by_writer).exceptions == view_of(events).exceptions
    shuffled = random.Random(7).sample(events, len(events))
    assert replay(RunView(), shuffled) == replay(RunView(), events)


def test_duplicates_change_nothing() -> None:
    events = healthy().events
    once = view_of(events)
    assert view_of([*events, *events]) == once
    assert view_of([each for event in events for each in (event, event)]) == once


def test_unknown_events_and_fields_and_wrong_types_are_passed_over() -> None:
    before = view_of(started().events)
    add = Script()
    add(500.0, "newer", "telepathy", thought=1)
    add(501.0, "newer", "stage", name="push", status="levitating")
    add(502.0, "newer", "contact", status="telepathic")
    add(503.0, "newer", "progress", done="many", total=None, tokens=float("nan"), bytes=True)
    add(504.0, "newer", "sample", gpus="all", cpu_percent="high")
    add(505.0, "newer", "exception", rank="zero", exc_type=None, message=None, traceback=7)
    view = before
    for event in add.events:
        view = reduce(view, event)
    assert (view.stages, view.contact) == (before.stages, before.contact)
    assert view.progress is not None
    assert (view.progress.done, view.progress.tokens, view.progress.bytes) == (0, 0, 0)
    assert view.samples[-1].gpus == ()
    assert view.failures[-1].rank is None


def test_contact_says_nothing_about_the_run() -> None:
    add = started()
    add(100.0, "controller", "contact", status="reconnecting", text="no sign of life")
    add(101.0, "controller", "contact", status="reconnecting", text="refused")
    view = view_of(add.events)
    assert (view.state, view.contact, view.contact_text) == ("running", Contact.RECONNECTING, "refused")
    assert view.contact_since == START + 100.0


def test_histories_are_bounded() -> None:
    add = Script()
    for second in range(500):
        sample(add, float(second), 50.0)
        add(
            float(second),
            "driver",
            "progress",
            done=second,
            total=500,
            tokens=second * 10,
            bytes=0,
            skipped=0,
            failed=0,
        )
    view = view_of(add.events)
    assert len(view.samples) == HISTORY
    assert view.samples[-1].t == START + 499
    assert len(view.recent_progress) < 80
    assert view.tokens_per_s == pytest.approx(10.0)


def test_a_report_from_before_the_load_says_of_how_many_and_nothing_of_the_rate() -> None:
    """The driver tells the total before it loads; the first minute of the capture is not spread over the load."""
    add = started()
    report = {"total": 1000, "bytes": 0, "skipped": 2, "failed": 0}
    add(73.3, "driver", "progress", done=100, tokens=1000, **report)
    loading = view_of(add.events)
    assert loading.progress is not None
    assert (loading.progress.done, loading.progress.total) == (100, 1000)
    assert (loading.tokens_per_s, loading.eta_s) == (None, None)
    add(585.0, "driver", "phase", name="load", status="done", text="", seconds=511.8)
    add(585.0, "driver", "progress", done=100, tokens=1000, **report)
    add(585.0, "driver", "phase", name="capture", status="started")
    add(595.0, "driver", "progress", done=200, tokens=2000, **report)
    view = view_of(add.events)
    assert view.tokens_per_s == pytest.approx(100.0)
    assert view.tokens_per_s_overall == pytest.approx(100.0)
    assert view.eta_s == pytest.approx(80.0)


def test_the_momentary_rate_follows_a_change_within_a_minute() -> None:
    add = Script()
    tokens = 0
    for second in range(0, 200, 10):
        tokens += 1000 if second <= 100 else 0
        add(float(second), "driver", "progress", done=second, total=500, tokens=tokens, bytes=0, skipped=0, failed=0)
    view = view_of(add.events)
    assert view.tokens_per_s == 0.0
    assert view.tokens_per_s_overall == pytest.approx(10_000 / 190)


def test_the_overall_rate_is_that_of_the_summary() -> None:
    """Tokens since the first report over capture and drain alone: kept samples and canaries are not in it."""
    add = Script()
    counts = {"total": 8, "bytes": 0, "skipped": 0, "failed": 0}
    add(0.0, "driver", "progress", done=4, tokens=5_000, **counts)
    for name, begin, seconds in (("capture", 0.1, 20.0), ("drain", 20.1, 5.0), ("canary-end", 25.1, 75.0)):
        add(begin, "driver", "phase", name=name, status="started")
        if name == "capture":
            add(10.1, "driver", "progress", done=6, tokens=5_500, **counts)
            assert view_of(add.events).tokens_per_s_overall == pytest.approx(500 / 10)
        add(begin + seconds, "driver", "phase", name=name, status="done", seconds=seconds)
    add(100.2, "driver", "progress", done=8, tokens=6_000, **counts)
    assert view_of(add.events).tokens_per_s_overall == pytest.approx(1_000 / 25)


def test_a_stage_that_is_started_again_is_a_new_entry() -> None:
    add = Script()
    for begin in (0.0, 10.0):
        add(begin, "controller", "stage", name="watch", status="started")
        add(begin + 4.0, "controller", "stage", name="watch", status="skipped")
    view = view_of(add.events)
    assert [(stage.status, stage.seconds) for stage in view.stages] == [(Status.SKIPPED, 4.0), (Status.SKIPPED, 4.0)]


@pytest.mark.parametrize(("code", "status"), [("rehearsal-skipped", Status.SKIPPED), ("rehearsed", Status.DONE)])
def test_a_rehearsal_that_tried_nothing_is_not_ticked(code: str, status: Status) -> None:
    add = Script()
    add(0.0, "supervisor", "step", name="rehearse", status="started")
    add(0.3, "rehearse", "notice", level="info", code=code, text="5 MB of weights load quickly")
    add(0.4, "supervisor", "step", name="rehearse", status="done")
    assert [(step.name, step.status) for step in view_of(add.events).steps] == [("rehearse", status)]


def test_events_survive_their_file() -> None:
    events = [parse_event(event.to_json()) for event in failing().events]
    read = [event for event in events if isinstance(event, Event)]
    assert view_of(read) == view_of(failing().events)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([7, 1, 2, 2, 5], "1-2, 5, 7")]
)
def test_ranks_as_ranges(numbers: list[int], text: str) -> None:
    assert range_text(numbers) == text


def test_a_pause_has_no_time_left_and_ends_with_room() -> None:
    view = view_of(paused().events)
    assert view.pause is not None
    assert (view.pause.code, view.eta_s, view.disk_full_s) == ("disk-low", None, None)
    after = view_of(freed().events)
    assert after.pause is None
    assert after.eta_s == pytest.approx(48.8)  # 488 samples at the ten a second since the pause
    add = paused()
    add(720.0, "supervisor", "end", end_reason="stopped", exit_code=None, signal=None, message="", gpus_clean=True)
    assert view_of(add.events).pause is None, "an ended run waits for nothing"


def test_a_pause_outlives_the_notices_that_are_kept() -> None:
    add = paused()
    for number in range(2 * NOTICES):
        add(713.0 + number, "driver", "notice", level="warn", code="sample-deferred", text=f"sample {number}")
    assert view_of(add.events).pause is not None


@pytest.mark.parametrize(
    ("writer", "code", "ends"),
    [
        ("driver", "disk-low", ("driver", "notice", {"code": "disk-freed", "level": "info"})),
        ("driver", "disk-full", ("driver", "notice", {"code": "disk-freed", "level": "info"})),
        ("driver", "sample-deferred", ("driver", "phase", {"name": "drain", "status": "done"})),
        ("supervisor", "gpu-query-failed", ("supervisor", "notice", {"code": "gpu-query-works", "level": "info"})),
        ("controller", "events-unwritten", ("controller", "notice", {"code": "events-written", "level": "info"})),
        ("controller", "orphaned", ("supervisor", "end", {"end_reason": "stopped"})),
    ],
)
def test_what_a_later_event_ends_is_no_warning_any_more(
    writer: str, code: str, ends: tuple[str, str, dict[str, Any]]
) -> None:
    add = healthy()
    add(650.0, writer, "notice", level="warn", code=code, text="past")
    add(651.0, writer, "notice", level="warn", code="canary-note", text="stays")
    assert [each.text for each in view_of(add.events).warnings] == ["past", "stays"]
    add(652.0, ends[0], ends[1], **ends[2])
    view = view_of(add.events)
    assert [each.text for each in view.warnings] == ["stays"]
    assert "past" in [each.text for each in view.notices], "the report has all of them"
    if ends[1] == "notice":
        add(653.0, writer, "notice", level="warn", code=code, text="again")
        assert [each.text for each in view_of(add.events).warnings] == ["stays", "again"]

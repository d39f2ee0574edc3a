"""Views without a dashboard, and which view is chosen."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.recorded import RUN, START, Script, failing, finished, freed, healthy, paused, started, view_of

from controller.core.errors import UsageError
from controller.core.events import Event
from controller.core.runview import RunView
from controller.core.state import in_order, reduce
from controller.sinks import TimedSink
from controller.ui.board import Known
from controller.ui.formats import clock_text
from controller.ui.live import LiveView
from controller.ui.plainlines import progress_line, standing_line
from controller.ui.stream import SILENT, JsonView, PlainView, QuietView, SilentView, choose_view


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def plain(script: Script) -> list[str]:
    """Return the lines of a plain view without their times of day."""
    stream, clock = io.StringIO(), Clock()
    view, state = PlainView(stream, clock=clock), RunView()
    for event in script.events:
        clock.now = event.t
        state = reduce(state, event)
        view.event(event)
        view.update(state)
    return [line[10:] for line in stream.getvalue().splitlines()]


def test_a_line_for_each_change() -> None:
    lines = plain(started())
    assert lines[:4] == [
        "connect started",
        "connect done in 0.3 s: root@10.1.230.174",
        "push started",
        "push done in 0.5 s: payload unchanged",
    ]
    assert any(line.startswith("WARN  /dev/shm holds 14.0 GiB") and "(fix: rm /dev/shm" in line for line in lines)
    assert not any("8 GPUs are free" in line for line in lines)  # what is well needs no line
    assert "host: rehearse done in 58 s" in lines
    assert "run 20261129-184150-a1b2c3 is running" in lines
    assert lines[-1] == "job: load started: Kimi-K2.5, TP=8"


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("stopped", "stopped while it was queued; nothing was started",
         "stopped on request: stopped while it was queued; nothing was started"),
        ("lease-busy", "held by run R", "refused: another run holds the host: held by run R; nothing was started"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_that_never_began_casts_no_doubt_on_its_host(reason: str, message: str, said: str) -> None:
    add = Script()
    add(1.0, "supervisor", "state", state="queued", text="held by run R")
    end = {"end_reason": reason, "exit_code": None, "signal": None, "message": message, "gpus_clean": "unknown"}
    add(9.0, "supervisor", "end", **end)
    assert plain(add)[-1] == f"run {RUN} {said}"


def stamps(script: Script, now: float) -> list[str]:
    """Return the times in front of the lines of a plain view that meets all events at `now`."""
    stream = io.StringIO()
    view = PlainView(stream, clock=lambda: now)
    sink = view.sink(run="r", host="h", known=Known())
    for _, event in in_order(script.events):
        sink.event(event)
    return [line.partition("  ")[0] for line in stream.getvalue().splitlines()]


def test_lines_have_the_time_of_what_they_tell_however_late_they_are_printed() -> None:
    then = [clock_text(event.t) for event in finished().events]
    told = stamps(finished(), START + 900.0)
    assert (told[0], told[-1]) == (then[0], then[-1])
    assert set(told) <= set(then)
    days_later = stamps(finished(), START + 3 * 86_400.0)
    day = time.strftime("%Y-%m-%d", time.localtime(START))
    assert days_later == [f"{day} {stamp}" for stamp in told]


def test_a_host_whose_clock_is_ahead_does_not_tell_of_the_future() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainView(stream, clock=clock)
    sink = view.sink(run="r", host="h", known=Known())
    for _, event in in_order(finished().events):
        clock.now = event.t
        sink.event(event if event.writer == "controller" else replace(event, t=event.t + 3600.0))
    told = [line.partition("  ")[0] for line in stream.getvalue().splitlines()]
    assert told == stamps(finished(), START + 900.0)


def test_progress_speaks_once_a_tenth() -> None:
    add = Script()
    for done in range(0, 1001, 5):
        add(done / 10, "driver", "progress", done=done, total=1000, tokens=done, bytes=done, skipped=0, failed=0)
    lines = plain(add)
    assert len(lines) == 10
    assert lines[0].startswith("100 of 1,000 samples (10 %)")
    assert lines[-1].startswith("1,000 of 1,000 samples (100 %)")


def test_samples_of_the_gpus_make_no_lines() -> None:
    assert not any("gpu" in line.lower() for line in plain(healthy()) if "GPUs" not in line)


def test_a_traceback_is_whole_once_and_then_only_named() -> None:
    lines = plain(failing())
    assert sum("Traceback (most recent call last)" in line for line in lines) == 2  # the rank's and the driver's
    start = lines.index(next(line for line in lines if line.startswith("EXCEPTION  rank 3: TypeError")))
    assert lines[start + 1] == "  Traceback (most recent call last):"
    assert "llama_4_scaling" in lines[start + 6]
    assert sum(line.endswith("(same place as rank 3)") for line in lines) == 7
    assert lines[-1] == (
        "run 20261129-184150-a1b2c3 failed while loading the model, after 18 s: "
        "the job ended with exit code 1 in step extract; host left clean"
    )


def test_a_check_that_refuses_is_told_by_the_error_that_follows_and_by_a_replay() -> None:
    event = Script()
    event(0.0, "controller", "finding", level="fail", code="c", what="no weights", why="", fix="copy them")
    state = reduce(RunView(), event.events[0])
    for error_follows, said in ((True, ""), (False, "FAIL  no weights (fix: copy them)\n")):
        stream = io.StringIO()
        PlainView(stream, error_follows=error_follows).update(state)
        assert stream.getvalue()[10:] == said


def test_plain_lines_hold_no_escape_even_from_hostile_events() -> None:
    evil = "\x1b[31mred\x1b]52;c;aGk=\x07\rover"
    add = Script()
    add(0.0, "controller", "stage", name=evil, status="failed", text=evil)
    add(1.0, "controller", "finding", level="fail", code=evil, what=evil, why=evil, fix=evil)
    add(2.0, "driver", "notice", level=evil, code=evil, text=evil)
    add(3.0, "driver", "exception", rank=None, exc_type=evil, message=evil, traceback=evil, where=evil)
    add(4.0, "supervisor", "end", end_reason=evil, message=evil, gpus_clean=evil)
    text = "\n".join(plain(add))
    assert not set(text) & set("\x1b\x07\r")


def test_the_heartbeat_speaks_only_after_silence() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainView(stream, clock=clock)
    run = view.sink(run="r", host="h", known=Known())
    clock.now = START + 80
    view.update(view_of(started().events))
    before = stream.getvalue()
    clock.now += 29
    view.heartbeat()
    assert stream.getvalue() == before
    run.log(b"half a line")  # which is not read as lines, because none are shown
    clock.now += 41
    view.heartbeat()
    (line,) = stream.getvalue()[len(before) :].splitlines()
    assert line[10:] == "still load after 2 min 30 s; no output for 41 s"
    with view.paused():
        clock.now += 100
        view.heartbeat()
    assert stream.getvalue().endswith(line + "\n")


def test_a_line_of_the_log_has_the_time_at_which_it_was_printed() -> None:
    stream, clock = io.StringIO(), Clock()
    clock.now = START + 80
    run = PlainView(stream, clock=clock, show_log=True).sink(run="r", host="h", known=Known())
    assert isinstance(run, TimedSink)
    run.log_at(b"hi\n", START + 75)
    run.log_at(b"from the future\n", START + 99)
    run.log(b"who knows when\n")
    lines = stream.getvalue().splitlines()
    assert lines == [
        f"{clock_text(START + t)}  | {text}"
        for t, text in ((75, "hi"), (80, "from the future"), (80, "who knows when"))
    ]


def test_the_heartbeat_beats_by_itself() -> None:
    spoke = threading.Event()

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            spoke.set()
            return super().write(text)

    with PlainView(Stream(), heartbeat_s=0.05):
        assert spoke.wait(timeout=30)


def test_several_runs_share_the_lines_by_the_names_of_their_hosts() -> None:
    stream = io.StringIO()
    with PlainView(stream) as view:
        for host in ("gpu1", "gpu2"):
            sink = view.sink(run=f"run-{host}", host=host, known=Known())
            for event in started().events[:2]:
                sink.event(event)
    lines = [line[10:] for line in stream.getvalue().splitlines()]
    assert lines[2:] == ["gpu2: connect started", "gpu2: connect done in 0.3 s: root@10.1.230.174"]


def test_runs_on_one_host_are_told_apart_by_the_ends_of_their_ids() -> None:
    stream = io.StringIO()
    with PlainView(stream) as view:
        sinks = [
            view.sink(run=f"20261130-12194{n}-abcde{n}", host=host, known=Known())
            for n, host in enumerate(("a", "a", "b"))
        ]
        for sink in sinks:
            sink.event(started().events[0])
    names = ["a abcde0", "a abcde1", "b"]
    assert [line[10:] for line in stream.getvalue().splitlines()] == [f"{name}: connect started" for name in names]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (started, "running, load for 0 s"),
        (paused, "paused: the disk is full, capture for 2 min 06 s: 412 of 1,000 samples (41 %), 0 tokens/s, "),
        (healthy, "running, capture for 56 s: 412 of 1,000 samples (41 %), 5,361 tokens/s, "),
        (finished, "succeeded: 1,000 of 1,000 samples (100 %), "),
        (failing, "failed while loading the model, after 18 s: 0 of 1,000 samples (0 %)"),
    ],
)
def test_where_a_run_stands_is_a_line(script: Callable[[], Script], line: str) -> None:
    assert standing_line(view_of(script().events)).startswith(line)


def test_a_sign_of_life_names_the_step_at_work_and_no_phase_that_is_done() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainView(stream, clock=clock)
    view.update(view_of([event for event in finished().events if event.t <= START + 730.0]))
    clock.now = START + 760.0
    view.heartbeat()
    assert stream.getvalue().splitlines()[-1][10:].startswith("still verify after 12 min 40 s; 1,000 of 1,000 ")


def test_json_lines_are_the_events_as_recorded() -> None:
    stream = io.StringIO()
    view = JsonView(stream)
    events = healthy().events
    for event in events:
        view.event(event)
    assert stream.getvalue().splitlines() == [event.to_json() for event in events]
    assert all(json.loads(line)["run"] for line in stream.getvalue().splitlines())


@pytest.mark.parametrize(
    ("stream", "environ", "progress", "kind"),
    [
        (Terminal(), {"TERM": "xterm"}, "auto", LiveView),
        (Terminal(), {"TERM": "dumb"}, "auto", PlainView),
        (Terminal(), {}, "auto", PlainView),
        (Terminal(), {"TERM": "xterm", "CI": "true"}, "auto", PlainView),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, "auto", PlainView),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, "auto", LiveView),
        (io.StringIO(), {"TERM": "xterm"}, "auto", PlainView),
        (Terminal(), {"TERM": "xterm"}, "plain", PlainView),
        (Terminal(), {"TERM": "xterm"}, "json", JsonView),
        (Terminal(), {"TERM": "xterm"}, "none", QuietView),
        (Terminal(), {"TERM": "xterm"}, SILENT, SilentView),
    ],
)
def test_the_view_fits_the_terminal(
    stream: io.StringIO, environ: dict[str, str], progress: str, kind: type[object]
) -> None:
    assert type(choose_view(stream, environ, progress)) is kind


def test_an_unknown_mode_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown progress"):
        choose_view(io.StringIO(), {}, "fancy")


def test_plain_needs_no_dashboard() -> None:
    choose = "import sys, controller.ui.stream as s; s.choose_view(sys.stderr, {})"
    code = f"{choose}; print('controller.ui.live' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert done.stdout == "False\n"


def test_a_download_counts_bytes_and_has_no_tokens() -> None:
    view = RunView()
    for number, done in ((1, 1 << 20), (2, 3 << 20)):
        fields = {
            "unit": "bytes",
            "done": done,
            "total": 4 << 20,
            "bytes": done,
            "tokens": 0,
            "skipped": 0,
            "failed": 0,
        }
        event = Event(type="progress", seq=number, run="r", host="h", writer="driver", t=float(number), data=fields)
        view = reduce(view, event)
    assert progress_line(view) == "3.00 MiB of 4.00 MiB (75 %), 2.00 MiB/s, 0.5 s left"


def test_a_pause_is_a_line_and_so_is_its_end() -> None:
    lines = plain(freed())
    begins = lines.index(f"run {RUN} is paused: the disk is full")
    assert begins < lines.index(f"run {RUN} goes on")
    assert "left" not in standing_line(view_of(paused().events))
    stream, clock = io.StringIO(), Clock()
    view = PlainView(stream, clock=clock)
    view.update(view_of(paused().events))
    clock.now = START + 760.0
    view.heartbeat()
    assert stream.getvalue().splitlines()[-1][10:].startswith("paused: the disk is full; still capture after ")

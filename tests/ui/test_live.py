"""What the dashboard adds to the frame: time, several runs, the last frame, and that it never writes to stdout."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pyte
import pytest
from rich.text import Text
from support.recorded import HOST, LOG, RUN, START, failing, finished, healthy, started

from controller.core.events import Event
from controller.ui.board import Diagnosed, Known, RunBoard
from controller.ui.live import LiveView
from controller.ui.painter import SYNC_ON, Painter, ansi
from controller.ui.stream import choose_view


class Clock:
    def __init__(self) -> None:
        self.now = START + 600.0

    def __call__(self) -> float:
        return self.now


class Paper(io.StringIO):
    """A stream whose text can be looked at as a terminal shows it."""

    encoding = "utf-8"  # type: ignore[assignment]

    def screen(self, width: int = 100, height: int = 30) -> list[str]:
        screen = pyte.HistoryScreen(width, height, history=1000)
        pyte.Stream(screen).feed(self.getvalue().replace("\n", "\n"))
        return [line.rstrip() for line in screen.display]


def live(
    stream: io.StringIO | None = None, clock: Clock | None = None, size: tuple[int, int] = (100, 30)
) -> LiveView:
    return LiveView(stream or Paper(), clock=clock or Clock(), size=lambda: size, hold_s=0.0)


def board_of(view: LiveView, events: list[Event], run: str = RUN, host: str = HOST) -> RunBoard:
    board = view.sink(run=run, host=host, known=Known(title="eagle3"))
    for event in events:
        board.event(replace(event, run=run, host=host))
    return board


def shown(view: LiveView, width: int = 100, height: int = 30) -> str:
    return "\n".join(line.plain for line in view.frame(width, height))


def test_the_last_frame_stays(capsys: pytest.CaptureFixture[str]) -> None:
    paper = Paper()
    with live(paper) as view:
        board = board_of(view, started().events)
        board.log(LOG)
        for event in healthy().events:
            board.event(event)
    lines = paper.screen()
    assert any("412/1,000" in line for line in lines)
    assert "running" in lines[0]
    assert lines[-1] == ""  # where the cursor is
    assert paper.getvalue().endswith("\x1b[?25h")
    assert capsys.readouterr().out == ""


def test_a_question_finds_the_screen_free() -> None:
    paper = Paper()
    with live(paper) as view:
        board_of(view, started().events)
        deadline = time.monotonic() + 30
        while "running" not in "".join(paper.screen()) and time.monotonic() < deadline:
            time.sleep(0.02)
        with view.paused():
            paper.write("go on? [y/N]\r\n")
            time.sleep(0.6)
            assert [line for line in paper.screen() if line] == ["go on? [y/N]"]
    assert paper.screen()[0] == "go on? [y/N]"
    assert "running" in paper.screen()[1]  # and the dashboard is back, below it


def test_only_lines_that_changed_are_written_again() -> None:
    paper = Paper()
    view = live(paper)
    board_of(view, healthy().events).log(LOG)
    painter = Painter(paper)
    painter.paint(view.frame(100, 30), (100, 30))
    first = len(paper.getvalue())
    painter.paint(view.frame(100, 30), (100, 30))
    assert len(paper.getvalue()) - first < 200
    before = paper.screen()
    painter.paint(view.frame(60, 20), (60, 20))  # a new size clears what the terminal made of the old lines
    assert "\x1b[H\x1b[J" in paper.getvalue()[first:]
    assert before[0] != paper.screen(60, 20)[0]


def test_a_line_of_full_width_keeps_its_last_cell() -> None:
    """Where nothing wraps the cursor stays on the last cell: xterm and tmux erase it too, unlike the screen here."""
    paper = io.StringIO()
    Painter(paper, colour=False).paint([Text("x" * 19 + "…"), Text("y")], (20, 5))
    screen = pyte.Screen(20, 5)
    pyte.Stream(screen).feed(paper.getvalue())
    assert screen.display[:2] == ["x" * 19 + "…", "y".ljust(20)]
    assert "…\x1b[K" not in paper.getvalue()


def test_there_are_at_most_four_frames_a_second() -> None:
    paper = Paper()
    began = time.monotonic()
    with live(paper) as view:
        board = board_of(view, healthy().events)
        while time.monotonic() < began + 1.5:
            board.log(b"line\n" * 1000)
            view.press("w")
    assert 2 <= paper.getvalue().count(SYNC_ON) <= 4 * (time.monotonic() - began) + 2  # the first, and the last


def test_colours_survive_the_short_way_to_the_terminal() -> None:
    view = live()
    board_of(view, failing().events)
    for line in view.frame(100, 30):
        plain, escaped = line.plain, ansi(line)
        screen = pyte.Screen(100, 1)
        pyte.Stream(screen).feed(escaped)
        assert screen.display[0].rstrip() == plain.rstrip()
        if "✗ failed" in plain:
            assert screen.buffer[0][1].fg == "red"
            assert screen.buffer[0][1].bold


def test_silence_counts_from_the_last_output() -> None:
    clock = Clock()
    view = live(clock=clock)
    board = board_of(view, started().events)
    board.log(LOG)
    clock.now += 90
    assert "no output for 1 min 30 s; load is under way" in shown(view)
    board.log(LOG)
    assert "no output" not in shown(view)


def test_the_clock_of_the_host_may_be_wrong() -> None:
    """Its last event was written now, whatever its clock says: the phase at work has lasted since its start."""
    clock = Clock()
    view = live(clock=clock)
    clock.now = START + 73.2 + 5000.0  # the host is 5,000 s behind; the load has just begun
    board_of(view, started().events)
    clock.now += 30
    assert "load 30 s" in shown(view)


def test_a_rank_lives_by_its_log_its_events_and_its_ledger() -> None:
    clock = Clock()
    view = live(clock=clock)
    known = Known(ranks={0: 0, 1: 1, 2: 2, 3: 3}, written=lambda: {2: clock.now - 7.0, 0: clock.now - 50.0})
    board = view.sink(run=RUN, host=HOST, known=known)
    board.log(b"(Worker_TP0 pid=1) hello\n")
    clock.now += 20
    board.event(Event(type="notice", run=RUN, host=HOST, writer="rank-1", seq=1, t=clock.now, data={}))
    clock.now += 5
    assert board.snapshot().silent == {0: 25.0, 1: 5.0, 2: 7.0}


def test_a_late_look_counts_from_when_it_happened_and_not_from_when_it_came() -> None:
    clock = Clock()
    clock.now = START + 600.0  # an attach, ten minutes after the launch
    known = Known(ranks={0: 0, 1: 1}, written=lambda: {2: START + 90.0}, printed=lambda: START + 100.0)
    board = live(clock=clock).sink(run=RUN, host=HOST, known=known)
    board.event(Event(type="stage", run=RUN, host=HOST, writer="controller", seq=1, t=START, data={"name": "launch"}))
    board.event(Event(type="notice", run=RUN, host=HOST, writer="rank-1", seq=1, t=START + 200.0, data={}))
    board.event(Event(type="progress", run=RUN, host=HOST, writer="driver", seq=1, t=START + 60.0, data={"done": 1}))
    board.log(b"(Worker_TP0 pid=1) hello\n")
    shot = board.snapshot()
    assert shot.silent == {0: 500.0, 1: 400.0, 2: 510.0}
    assert shot.quiet_s == 500.0
    board.event(Event(type="progress", run=RUN, host=HOST, writer="driver", seq=2, t=START + 600.0, data={"done": 2}))
    assert board.snapshot().quiet_s == 0.0


def test_a_log_whose_times_are_not_known_is_as_old_as_its_arrival() -> None:
    clock = Clock()
    board = live(clock=clock).sink(run=RUN, host=HOST, known=Known())
    board.log(b"(Worker_TP0 pid=1) hello\n")
    clock.now += 30
    assert (board.snapshot().quiet_s, board.snapshot().silent) == (30.0, {0: 30.0})


def test_a_failed_run_names_its_cause() -> None:
    view = live()
    cause = {"known": True, "what": "a layer was called wrongly", "why": "it differs", "fix": "use hooks"}
    board = view.sink(run=RUN, host=HOST, known=Known(diagnose=lambda: Diagnosed(cause=cause)))
    for event in failing().events:
        assert "cause:" not in shown(view)
        board.event(event)
    assert "✗ cause: a layer was called wrongly" in shown(view)
    assert "fix: use hooks" in shown(view)


class Terminal(Paper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("error_follows", [True, False])
def test_the_last_frame_leaves_the_failure_to_an_error_that_follows_it(
    monkeypatch: pytest.MonkeyPatch, error_follows: bool
) -> None:
    monkeypatch.setattr("controller.ui.live._is_ours", lambda _: True)
    monkeypatch.setattr("controller.ui.live._size_of", lambda _: (100, 30))
    paper = Terminal()
    view = choose_view(paper, {"TERM": "xterm"}, error_follows=error_follows)
    assert isinstance(view, LiveView)
    with view:
        cause = {"known": True, "what": "a layer was called wrongly", "why": "it differs", "fix": "use hooks"}
        board = view.sink(run=RUN, host=HOST, known=Known(diagnose=lambda: Diagnosed(cause=cause)))
        for event in failing().events:
            board.event(event)
        assert "a layer was called wrongly" in shown(view)
    last = "\n".join(paper.screen())
    assert "failed" in last
    assert ("a layer was called wrongly" in last) is not error_follows
    assert ("Traceback" in last) is not error_follows


def test_several_runs_are_rows_until_one_is_opened() -> None:
    view = live()
    for host, script in (("gpu1", healthy()), ("gpu2", failing()), ("gpu3", finished()), ("gpu4", started())):
        board_of(view, script.events, run=f"run-{host}", host=host)
    text = shown(view, 140)
    rows = {line.split()[-1]: line for line in text.splitlines() if "run-gpu" in line}
    assert "4 runs, 2 under way, 1 succeeded, 1 failed" in text
    assert "capture" in rows["run-gpu1"]
    assert "41 %" in rows["run-gpu1"]
    assert "failed" in rows["run-gpu2"]
    assert "succeeded" in rows["run-gpu3"]
    assert "load" in rows["run-gpu4"]
    view.press("2")
    assert "llama_4_scaling" in shown(view)
    view.press("esc")
    view.press("up")
    view.press("enter")
    assert "412/1,000" in shown(view)
    for width, height in ((60, 20), (20, 5), (200, 60)):
        view.press("esc")
        assert all(len(line) <= width for line in shown(view, width, height).splitlines())


def test_encodings_that_cannot_write_the_signs_get_plain_ones() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with LiveView(stream, clock=Clock(), size=lambda: (80, 24), on_screen=lambda: True, hold_s=0.0) as view:
        board_of(view, failing().events).log("höchst ✗\n".encode())
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    assert b"x\x1b[0m \x1b[1;31mfailed" in raw.getvalue()
    assert b"h?chst ?" in raw.getvalue()

"""The dashboard on a terminal: what it writes, and that it never writes to stdout."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.recorded import START, healthy, log_lines, started, view_of

from controller.core.logs import LogFolder
from controller.ui.live import TAIL, LiveView


class Clock:
    def __init__(self) -> None:
        self.now = START + 600.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 100, height: int = 30) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        width=width,
        height=height,
        legacy_windows=False,
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(view: LiveView, width: int = 100, height: int = 30) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, legacy_windows=False)
    console.print(view.frame(width, height))
    return written(console)


def test_the_last_frame_stays(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    with LiveView(console, clock=Clock()) as view:
        view.update(view_of(started().events))
        view.log(log_lines())
        view.update(view_of(healthy().events))
    last = written(console).rsplit("\x1b[2K", 1)[-1]
    assert "412/1,000" in written(console)
    assert "\x1b[1A" not in last[-200:]  # nothing is wiped after the last frame
    assert capsys.readouterr().out == ""


def test_a_question_finds_the_screen_free() -> None:
    console = terminal()
    with LiveView(console, clock=Clock()) as view:
        view.update(view_of(started().events))
        with view.paused():
            before = written(console)
            console.print("go on? [y/N]")
        assert "go on?" in written(console)[len(before) :]
    assert "running" in written(console)[len(before) :]  # and the dashboard is back


def test_a_finished_line_replaces_the_bar_that_led_to_it() -> None:
    view, folder = LiveView(terminal(), clock=Clock()), LogFolder()
    for piece in (b"\rLoading: 10%", b"\rLoading: 20%"):
        view.log([*folder.feed(piece), *([folder.partial] if folder.partial else [])])
    assert "Loading: 20%" in shown(view)
    assert "Loading: 10%" not in shown(view)
    view.log(folder.feed(b"\rLoading: 100%\nnext\n"))
    assert shown(view).count("Loading") == 1
    assert "next" in shown(view)


def test_the_tail_is_bounded_and_shows_the_newest() -> None:
    view, folder = LiveView(terminal(), clock=Clock()), LogFolder()
    view.log(folder.feed(b"".join(b"line %d\n" % number for number in range(TAIL * 3))))
    assert f"line {TAIL * 3 - 1}" in shown(view)
    assert len(shown(view).splitlines()) < 30


def test_silence_counts_from_the_last_output() -> None:
    clock = Clock()
    view = LiveView(terminal(), clock=clock)
    view.update(view_of(started().events))
    view.log(log_lines())
    clock.now += 90
    assert "no output for 1 min 30 s; load is under way" in shown(view)
    view.log(log_lines())
    assert "no output" not in shown(view)


def test_the_clock_of_the_host_may_be_wrong() -> None:
    """Its last event was written now, whatever its clock says: the phase at work has lasted since its start."""
    clock = Clock()
    view = LiveView(terminal(), clock=clock)
    clock.now = START + 73.2 + 5000.0  # the host is 5,000 s behind; the load has just begun
    view.update(view_of(started().events))
    clock.now += 30
    assert "load 30 s" in shown(view)

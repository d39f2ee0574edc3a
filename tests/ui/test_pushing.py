"""What is shown of a push where no run is watched."""

from __future__ import annotations

import io

from rich.console import Console

from controller.ui.pushing import PushBar


def push(bar: PushBar, done: int, total: int = 400) -> None:
    bar("stage", name="data", status="started", text=f"d[1].jsonl: {done} of {total} bytes", done=done, total=total)


def test_a_terminal_has_a_bar_that_goes_when_all_is_sent() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with PushBar(console) as bar:
        bar("stage", name="connect", status="started")
        bar("stage", name="data", status="started", text="d.jsonl: 400 bytes")
        assert stream.getvalue() == ""  # nothing is sent yet, and perhaps nothing will be
        push(bar, 200)
        bar("stage", name="data", status="done", text="d.jsonl: 400 B sent", seconds=1.0)
        drawn = stream.getvalue()
    assert "sending data" in drawn
    assert "200/400 bytes" in drawn
    assert drawn.endswith("\x1b[2K")  # taken away
    assert stream.getvalue() == drawn


def test_without_a_terminal_a_long_push_says_a_line_now_and_then() -> None:
    stream, times = io.StringIO(), iter([0.0, 3.0, 12.0, 12.0, 15.0, 23.0, 23.0])
    with PushBar(Console(file=stream, width=100), clock=lambda: next(times)) as bar:
        for done in (40, 120, 200, 320):
            push(bar, done)
    assert stream.getvalue() == "data d[1].jsonl: 120 of 400 bytes\ndata d[1].jsonl: 320 of 400 bytes\n"


def test_an_interrupted_push_leaves_the_terminal_as_it_was() -> None:
    stream = io.StringIO()
    with PushBar(Console(file=stream, force_terminal=True, width=100)) as bar:
        push(bar, 100)
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1  # the cursor is back

"""The dashboard on a real terminal, under a real shell, fed by a recorded run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.terminal import Terminal

from controller.ui import keys

CHECKOUT = Path(__file__).parents[2]
RUNS = CHECKOUT / "tests" / "data" / "runs"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    env = os.environ | {"PYTHONPATH": str(CHECKOUT), "HOME": str(tmp_path), "PYTHON": sys.executable}
    with Terminal(tmp_path, env) as session:
        yield session


def replay(name: str, *words: str) -> str:
    return " ".join(["$PYTHON -m controller replay", str(RUNS / name), *words])


def test_every_key_on_a_terminal_and_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.run(replay("running", "--at", "end"))
    terminal.wait_for("412/1,000")
    assert not terminal.cursor_shown()
    terminal.press("?")
    assert "whole traceback" in terminal.wait_for("any key closes this")
    terminal.press(" ")
    terminal.wait_until_gone("any key closes this")
    terminal.press("/v2 model")
    assert "Using V2 Model Runner" in terminal.wait_for("filter: v2 model_")
    assert "wrote hs" not in terminal.text()
    terminal.press("\r\x1b")
    assert "V2 Model" not in terminal.wait_for("wrote hs")
    terminal.press("3")
    terminal.wait_for("─ rank 3 ─")
    terminal.press("r")
    terminal.wait_for("─ rank 4 ─")
    terminal.press("a")
    terminal.wait_until_gone("rank 4 ─")
    terminal.press("s")
    terminal.wait_for("paused, 0 below")
    terminal.press("\x1b[A\x1b[A")
    terminal.wait_for("paused, 2 below")
    terminal.press("G")
    terminal.wait_until_gone("paused")
    terminal.press("f")
    assert "gpu 0" not in terminal.wait_for("first sample")
    terminal.press("w")
    terminal.wait_for("─ wrapped ─")
    terminal.press("q")
    terminal.wait_for("gpu 0")
    terminal.press("x")
    terminal.wait_for("this is a replay")
    terminal.press("q")
    terminal.wait(terminal.cursor_shown, "the cursor")
    assert terminal.answer("echo code $?") == "code 0"
    assert terminal.mode() == (True, True)
    assert "412/1,000" in terminal.history()  # the last frame stays


def test_sizes_change_without_breaking_the_frame(terminal: Terminal) -> None:
    terminal.run(replay("running", "--at", "end"))
    terminal.wait_for("412/1,000")
    for columns, lines in ((60, 20), (200, 60), (80, 24), (60, 20)):
        terminal.resize(columns, lines)
        terminal.wait(lambda: terminal.text().count("● running") == 1 and "412/1,000" in terminal.text(), "a frame")
        terminal.wait(lambda: terminal.lines()[0].startswith(" ● running"), "the frame at the top")
        shown = terminal.lines()
        assert sum(line.startswith(" gpu ") and line[5].isdigit() for line in shown) == 8
        assert sum("samples ━" in line for line in shown) == 1
    terminal.press("q")
    terminal.wait(terminal.cursor_shown, "the cursor")


def test_a_failed_run_is_read_to_the_last_line_of_its_traceback(terminal: Terminal) -> None:
    terminal.resize(60, 20)
    terminal.run(replay("failed", "--at", "end"))
    terminal.wait_for("cause: a decoder layer is called")
    assert "fix:" in terminal.text()
    terminal.press("t")
    terminal.wait_for("lines 1-")
    assert "Traceback (most recent call last)" in terminal.text()
    terminal.resize(60, 10)
    terminal.wait_for("lines 1-7 of 15")
    terminal.press("\x1b[6~\x1b[6~")
    assert "RuntimeError: Engine core" in terminal.wait_for("lines 9-15 of 15")
    terminal.press("tq")
    terminal.wait(terminal.cursor_shown, "the cursor")


def test_a_stopped_dashboard_gives_the_terminal_back_and_returns(terminal: Terminal) -> None:
    terminal.run(replay("running", "--at", "end"))
    terminal.wait_for("412/1,000")
    terminal.press("\x1a")
    terminal.wait_for("Stopped")
    assert terminal.cursor_shown()
    assert terminal.answer("echo free $((6 * 7))") == "free 42"
    terminal.run("fg")
    terminal.wait(lambda: terminal.text().count("412/1,000") == 1, "the frame again")
    terminal.press("?")
    terminal.wait_for("any key closes this")  # and the keys with it
    terminal.press("\x1b\x1a")
    terminal.wait(lambda: terminal.text().count("Stopped") >= 2 or "any key" not in terminal.text(), "a stop")
    terminal.run("bg")
    terminal.wait_for("&")
    assert terminal.answer("echo mine $((6 * 7))") == "mine 42"  # in the background it neither draws nor reads
    terminal.run("fg")
    terminal.wait(lambda: not terminal.cursor_shown(), "the frame")
    terminal.press("\x03")
    terminal.wait(terminal.cursor_shown, "the cursor")
    assert terminal.mode() == (True, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_with_the_terminal_as_it_was(
    terminal: Terminal, tmp_path: Path, number: signal.Signals
) -> None:
    terminal.run(f"sh -c 'echo $$ >pid; exec {replay('running', '--at', 'end')}'")
    terminal.wait_for("412/1,000")
    terminal.wait(lambda: terminal.mode() == (False, False), "keys without an echo")
    os.kill(int((tmp_path / "pid").read_text()), number)
    terminal.wait(terminal.cursor_shown, "the cursor")
    code = 0 if number is signal.SIGINT else 128 + number
    assert terminal.answer("echo code $?") == f"code {code}"
    assert terminal.mode() == (True, True)


def test_a_terminal_that_is_gone_ends_a_replay_that_hears_no_hang_up(terminal: Terminal, tmp_path: Path) -> None:
    terminal.run(f"sh -c 'trap \"\" HUP; echo $$ >pid; exec {replay('running', '--at', 'end')}'")
    terminal.wait_for("412/1,000")
    terminal.wait(lambda: terminal.mode() == (False, False), "keys without an echo")
    pid = int((tmp_path / "pid").read_text())
    terminal.hang_up()
    deadline = time.monotonic() + 30.0
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "it waits for a key that nobody can press"
        time.sleep(0.05)


def test_a_terminal_that_is_gone_ends_the_reader_and_its_end_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setattr(keys, "in_foreground", lambda _: True)
    reader = keys.KeyReader(theirs, lambda key: None)
    reader.start()
    (thread,) = [each for each in threading.enumerate() if each.name == "ctl-keys"]
    os.close(ours)
    thread.join(60.0)
    assert not thread.is_alive()
    assert reader.gone
    monkeypatch.setattr(keys, "in_foreground", lambda _: False)
    reader.stop()
    assert not reader.running
    assert not reader.gone
    os.close(theirs)

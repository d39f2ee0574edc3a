"""Several hosts at once, and Ctrl-C while one of them hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from controller.sidebyside import side_by_side

HANGS = """
import os, sys, time
from controller.sidebyside import side_by_side

def look(seconds):
    os.write(1, b"looking\\n")  # of two threads at once, `print` may write the words first and then both ends of line
    time.sleep(seconds)

try:
    side_by_side(look, [600.0] * 4, at_once=2)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_answers_come_in_order_and_no_more_than_allowed_at_once() -> None:
    lock, now, most = threading.Lock(), 0, 0
    both = threading.Barrier(2)

    def work(item: int) -> int | None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        both.wait(60)
        with lock:
            now -= 1
        return item * 2 if item else None

    assert side_by_side(work, range(6), at_once=2) == [None, 2, 4, 6, 8, 10]
    assert most == 2
    assert side_by_side(work, [], at_once=2) == []


def test_the_first_error_is_raised_and_nothing_else_is_waited_for() -> None:
    release = threading.Event()

    def work(item: int) -> None:
        if item:
            release.wait(600)
        raise ValueError(item)

    try:
        with pytest.raises(ValueError, match="0"):
            side_by_side(work, [1, 0], at_once=2)
    finally:
        release.set()


def test_ctrl_c_ends_the_program_while_hosts_hang() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        for _ in range(2):
            assert program.stdout.readline() == b"looking\n"
        program.send_signal(signal.SIGINT)
        try:
            assert program.wait(120) == 130
        finally:
            program.kill()

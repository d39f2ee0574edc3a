"""A child that is asked about one file after the other, and what its deaths cost."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from remote_payload.host import asked
from remote_payload.host.asked import AskedChild, ChildDied

ECHO = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request.get("hang"):
        time.sleep(300)
    if request.get("die"):
        os._exit(3)
    print(json.dumps({"pid": os.getpid(), **request}), flush=True)
"""
LONG_S = 120.0


@pytest.fixture
def child() -> Any:
    child = AskedChild([sys.executable, "-c", ECHO])
    yield child
    child.end()


def test_one_child_answers_all(child: AskedChild) -> None:
    first, second = (child.ask({"number": number}, LONG_S) for number in (1, 2))
    assert (first["number"], second["number"]) == (1, 2)
    assert first["pid"] == second["pid"]
    assert child.end() == 0


def test_a_child_that_dies_or_hangs_costs_its_own_answer_only(child: AskedChild) -> None:
    with pytest.raises(ChildDied, match="exit code 3"):
        child.ask({"die": True}, LONG_S)
    assert child.ask({"number": 1}, LONG_S)["number"] == 1
    with pytest.raises(ChildDied, match="exit code -9"):
        child.ask({"hang": True}, 0.2)
    assert child.ask({"number": 2}, LONG_S)["number"] == 2


def test_a_deadline_between_answer_and_its_end_takes_no_other_answer_along(
    child: AskedChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = asked._Deadline.over

    def just_before(deadline: asked._Deadline) -> bool:
        deadline._fire()
        return over(deadline)

    monkeypatch.setattr(asked._Deadline, "over", just_before)
    first = child.ask({"number": 1}, LONG_S)  # whole when the timer fired
    second = child.ask({"number": 2}, LONG_S)
    assert (first["number"], second["number"]) == (1, 2)
    assert first["pid"] != second["pid"]


def test_a_deadline_after_its_end_kills_nobody(child: AskedChild, monkeypatch: pytest.MonkeyPatch) -> None:
    over = asked._Deadline.over

    def just_after(deadline: asked._Deadline) -> bool:
        killed = over(deadline)
        deadline._fire()
        return killed

    monkeypatch.setattr(asked._Deadline, "over", just_after)
    assert child.ask({}, LONG_S)["pid"] == child.ask({}, LONG_S)["pid"]


def test_a_child_that_was_ended_while_idle_is_replaced(child: AskedChild) -> None:
    pid = child.ask({}, LONG_S)["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert child.ask({}, LONG_S)["pid"] != pid

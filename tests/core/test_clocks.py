"""When the events of a host happened by this machine's clock."""

from __future__ import annotations

import pytest
from support.recorded import START, Script

from controller.core.clocks import HostClock
from controller.core.events import Event


def launched(skew_s: float) -> list[Event]:
    """A launch that takes a second, and a step that begins 60 s later, on a host whose clock is `skew_s` ahead."""
    add = Script()
    add(10.0, "controller", "stage", name="launch", status="started")
    add(10.5 + skew_s, "supervisor", "state", state="launching")
    add(11.0, "controller", "stage", name="launch", status="done")
    add(70.0 + skew_s, "supervisor", "step", name="verify", status="started")
    return add.events


@pytest.mark.parametrize("skew_s", [0.0, 300.0, -300.0])
@pytest.mark.parametrize("late_s", [0.0, 0.2])
def test_a_clock_that_is_wrong_is_seen_live(skew_s: float, late_s: float) -> None:
    clock = HostClock()
    for event in launched(skew_s):
        clock.heard(event, event.t - (skew_s if event.writer != "controller" else 0.0) + late_s)
    assert clock.here(event) == pytest.approx(START + 70.0, abs=0.5 + late_s)
    if not skew_s:
        assert clock.here(event) == event.t, "nothing is corrected that may be right"


@pytest.mark.parametrize("skew_s", [0.0, -300.0])
def test_old_events_are_not_taken_for_a_slow_clock(skew_s: float) -> None:
    clock = HostClock()
    for event in launched(skew_s):
        clock.heard(event, START + 86_400.0)
    assert clock.here(event) == pytest.approx(START + 70.0, abs=0.5)


def test_without_the_launch_an_old_event_has_its_own_time() -> None:
    """As in a run that another workstation launched."""
    clock = HostClock()
    for event in launched(0.0):
        if event.writer != "controller":
            clock.heard(event, START + 86_400.0)
    assert clock.here(event) == event.t


def test_an_event_of_this_machine_is_never_corrected() -> None:
    clock = HostClock()
    first, *_ = events = launched(300.0)
    for event in events:
        clock.heard(event, event.t)
    assert clock.here(first) == first.t

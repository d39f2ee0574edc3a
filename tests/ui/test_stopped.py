"""What is said of a stop: what it ended, what it cut off, what is left, and that it came too late."""

from __future__ import annotations

from support.printed import Paper
from support.recorded import RUN

from controller.ui.stopped import print_stop


def test_a_stop_names_what_is_left() -> None:
    paper = Paper()
    record = {"run_id": RUN, "state": "finished", "end_reason": "stopped", "gpus_clean": False}
    sent = [(7, "SIGTERM"), (8, "SIGTERM"), (7, "SIGKILL")]
    record["killed"] = [{"pid": pid, "comm": "python", "signal": number} for pid, number in sent]
    left = [
        {"path": "/dev/shm/x", "reason": "busy", "ours": True},
        {"pid": 7, "comm": "python", "reason": "lives on"},
    ]
    print_stop(paper.console, {**record, "leftovers": left, "message": "after TERM"})
    assert paper.lines == [
        f"! run {RUN}: stopped on request",
        "  after TERM; host is not clean yet; killed by force: 1",
        "  left: /dev/shm/x (busy)",
        "  left: 7 python (lives on)",
    ]
    paper = Paper()
    print_stop(paper.console, {**record, "gpus_clean": True, "leftovers": left[:1], "message": "", "killed": []})
    assert paper.lines[1:] == ["  no process is left", "  left: /dev/shm/x (busy)"]


def test_a_stop_says_what_it_cut_off() -> None:
    paper = Paper()
    record = {
        "run_id": RUN, "state": "finished", "end_reason": "stopped", "gpus_clean": True,
        "message": "stopped on request", "samples": {"expected": 200, "written": 0},
        "last_stage": {"step": "extract", "phase": "load", "seconds": 192.0},
    }  # fmt: skip
    print_stop(paper.console, record)
    assert paper.lines == [
        f"✓ run {RUN}: stopped on request while loading the model, after 3 min 12 s",
        "  0 of 200 samples; host left clean",
    ]


def test_what_other_people_have_on_the_host_is_not_said_to_be_left() -> None:
    paper = Paper()
    others = {"path": "/dev/shm/psm_1", "reason": "in use by process 22222", "pid": 22222, "ours": False}
    record = {"run_id": RUN, "state": "finished", "gpus_clean": True, "leftovers": [others]}
    print_stop(paper.console, {**record, "end_reason": "stopped", "message": "stopped on request"})
    assert paper.lines == [
        f"✓ run {RUN}: stopped on request",
        "  host left clean",
        "  not ours: /dev/shm/psm_1 (in use by process 22222)",
    ]


def test_a_stop_of_an_ended_run_says_that_nothing_was_stopped() -> None:
    paper = Paper()
    record = {
        "run_id": RUN, "state": "finished", "end_reason": "succeeded", "gpus_clean": True,
        "message": "all steps succeeded", "ended": "2026-11-30T08:31:07Z",
        "killed": [{"pid": 7, "comm": "python", "signal": "SIGKILL"}],
    }  # fmt: skip
    print_stop(paper.console, record, had_ended=True, untouched=True)
    assert paper.lines == [
        f"✓ run {RUN} had already ended at 2026-11-30T08:31:07Z: succeeded",
        "  nothing was stopped; all steps succeeded; host left clean",
    ]
    paper = Paper()
    message = "all steps succeeded; what it had left was looked at again: 1 process ended"
    print_stop(paper.console, {**record, "message": message}, had_ended=True)
    assert paper.lines == [
        f"✓ run {RUN} had already ended at 2026-11-30T08:31:07Z: succeeded",
        f"  {message}; host left clean; killed by force: 1",
    ]


def test_a_stop_of_a_run_that_had_failed_is_no_success() -> None:
    paper = Paper()
    record = {"run_id": RUN, "state": "finished", "end_reason": "job-failed", "gpus_clean": True, "message": "exit 1"}
    print_stop(paper.console, record)
    assert paper.lines == [f"✗ run {RUN}: failed", "  exit 1; host left clean"]

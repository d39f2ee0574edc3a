"""Errors, failures and problems in print: what, why, how to go on, a traceback whole and once."""

from __future__ import annotations

from support.printed import Paper
from support.recorded import failing, view_of

from controller.core.errors import HostKeyError
from controller.core.tracebacks import Failure, fold
from controller.ui.errors import print_error, print_failures, print_problems


def test_an_error_says_what_why_and_how_to_go_on() -> None:
    paper = Paper()
    error = HostKeyError(
        "the key of 10.1.230.174 has changed", why="known: a\noffered: b", fix="`ssh-keygen -R 10.1.230.174`"
    )
    print_error(error, paper.console)
    assert paper.lines == [
        "✗ the key of 10.1.230.174 has changed",
        "  known: a",
        "  offered: b",
        "",
        "  hint: `ssh-keygen -R 10.1.230.174`",
        "  code: host-key",
    ]


def test_a_workers_traceback_is_whole_and_once() -> None:
    paper = Paper()
    print_failures(view_of(failing().events).exceptions, "ctl-runs/x/log", paper.console)
    trace = [line.strip() for line in failing().events[-12].data["traceback"].splitlines()]
    stripped = [line.strip() for line in paper.lines]
    assert stripped[0].startswith("✗ rank 3: TypeError: DeepseekV2DecoderLayer.forward()")
    assert stripped[1 : 1 + len(trace)] == trace
    assert stripped.count("Traceback (most recent call last):") == 1
    assert "same on ranks 0-2, 4-7" in stripped
    assert stripped[-2].startswith("then driver: RuntimeError: Engine core initialization failed")
    assert stripped[-1] == "raw log: ctl-runs/x/log"


def test_a_message_of_several_lines_keeps_them_in_the_headline() -> None:
    paper = Paper()
    told = "1 validation error for SchedulerConfig\nmax_num_seqs\n  Input should be a valid integer"
    failure = Failure(
        source="driver", rank=None, exc_type="ValidationError", message=told, traceback="Traceback", where="driver"
    )
    print_failures(fold([failure]), None, paper.console)
    assert paper.lines[:3] == [
        "✗ driver: ValidationError: 1 validation error for SchedulerConfig, at driver",
        "  max_num_seqs",
        "    Input should be a valid integer",
    ]


def test_problems_of_a_summary_are_exceptions_first() -> None:
    paper = Paper()
    trace = 'Traceback (most recent call last):\n  File "/w.py", line 1, in f\nAssertionError'
    problems = [
        {
            "code": "exception",
            "what": "RuntimeError: see above",
            "traceback": "Traceback",
            "rank": None,
            "ranks": [None],
        },
        {"code": "exception", "what": "AssertionError", "traceback": trace, "rank": 1, "ranks": [1, 0]},
        {"code": "job-failed", "what": "exit code 1", "why": "", "fix": "read the log"},
    ]
    print_problems(problems, "log", paper.console)
    assert paper.lines[0] == "✗ rank 1: AssertionError"
    assert "  same on rank 0" in paper.lines
    assert "  then driver: RuntimeError: see above" in paper.lines
    assert paper.lines[-4:] == ["✗ exit code 1", "", "  hint: read the log", "  code: job-failed"]


def test_messages_that_differ_are_not_lost() -> None:
    paper = Paper()
    trace = 'Traceback (most recent call last):\n  File "/w.py", line 1, in f\nOSError: '
    problems = [
        {
            "code": "exception",
            "what": f"OSError: no file {rank}",
            "traceback": f"{trace}no file {rank}",
            "ranks": [rank],
        }
        for rank in (0, 1)
    ]
    print_problems(problems, None, paper.console)
    assert "    there, rank 1: no file 1" in paper.lines

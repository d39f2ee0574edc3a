"""How the end of a failed run reads: its exception or its known cause as the headline, each thing once."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from controller.core.tracebacks import process_label
from controller.ui.failed import print_failure

TRACE = 'Traceback (most recent call last):\n  File "/w.py", line 3, in f\nValueError: bad shape'
UNKNOWN = {
    "known": False, "code": "unknown", "what": "ValueError: bad shape, at /w.py:3 in f", "why": "", "fix": "",
    "exception": "ValueError: bad shape", "where": "/w.py:3 in f", "traceback": TRACE, "rank": None, "ranks": [],
    "source": "py-25907-c1140e", "evidence": [{"text": "ValueError: bad shape", "segment": "log/1.log", "line": 3}],
    "context": [],
}  # fmt: skip
END = {"code": "job-failed", "what": "command exited with code 1", "why": "", "fix": "read the log"}
RAISED = {
    "code": "exception", "what": "ValueError: bad shape", "traceback": TRACE, "where": "/w.py:3 in f", "rank": None,
    "ranks": [None], "writer": "py-25907-c1140e",
}  # fmt: skip


def printed(problems: list[dict[str, Any]], cause: dict[str, Any] | None, *, whole: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    print_failure(problems, cause, Path("log"), console, end_reason="job-failed", whole=whole)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_an_exception_of_no_known_cause_is_the_headline_and_is_told_once() -> None:
    for problems in ([RAISED, END], [END]):  # told by an event, or by the log alone
        lines = printed(problems, UNKNOWN)
        assert lines[0] == "✗ process 25907: ValueError: bad shape, at /w.py:3 in f"
        assert [line for line in lines if "Traceback" in line] == ["  Traceback (most recent call last):"]
        assert lines[-2:] == ["  raw log: log", "  unknown cause; in the log: log/1.log:3"]


def test_the_end_is_said_where_no_error_follows_that_says_it() -> None:
    assert "command exited" not in "\n".join(printed([RAISED, END], UNKNOWN))
    assert "✗ command exited with code 1" in printed([RAISED, END], UNKNOWN, whole=True)
    assert printed([END], None) == []


def test_a_known_cause_keeps_its_words() -> None:
    known = {**UNKNOWN, "known": True, "code": "disk-full", "what": "the disk is full", "fix": "make room"}
    lines = printed([RAISED, END], known, whole=True)
    assert "✗ cause: the disk is full, first on process 25907" in lines
    assert "  hint: make room" in lines
    assert "  hint: make room" not in printed([RAISED, END], known)


def test_a_process_has_one_name() -> None:
    assert process_label("py-25907-c1140e", None) == "process 25907"
    assert process_label("py-25907-c1140e", 3) == "rank 3"
    assert (process_label("driver", None), process_label("", None)) == ("driver", "main process")

"""How the end of a failed run reads: its exception or its known cause as the headline, each thing once."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rich.console import Console

from controller.core.errors import CtlError
from controller.core.events import Event
from controller.core.runview import RunView
from controller.core.state import reduce
from controller.core.tracebacks import process_label
from controller.ui.failed import print_failure
from controller.ui.stream import PlainView

TRACE = 'Traceback (most recent call last):\n  File "/w.py", line 3, in f\nValueError: bad shape'
UNKNOWN = {
    "known": False, "code": "unknown", "what": "ValueError: bad shape, at /w.py:3 in f", "why": "", "fix": "",
    "exception": "ValueError: bad shape", "where": "/w.py:3 in f", "traceback": TRACE, "rank": None, "ranks": [],
    "source": "py-25907-c1140e", "evidence": [{"text": "ValueError: bad shape", "segment": "log/1.log", "line": 3}],
    "context": [],
}  # fmt: skip
KNOWN = {**UNKNOWN, "known": True, "code": "disk-full", "what": "the disk is full", "fix": "make room"}
END = {"code": "job-failed", "what": "command exited with code 1", "why": "", "fix": "read the log"}
RAISED = {
    "code": "exception", "what": "ValueError: bad shape", "traceback": TRACE, "where": "/w.py:3 in f", "rank": None,
    "ranks": [None], "writer": "py-25907-c1140e",
}  # fmt: skip


def printed(
    problems: list[dict[str, Any]], cause: dict[str, Any] | None, *, told: Collection[tuple[object, ...]] = ()
) -> list[str]:
    file = io.StringIO()
    error = CtlError("run r ended", fix=str((cause or {}).get("fix") or "read the log"), code="job-failed")
    print_failure(problems, cause, Path("log"), Console(file=file, width=120), error=error, told=told)
    return file.getvalue().splitlines()


def test_an_exception_of_no_known_cause_is_the_headline_and_is_told_once() -> None:
    for problems in ([RAISED, END], [END]):  # told by an event, or by the log alone
        lines = printed(problems, UNKNOWN)
        assert lines[0] == "✗ process 25907: ValueError: bad shape, at /w.py:3 in f"
        assert [line for line in lines if "Traceback" in line] == ["  Traceback (most recent call last):"]
        assert lines[-2:] == ["  raw log: log", "  unknown cause; in the log: log/1.log:3"]


def test_the_end_and_the_remedy_are_left_to_the_error_that_follows() -> None:
    assert "command exited" not in "\n".join(printed([RAISED, END], UNKNOWN))
    assert printed([END], None) == []


def test_a_known_cause_comes_first_and_keeps_its_words() -> None:
    lines = printed([RAISED, END], KNOWN)
    assert lines[0] == "✗ cause: the disk is full, first on process 25907 (disk-full)"
    assert lines[2] == "✗ process 25907: ValueError: bad shape, at /w.py:3 in f"
    assert "make room" not in "\n".join(lines)


def test_a_quote_that_only_repeats_the_cause_is_left_out() -> None:
    quotes = [{"text": "OSError: the disk is full", "segment": "events/driver.jsonl", "line": 0}]
    assert not any("evidence" in line for line in printed([END], {**KNOWN, "evidence": quotes}))
    placed = [{**quotes[0], "segment": "log/1.log", "line": 3}]
    assert "  evidence: log/1.log:3  OSError: the disk is full" in printed([END], {**KNOWN, "evidence": placed})


def test_a_traceback_that_stands_above_is_not_repeated() -> None:
    view = PlainView(io.StringIO())
    event = Event(
        type="exception", seq=1, run="r", host="h", writer="py-25907-c1140e", t=1.0,
        data={key: RAISED.get(key) for key in ("rank", "traceback", "where")}
        | {"exc_type": "ValueError", "message": "bad shape"},
    )  # fmt: skip
    view.update(reduce(RunView(), event))
    assert printed([RAISED, END], KNOWN, told=view.told) == [
        "✗ cause: the disk is full, first on process 25907 (disk-full)",
        "  evidence: log/1.log:3  ValueError: bad shape",
        "  raw log: log",
    ]
    assert printed([RAISED, END], UNKNOWN, told=view.told) == [
        "✗ process 25907: ValueError: bad shape, at /w.py:3 in f",
        "  its traceback stands above",
        "  raw log: log",
        "  unknown cause; in the log: log/1.log:3",
    ]
    assert "  Traceback (most recent call last):" in printed([RAISED, END], KNOWN, told=PlainView(io.StringIO()).told)


def test_a_process_has_one_name() -> None:
    assert process_label("py-25907-c1140e", None) == "process 25907"
    assert process_label("py-25907-c1140e", 3) == "rank 3"
    assert (process_label("driver", None), process_label("", None)) == ("driver", "main process")

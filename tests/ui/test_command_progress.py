"""What a command says of its progress, on the dashboard, on plain lines, and its files in a summary."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from controller.core.events import Event
from controller.core.runview import RunView
from controller.core.state import reduce
from controller.ui.glyphs import UNICODE
from controller.ui.plainlines import progress_line
from controller.ui.progresslines import progress_lines
from controller.ui.stacks import print_stacks
from controller.ui.tables import print_summary


def view_of(*records: dict[str, Any]) -> RunView:
    view = RunView()
    for number, data in enumerate(records, 1):
        event = Event(type="progress", run="r", host="h", writer="driver", seq=number, t=100.0 + number, data=data)
        view = reduce(view, event)
    return view


def test_it_counts_in_its_own_unit_and_shows_its_values() -> None:
    record = {"done": 3, "total": 12, "unit": "steps", "values": {"loss": 2.5, "phase": "warm\x1b[31mup"}}
    view = view_of({**record, "done": 1}, record)
    assert progress_line(view).startswith("3 of 12 steps (25 %), loss 2.5, phase warm")
    assert "\x1b" not in progress_line(view)
    bar, figures = (line.plain for line in progress_lines(view, 100, UNICODE, roomy=True))
    assert bar.startswith(" steps ")
    assert "loss 2.5" in figures
    assert "tokens" not in figures
    assert "0 B" not in figures


def test_without_a_total_it_says_what_is_done() -> None:
    view = view_of({"done": 7, "total": None, "unit": "a very long unit", "tokens": 50, "values": "not a table"})
    assert progress_line(view).startswith("7 a very long unit")
    assert progress_lines(view, 60, UNICODE, roomy=False)[0].plain.startswith(" a very  ")


def printed(show: Any, *words: Any) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=120), *words)
    return stream.getvalue()


def test_a_survey_is_a_table_of_groups() -> None:
    survey = {
        "files": 1003, "bytes": 5 << 20, "records": 0, "other_files": 2, "groups_left_out": 0,
        "groups": [
            {
                "kind": "torch", "files": 1000, "bytes": 5 << 20, "records": None, "example": "data_0.pt",
                "tensors_left_out": 0,
                "tensors": [{"name": "h[*]", "dtype": "bfloat16", "shape": [[7, 512], 4096], "count": 4000}],
            }
        ],
        "unread": [{"kind": "parquet", "files": 1, "why": "no pyarrow in the host's `python`"}],
        "damaged": [{"path": "/o/data_1.pt", "why": "it is cut"}],
        "nan": {"files": 16, "of_files": 1000, "values": 1_000_000, "nan": 3, "inf": 0, "first": "/o/data_9.pt"},
    }  # fmt: skip
    text = printed(print_summary, {"run_id": "r", "end_reason": "succeeded", "survey": survey})
    assert "7-512 x 4096" in text
    assert "1,000  data_0.pt" in text
    assert "3 NaN, 0 Inf in 1,000,000 values of 16 of 1,000 files, first in /o/data_9.pt" in " ".join(text.split())
    assert "no pyarrow" in text
    assert "/o/data_1.pt: it is cut" in text


def test_equal_stacks_are_shown_once() -> None:
    stack = 'Process 5: python job.py\nPython v3.11\n\nThread 5 (idle): "MainThread"\n    wait (job.py:5)\n'
    other = {"pid": 8, "rank": None, "process": "python", "error": "py-spy exited 1: denied"}
    ranks = [{"pid": 5 + rank, "rank": rank, "process": "python", "stacks": stack} for rank in range(2)]
    text = printed(print_stacks, [*ranks, other])
    assert text.count("wait (job.py:5)") == 1
    assert "rank 1  process 6: as rank 0" in text
    assert "denied" in text

"""What `ctl prune` shows: each folder that may go, and of one that an earlier prune left half, that it is that."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from controller.ui.pruned import print_prunable


def test_the_rest_of_an_earlier_prune_is_called_that() -> None:
    row: dict[str, Any] = {
        "run_id": "20260101-000000-abcdef", "folder": "20260101-000000-abcdef", "unfinished": False, "name": "probe",
        "kind": "command", "state": "finished", "end_reason": "succeeded", "ended": "2026-01-01T00:00:00Z",
        "entries": 9, "bytes": 1000, "digest": "d",
    }  # fmt: skip
    blank = dict.fromkeys(("name", "kind", "state", "end_reason", "ended"))
    rest = {**row, **blank, "run_id": "20250101-000000-abcdef", "unfinished": True}
    lost = {**row, "run_id": "20240101-000000-abcdef", "state": "lost", "end_reason": None}
    console = Console(file=io.StringIO(), width=160)
    print_prunable(console, "gpu1", {"runs": [rest, row, lost], "kept": []})
    assert isinstance(console.file, io.StringIO)
    lines = {line[:22]: line for line in console.file.getvalue().splitlines()}
    assert "its deletion was cut off" in lines["20250101-000000-abcdef"]
    assert "succeeded" in lines["20260101-000000-abcdef"]
    assert "lost" in lines["20240101-000000-abcdef"]

"""What `ctl prune` shows: each folder that may go, and of one that an earlier prune left half, that it is that."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from controller.ui.pruned import NAMED, print_prunable, print_pruned


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


def kept(number: int, why: str, size: int | None = 1024) -> dict[str, Any]:
    return {
        "run_id": f"20260101-000000-{number:06x}",
        "why": why.format(f"20260101-000000-{number:06x}"),
        "bytes": size,
    }


def test_what_stays_is_told_by_its_reason_and_in_one_unit() -> None:
    copies = [kept(number, "its records are not here: `ctl attach {}`", 1536) for number in range(NAMED + 2)]
    rows = [kept(90, "/out is marked as its output"), *copies, kept(91, "it is gone", None)]
    console = Console(file=io.StringIO(), width=400)
    print_prunable(console, "gpu1", {"runs": [], "kept": rows})
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[1] == "kept, because it may be needed: 16 run folders (22.0 KiB)"
    assert lines[2] == "  14 runs: its records are not here: `ctl attach RUN`"
    assert lines[3].split(" and ") == ["      " + ", ".join(each["run_id"] for each in copies[:NAMED]), "2 more"]
    assert [line.split(" run: ")[-1] for line in lines[4::2]] == ["/out is marked as its output", "it is gone"]


def test_the_total_is_told_before_and_after() -> None:
    row = {
        "folder": "f", "unfinished": False, "name": "probe", "kind": "command", "state": "finished",
        "end_reason": "succeeded", "ended": "2026-01-01T00:00:00Z", "entries": 9, "bytes": 700 * 1024, "digest": "d",
    }  # fmt: skip
    runs = [{**row, "run_id": f"20260101-000000-{number:06x}"} for number in range(3)]
    console = Console(file=io.StringIO(), width=160)
    print_prunable(console, "gpu1", {"runs": runs, "kept": []})
    document = {"host": "gpu1", "deleted": [each["run_id"] for each in runs], "deleted_bytes": 3 * 700 * 1024}
    print_pruned(console, document)
    assert isinstance(console.file, io.StringIO)
    *_, before, after = console.file.getvalue().splitlines()
    assert before == "3 run folders (2.05 MiB) in all"
    assert after.endswith("gpu1: 3 run folders deleted, 2.05 MiB freed")
    assert "bytes" not in console.file.getvalue()

"""What a view is told beside the events: when a rank wrote, and when the log was printed, by the host's clock."""

from __future__ import annotations

import json
import os
from pathlib import Path

from controller.known import printed_at, written_at
from controller.runfolder import RunFolder

RUN_ID = "20260102-030405-abcdef"


def lines(path: Path, *records: object, rest: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + rest)


def test_times_are_those_of_the_records_and_not_of_their_copy(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RUN_ID)
    assert (written_at(folder), printed_at(folder)) == ({}, None)
    lines(folder.path / "ledger" / "rank-0.jsonl", {"index": 0, "t": 100.5}, {"index": 2, "t": 130.5}, rest='{"ind')
    lines(folder.path / "ledger" / "rank-1.jsonl", {"index": 1})  # of an earlier version
    os.utime(folder.path / "ledger" / "rank-1.jsonl", (77.0, 77.0))
    lines(folder.path / "ledger" / "driver.jsonl", {"index": 3, "skipped": "malformed", "t": 9.0})
    assert written_at(folder) == {0: 130.5, 1: 77.0}
    lines(
        folder.path / "log" / "times.jsonl", {"t": 5.0, "segment": "000001.log"}, {"t": 6.25, "segment": "000001.log"}
    )
    assert printed_at(folder) == 6.25

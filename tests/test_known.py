"""What a view is told beside the events: when a rank wrote, and when the log was printed, by the host's clock."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from controller.known import printed_at, usual_seconds, written_at
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


def test_usual_times_of_what_takes_as_long_as_there_are_samples_are_of_runs_of_as_many(tmp_path: Path) -> None:
    def run(name: str, most: int | None, capture: float, kept: int = 0) -> Path:
        folder = tmp_path / name
        base = {"run": RUN_ID, "host": "box", "writer": "driver", "t": 1.0}
        progress = {"done": kept, "total": 60, "tokens": 0, "bytes": 0, "skipped": 0, "failed": 0}
        timed = [
            ("phase", "data", 4.0),
            ("phase", "load", 20.0),
            ("phase", "capture", capture),
            ("step", "verify", 9.0),
        ]
        records = [{"type": kind, "name": each, "status": "done", "seconds": took} for kind, each, took in timed]
        reports = [{"type": "progress", **progress}, {"type": "progress", **progress, "done": 60}]
        lines(
            folder / "events" / "driver.jsonl",
            *({**base, "seq": seq, **record} for seq, record in enumerate([*reports, *records])),
        )
        lines(folder / "plan.json", {"extract": {"data": "/d", "max_samples": most, "shard": [1, 1]}})
        return folder

    whole, few, resumed = run("whole", None, 173.0), run("few", 21, 0.2), run("resumed", None, 80.0, kept=30)
    plan: Any = json.loads((whole / "plan.json").read_text())
    assert usual_seconds([whole], plan) == {"data": 4.0, "load": 20.0, "capture": 173.0, "verify": 9.0}
    assert usual_seconds([few], plan) == {"load": 20.0}
    assert usual_seconds([resumed], plan) == {"data": 4.0, "load": 20.0, "verify": 9.0}
    (few / "plan.json").write_text("")
    assert usual_seconds([few, whole], plan)["capture"] == 173.0

"""Folders of attempts that launched nothing go after a week; nothing else ever does."""

from __future__ import annotations

import os
from pathlib import Path

from controller.attempts import KEPT_S, drop_old_attempts
from controller.runfolder import RunFolder, list_runs

NOW = 2_000_000_000.0


def made(root: Path, number: int, status: str | None, age_s: float, *names: str) -> str:
    folder = RunFolder.create(root, f"20260102-030405-00000{number}")
    if status is not None:
        folder.write_local(status=status)
    for name in names:
        (folder.path / name).write_text("{}")
    for path in (*folder.path.rglob("*"), folder.path):
        os.utime(path, (NOW - age_s, NOW - age_s))
    return folder.run_id


def test_only_old_attempts_that_no_host_had_go(tmp_path: Path) -> None:
    old = KEPT_S + 60
    gone = [made(tmp_path, 0, "refused", old), made(tmp_path, 1, "planned", old, "plan.json")]
    kept = [
        made(tmp_path, 2, "refused", KEPT_S - 60), made(tmp_path, 3, "launched", old),
        made(tmp_path, 4, "unknown", old), made(tmp_path, 5, None, old),
        made(tmp_path, 6, "refused", old, "result.json"),
    ]  # fmt: skip
    (tmp_path / kept[3] / "local.json").write_text("{ cut")
    os.utime(tmp_path / kept[3], (NOW - old, NOW - old))
    (tmp_path / "20260102").mkdir()
    written = made(tmp_path, 7, "refused", old)
    (tmp_path / written / "events" / "controller.jsonl").write_text("")  # just now, by the clock of today
    os.utime(tmp_path / written / "events" / "controller.jsonl", (NOW, NOW))
    assert drop_old_attempts(tmp_path, NOW) == gone
    assert [run.run_id for run in list_runs(tmp_path)] == [*kept, written]
    assert drop_old_attempts(tmp_path / "none") == []

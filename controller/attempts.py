"""Attempts that no host ever had: refused, declined or given up. Each leaves a folder here, which goes in time."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from controller.runfolder import RunFolder, list_runs

KEPT_S = 7 * 86_400.0
"""A week: who was refused on Friday may want to read why on Monday."""

_NEVER = ("planned", "refused")
_OF_A_HOST = ("run.json", "result.json", "log")


def drop_old_attempts(runs_dir: Path, now: float | None = None) -> list[str]:
    """Delete the folders of attempts that ended longer than KEPT_S ago, and return their ids. Raises OSError.

    A folder goes only if it says itself that nothing was launched, holds nothing of a host, and was not written to
    for that long; `now` is in seconds since the epoch.
    """
    present = time.time() if now is None else now
    dropped = []
    for folder in list_runs(runs_dir):
        if _is_attempt(folder) and present - _last_written(folder) > KEPT_S:
            shutil.rmtree(folder.path)
            dropped.append(folder.run_id)
    return dropped


def _is_attempt(folder: RunFolder) -> bool:
    status = (folder.read("local.json") or {}).get("status")  # of a damaged one nothing says what it was
    return status in _NEVER and not any((folder.path / name).exists() for name in _OF_A_HOST)


def _last_written(folder: RunFolder) -> float:
    return max(path.stat().st_mtime for path in (folder.path, *folder.path.rglob("*")))

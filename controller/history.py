"""Every run launched from this workstation, one line each, below $XDG_STATE_HOME: found from any folder.

The run folders stay where they were made; this file only remembers where that was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One launched run. `folder` is its absolute local folder, which may be gone."""

    run_id: str
    host: str
    name: str
    created: str
    folder: str


def history_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the history. The XDG specification says that a relative path is to be ignored."""
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".local" / "state"
    return base / "ctl" / "history.jsonl"


def record(entry: Entry, path: Path | None = None) -> None:
    """Append a run. Raises OSError: the caller decides what a missing memory is worth."""
    path = path or history_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = json.dumps(asdict(entry)) + "\n"
    # One write to a file opened for appending: two controllers at once do not mix their lines.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def entries(path: Path | None = None) -> Iterator[Entry]:
    """Yield what was recorded, oldest first; a line that is cut off or foreign is passed over."""
    try:
        lines = (path or history_file()).read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError):
            continue

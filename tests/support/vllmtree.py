"""The processes of a real vLLM, and the shared memory that they have mapped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def title(pid: int) -> str:
    """Return the command line, which vLLM overwrites with a name: "ctl-RUN::EngineCore", "ctl-RUN::Worker_TP1"."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def open_shm(pids: Iterable[int]) -> set[str]:
    """Return the names in /dev/shm that any of these processes has mapped."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line.partition("/dev/shm/")[2]
            if path and "(deleted)" not in path:
                found.add(path)
    return found

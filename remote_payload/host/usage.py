"""How much the owned outputs hold: looked at often enough to stop a job that fills a disk, and at little cost."""

from __future__ import annotations

import contextlib
import os
import time
from typing import List, Optional, Sequence

LOOK_S = 5.0
"""Between two looks: a disk takes a few GB in that time."""

SHARE = 20
"""A look that took long is followed by a pause this many times as long: at most 5 % of one core."""


class OutputLimit:
    """Compares the bytes of files below `folders` with `limit_bytes`; None is no limit."""

    def __init__(self, folders: Sequence[str], limit_bytes: Optional[int]) -> None:
        self._folders = list(folders)
        self._limit = limit_bytes
        self._next = 0.0

    def check(self) -> Optional[str]:
        """Return that the limit is exceeded and by how much; None while it is not, or it is not yet time to look."""
        now = time.monotonic()
        if self._limit is None or now < self._next:
            return None
        used = sum(size_of(folder) for folder in self._folders)
        self._next = time.monotonic() + max(LOOK_S, SHARE * (time.monotonic() - now))
        if used <= self._limit:
            return None
        return "output_bytes: the outputs hold %s bytes (limit %s)" % (format(used, ","), format(self._limit, ","))


def size_of(folder: str) -> int:
    """Return the bytes of the regular files below a folder, links not followed; 0 where there is none.

    What vanishes meanwhile, or may not be read, counts as nothing: the job renames, deletes, and sets modes.
    """
    total = 0
    waiting: List[str] = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
    return total

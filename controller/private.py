"""Files that only their owner may read, whatever the umask: logs and plans may quote data and paths."""

from __future__ import annotations

import os


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: a file that it makes has mode 0600; one that exists keeps its mode."""
    return os.open(path, flags, 0o600)


def write_private(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file anew with mode 0600; the caller renames it into place."""
    with open(path, "wb", opener=private) as stream:
        stream.write(data)

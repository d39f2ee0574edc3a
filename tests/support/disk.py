"""A small file system, and somebody else who fills it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a tmpfs of `size` bytes; skips the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False, timeout=20)
    if mounted.returncode:
        pytest.skip(f"needs root, to mount a small file system: {mounted.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def fill(folder: Path, leave: int) -> Path:
    """Take all but `leave` bytes with one file; call it again to take what was freed meanwhile."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:
        while (free := free_bytes(folder)) > leave:
            try:
                file.write(b"x" * min(1 << 16, free - leave))
            except OSError:  # others were quicker
                continue
    return path

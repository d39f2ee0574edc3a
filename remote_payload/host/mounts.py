"""What is mounted where, read from /proc/self/mountinfo.

A bind mount inside one file system has the device number of its surroundings, so st_dev alone does not show it;
the mount table and the mount id of an open descriptor do.
"""

from __future__ import annotations

import os
import re
from typing import List, NamedTuple, Optional

MOUNTINFO = "/proc/self/mountinfo"

_OCTAL = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of mountinfo. `point` is absolute, in this mount namespace."""

    mount_id: int
    device: str  # "MAJOR:MINOR"
    point: str
    fs_type: str
    source: str


def read_mounts(path: str = MOUNTINFO) -> List[Mount]:
    """Return the mounts of this namespace in table order; a later mount on the same point hides an earlier one.

    Empty where the kernel has no such table (not Linux). Raises OSError if it exists but cannot be read.
    """
    try:
        with open(path, "rb") as table:
            lines = table.read().split(b"\n")
    except FileNotFoundError:
        return []
    mounts = []
    for line in lines:
        # Optional fields of varying number stand between the options and a lone "-".
        left, separator, right = line.partition(b" - ")
        before, after = left.split(b" "), right.split(b" ")
        if separator and len(before) >= 6 and len(after) >= 2:
            mounts.append(
                Mount(int(before[0]), before[2].decode(), _path(before[4]), after[0].decode(), _path(after[1]))
            )
    return mounts


def mount_of(path: str, mounts: List[Mount]) -> Optional[Mount]:
    """Return the mount that the absolute, link-free `path` lies on; None only without a mount table."""
    best: Optional[Mount] = None
    for mount in mounts:
        if is_at_or_under(path, mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mount_points_within(path: str, mounts: List[Mount]) -> List[str]:
    """Return the mount points at or below the absolute, link-free `path`, sorted."""
    return sorted({mount.point for mount in mounts if is_at_or_under(mount.point, path)})


def mount_id_of(descriptor: int) -> Optional[int]:
    """Return the id of the mount through which `descriptor` was opened; None where the kernel does not say.

    Unlike the mount table this cannot be raced: it belongs to the opened folder, not to a name.
    """
    try:
        with open("/proc/self/fdinfo/%d" % descriptor, "rb") as info:
            for line in info:
                if line.startswith(b"mnt_id:"):
                    return int(line.split()[1])
    except FileNotFoundError:
        return None
    return None


def is_at_or_under(path: str, folder: str) -> bool:
    """Whether the absolute `path` is `folder` or lies below it, judged by names alone."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _path(field: bytes) -> str:
    # The kernel writes space, tab, newline and backslash as octal escapes.
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match.group(1), 8)]), field))

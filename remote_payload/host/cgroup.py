"""A cgroup of the job's own, where this user was given one: membership that no process can shed.

Only cgroup v2, and only where the tree is ours to use: delegated to this user by its owner or by systemd's mark, or
the root of what we can see (a container). A folder that root merely could make under somebody else's manager is not
ours. Everywhere else the recorded descendants and the environment say who belongs to a run.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Iterator, List, Optional

REMOVE_WAIT_S = 2.0
"""The kernel takes a moment to let go of a cgroup after the last process in it."""

PREFIX = "ctl-"
"""Of the names `ctl-RUN_ID-PID`, with the supervisor's pid."""

DELEGATE_MARKS = ("trusted.delegate", "user.delegate")
"""Extended attributes by which systemd says that a cgroup is the service's own to divide."""


class Cgroup:
    """One cgroup, by its path; `path` goes into run.json so that it is found after the supervisor's death."""

    def __init__(self, path: str) -> None:
        self.path = path

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be in it ourselves, so that what is forked meanwhile is in it from its first instruction on.

        If somebody removed it, the job starts all the same: its members are then known by the other signs.
        """
        with contextlib.suppress(OSError):
            self._move_us(self.path)
        try:
            yield
        finally:
            self._move_us(os.path.dirname(self.path))

    def is_usable(self) -> bool:
        """Whether we may put processes into it: the nearest common ancestor has to be ours too."""
        try:
            self._move_us(self.path)
            self._move_us(os.path.dirname(self.path))
        except OSError:
            return False
        return True

    @staticmethod
    def _move_us(path: str) -> None:
        _write(os.path.join(path, "cgroup.procs"), os.getpid())

    def pids(self) -> List[int]:
        """Return the processes in it and in the cgroups that the job made below it; [] if it is gone."""
        found = []
        for folder, _, _ in os.walk(self.path):
            try:
                with open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as file:
                    numbers = [int(line) for line in file]
            except OSError:
                continue  # removed meanwhile
            # 0 stands for a process of another PID namespace; it has no number here.
            found += [number for number in numbers if number > 0]
        return found

    def kill(self) -> None:
        """SIGKILL everything in it at once, forks under way included; kernels before 5.14 have no such file."""
        with contextlib.suppress(OSError):  # the members are signalled one by one in any case
            _write(os.path.join(self.path, "cgroup.kill"), 1)

    def oom_kills(self) -> Optional[int]:
        """Return how many of its processes the kernel killed for memory; None where memory is not accounted."""
        try:
            with open(os.path.join(self.path, "memory.events"), encoding="ascii") as file:
                return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
        except OSError:
            return None

    def remove(self) -> Optional[str]:
        """Remove it with all below it; returns None, or why it stays."""
        deadline = time.monotonic() + REMOVE_WAIT_S
        while True:
            try:
                for folder, _, _ in os.walk(self.path, topdown=False):
                    os.rmdir(folder)
                return None
            except FileNotFoundError:
                return None
            except OSError as error:
                if time.monotonic() >= deadline:
                    return str(error)
            time.sleep(0.05)


def make(run_id: str, mountinfo: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup") -> Optional[Cgroup]:
    """Make a cgroup for the job below our own; None where none is ours to make."""
    parent = _own_cgroup(mountinfo, own)
    if parent is None:
        return None
    _sweep(parent)
    path = os.path.join(parent, "%s%s-%d" % (PREFIX, run_id, os.getpid()))
    made = Cgroup(path)
    try:
        os.mkdir(path, 0o755)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a controller more is welcome; without it memory.events is not there
        _write_text(os.path.join(parent, "cgroup.subtree_control"), "+memory")
    if made.is_usable():
        return made
    made.remove()
    return None


def _sweep(parent: str) -> None:
    """Remove what lost runs left: empty cgroups of ours whose supervisor is gone."""
    for name in os.listdir(parent):
        if name.startswith(PREFIX) and not os.path.exists("/proc/%s" % name.rpartition("-")[2]):
            with contextlib.suppress(OSError):  # its job still lives, or it is another user's
                os.rmdir(os.path.join(parent, name))


def _own_cgroup(mountinfo: str, own: str) -> Optional[str]:
    try:
        with open(own, encoding="utf-8", errors="surrogateescape") as file:
            inside = next((line[len("0::") :].rstrip("\n") for line in file if line.startswith("0::/")), None)
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return None
    if inside is None or inside.startswith("/.."):
        return None
    for fields in mounts:
        if fields[fields.index("-") + 1] != "cgroup2":
            continue
        root, point = fields[3].rstrip("/"), fields[4].replace("\\040", " ")
        if inside != root and not (inside + "/").startswith(root + "/"):
            continue
        path = os.path.normpath(point + inside[len(root) :])
        if _is_ours(path, inside == "/"):
            return path
    return None


def _is_ours(path: str, is_root: bool) -> bool:
    try:
        status = os.stat(path)
        if not os.access(os.path.join(path, "cgroup.procs"), os.W_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
            return False
        marks = os.listxattr(path)
    except OSError:
        return False
    owned = status.st_uid == os.getuid() != 0
    return owned or is_root or any(mark in marks for mark in DELEGATE_MARKS)


def _write(path: str, number: int) -> None:
    _write_text(path, str(number))


def _write_text(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)

"""The `disk` section: room, and whether a file system does what the job relies on. Sizes are in bytes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import time
from typing import Any, Dict, List, Optional

from remote_payload.host.mounts import Mount, mount_of, read_mounts
from remote_payload.host.sections import Note

TRIAL_BYTES = 1 << 20
"""1 MiB: with delayed allocation less may fit where a quota is full to the last block."""

Q_GETQUOTA, USRQUOTA, GRPQUOTA = 0x800007, 0, 1
SYS_QUOTACTL_FD = 443
"""quotactl_fd(2), Linux 5.14 and later; one number on all architectures."""

QUOTA_BLOCK = 1024
"""Bytes: `dqb_bhardlimit` counts in them (QIF_DQBLKSIZE of linux/quota.h); `dqb_curspace` is in bytes."""

QIF_LIMITS = 1 | 4
"""QIF_BLIMITS and QIF_ILIMITS of linux/quota.h: the limits in the answer are valid."""


class _Quota(ctypes.Structure):
    """struct if_dqblk of linux/quota.h."""

    _fields_ = [
        ("hard_blocks", ctypes.c_uint64),
        ("soft_blocks", ctypes.c_uint64),
        ("bytes_used", ctypes.c_uint64),
        ("hard_inodes", ctypes.c_uint64),
        ("soft_inodes", ctypes.c_uint64),
        ("inodes_used", ctypes.c_uint64),
        ("block_grace", ctypes.c_uint64),
        ("inode_grace", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    ]


def probe_disk(note: Note, workdir: str, roots: List[str]) -> Dict[str, Any]:
    """Return {"paths": [record]} for the workdir and each root, in this order, each path once.

    A record is {path, exists, nearest (the folder that was looked at), free, total, inodes_free (null where the file
    system has no fixed number), fs_type, source, device, read_only, quota, writable, error, trial}. `trial` is what
    `try_folder` says of `nearest`: made for a root only if it exists, else `writable` and `trial` are null. `quota`:
    see `read_quota`.
    """
    mounts = read_mounts()
    records = []
    for path in dict.fromkeys([workdir, *roots]):
        note(path)
        records.append(_disk(path, path == workdir, mounts))
    return {"paths": records}


def try_folder(folder: str) -> Dict[str, Any]:
    """Write, sync, close, lock and rename a file in `folder` as the job will, and remove it.

    Returns {"error", "at", "errno", "sync_s", "rename", "lock"}: `at` is the step that failed ("open", "write",
    "sync", "close", "rename", "lock"), `errno` the error's name: a quota shows at the write or the sync, NFS reports
    what it could not write at the close. `rename` is whether it replaces a file, `lock` whether a second flock of the
    same file is refused; null where it did not come to it.
    """
    trial: Dict[str, Any] = {"error": None, "at": "open", "errno": None, "sync_s": None, "rename": None, "lock": None}
    first = os.path.join(folder, ".ctl-probe-%s" % secrets.token_hex(8))
    second = first + ".new"
    try:
        _write(second, b"\0", trial)
        descriptor = _write(first, b"\1" * TRIAL_BYTES, trial, keep=True)
        try:
            trial["at"] = "lock"
            trial["lock"] = _locks(first, descriptor)
        finally:
            trial["at"] = "close"
            os.close(descriptor)
        trial["at"] = "rename"
        os.rename(first, second)
        trial["rename"] = os.path.getsize(second) == TRIAL_BYTES and not os.path.lexists(first)
        trial["at"] = None
    except OSError as error:
        trial["error"] = error.strerror or str(error)
        trial["errno"] = errno.errorcode.get(error.errno or 0)
    finally:
        for path in (first, second):
            try:
                os.unlink(path)
            except OSError as error:
                if error.errno != errno.ENOENT and trial["error"] is None:
                    trial.update(error="%s stays: %s" % (path, error.strerror), at="unlink")
    return trial


def read_quota(folder: str) -> Optional[Dict[str, Any]]:
    """Return {"free", "limit", "inodes_free"} of the tighter of our user's and group's quota; None if there is none.

    Also None where the kernel cannot tell: before 5.14, and for NFS, whose server keeps it (there the trial write
    tells whether it is full).
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = [
            _quota(descriptor, kind, owner) for kind, owner in ((USRQUOTA, os.getuid()), (GRPQUOTA, os.getgid()))
        ]
    finally:
        os.close(descriptor)
    limits = [quota for quota in found if quota is not None]
    return min(limits, key=lambda quota: (quota["free"] is None, quota["free"])) if limits else None


def _quota(descriptor: int, kind: int, owner: int) -> Optional[Dict[str, Any]]:
    quota = _Quota()
    command = ctypes.c_uint(Q_GETQUOTA << 8 | kind)
    done = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(SYS_QUOTACTL_FD), ctypes.c_int(descriptor), command, ctypes.c_int(owner), ctypes.byref(quota)
    )
    limit, inodes = quota.hard_blocks * QUOTA_BLOCK, quota.hard_inodes
    if done != 0 or not quota.valid & QIF_LIMITS or not (limit or inodes):
        return None
    return {
        "limit": limit or None,
        "free": max(0, limit - quota.bytes_used) if limit else None,
        "inodes_free": max(0, inodes - quota.inodes_used) if inodes else None,
    }


def _disk(path: str, is_workdir: bool, mounts: List[Mount]) -> Dict[str, Any]:
    exists = os.path.isdir(path)
    record: Dict[str, Any] = {
        "path": path, "exists": exists, "nearest": None, "free": None, "total": None, "inodes_free": None,
        "fs_type": None, "source": None, "device": None, "read_only": None, "quota": None, "writable": None,
        "error": None, "trial": None,
    }  # fmt: skip
    try:
        nearest = os.path.realpath(path)
        while not os.path.isdir(nearest):
            nearest = os.path.dirname(nearest)
        space, mount = os.statvfs(nearest), mount_of(nearest, mounts)
        record.update(
            nearest=nearest,
            free=space.f_bavail * space.f_frsize,
            total=space.f_blocks * space.f_frsize,
            inodes_free=space.f_favail if space.f_files else None,
            fs_type=mount.fs_type if mount else None,
            source=mount.source if mount else None,
            device=os.stat(nearest).st_dev,
            read_only=bool(space.f_flag & os.ST_RDONLY),
            quota=read_quota(nearest),
        )
        if exists or is_workdir:
            trial = try_folder(nearest)
            record.update(writable=trial["error"] is None, error=trial["error"], trial=trial)
    except OSError as error:
        record["error"] = str(error)
    return record


def _write(path: str, data: bytes, trial: Dict[str, Any], keep: bool = False) -> int:
    """Create a file of `data`, synced; return its descriptor, closed unless `keep`. Notes the step it is at."""
    trial["at"] = "open"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        trial["at"] = "write"
        rest = data
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        trial["at"] = "sync"
        started = time.monotonic()
        os.fsync(descriptor)
        trial["sync_s"] = round(time.monotonic() - started, 3)
    except BaseException:
        os.close(descriptor)
        raise
    if not keep:
        trial["at"] = "close"
        os.close(descriptor)
    return descriptor


def _locks(path: str, descriptor: int) -> bool:
    """Whether flock keeps a second descriptor of a file out; some network file systems grant every lock."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(other)
    return False

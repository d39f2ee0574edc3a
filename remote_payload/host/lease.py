"""One run at a time on a GPU (or, without GPUs, on a host), between all users of it.

The lock is `flock` on a node-local file; the kernel gives it up exactly when the supervisor and every job process
that inherited the descriptor are dead. The file's content is the readable record of the holder, written in place
because in a sticky folder nobody may replace another user's file. A record that still says "held" on a file whose
lock can be taken tells of an unclean end: the taker must then prove that nothing of that run lives.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

from remote_payload.host.errors import HostError
from remote_payload.host.files import is_at
from remote_payload.host.layout import LEASE_FOLDER, Layout
from remote_payload.host.liveness import Readings, boot_seconds, judge, read_readings, user_name
from remote_payload.host.members import find_marked, read_environ, snapshot
from remote_payload.host.protocol import Liveness, ProcessIdentity

RECORD_SIZE = 4096
"""Bytes; a record is padded to one page, so that it is written and read by a single call."""

RETRY_S = 1.0
"""A rival that tries for several GPUs and fails gives the first ones back within milliseconds."""

FALLBACK_FOLDER = "/tmp/ctl-lease"  # noqa: S108 - shared between users on purpose; files are opened O_NOFOLLOW


class LeaseRefused(Exception):
    """Somebody holds the lease ("lease-busy"), or an unclean end is not cleared up ("lease-dirty")."""

    def __init__(self, end_reason: str, message: str, holder: Optional[Dict[str, Any]]) -> None:
        super().__init__(message)
        self.end_reason = end_reason
        self.holder = holder


class Claim(NamedTuple):
    """What a taker writes into the record."""

    run_id: str
    name: str
    workdir: str
    process: ProcessIdentity


class Lease:
    """A lease that is held; `descriptors` are to be inherited by the job."""

    def __init__(self, paths: List[str], descriptors: List[int], record: Dict[str, Any]) -> None:
        self.paths = paths
        self.descriptors = descriptors
        self._record = record

    def beat(self) -> None:
        """Note that the holder is at work, by the clock since boot; a sign for readers, never a proof of life."""
        self._record["beat_s"] = boot_seconds()
        for descriptor in self.descriptors:
            _write_record(descriptor, self._record)

    def release(self, clean: bool) -> None:
        """Give it back; unless `clean`, the next taker has to prove that the run's processes and memory are gone."""
        for descriptor in self.descriptors:
            _write_record(descriptor, dict(self._record, state="free" if clean else "dirty"))
            os.close(descriptor)
        self.descriptors = []


FIX = "set `lease_dir` of this host in hosts.toml to a folder on a local disk that all users may write"


def lease_folder_path(wanted: Optional[str]) -> str:
    """Return the folder of the lock files by its name alone; nothing is looked at but what the default rests on."""
    return wanted or (LEASE_FOLDER if _is_shared(os.path.dirname(LEASE_FOLDER)) else FALLBACK_FOLDER)


def lease_folder(wanted: Optional[str], create: bool = True) -> str:
    """Return the folder of the lock files, with `create` made if need be, mode 1777.

    Raises HostError (`lease-folder`) if it is not safe to share, or cannot be used; with `create` also if this user
    may not make files in it.
    """
    folder = lease_folder_path(wanted)
    try:
        if not create and not os.path.lexists(folder):
            return folder
        try:
            os.mkdir(folder)
            os.chmod(folder, 0o1777)  # noqa: S103 - every user of the host must be able to take the lease
        except FileExistsError:
            pass
        status = os.lstat(folder)
    except OSError as error:
        raise _unusable(folder, "it cannot be made or looked at", error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise HostError("lease-folder", "the lease folder %s is not a folder" % folder, fix=FIX)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise HostError(
            "lease-folder",
            "any user may replace files in the lease folder %s" % folder,
            "its sticky bit is not set",
            FIX,
        )
    if create:
        try:
            tempfile.TemporaryFile(dir=folder).close()  # what permissions and mounts allow, only a file shows
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # the lock files may be there already
                raise _unusable(folder, "no file can be made in it", error) from error
    return folder


def _unusable(folder: str, how: str, error: OSError) -> HostError:
    why = "%s (%s)" % (how, error.strerror or error)
    return HostError("lease-folder", "the lease folder %s cannot be used" % folder, why, FIX)


def resource_path(folder: str, resource: str) -> str:
    """Return the lock file of a resource: "host" or a GPU's UUID."""
    return os.path.join(folder, "%s.lock" % resource)


def take(
    folder: str,
    resources: List[str],
    claim: Claim,
    gpus_free: Callable[[], Optional[str]],
    readings: Optional[Readings] = None,
) -> Lease:
    """Take all of `resources` or none.

    `gpus_free` is asked only after an unclean end; it returns None or why the GPUs are not free. Raises LeaseRefused,
    HostError, OSError.
    """
    here = readings or read_readings()
    descriptors: List[int] = []
    paths = [resource_path(folder, resource) for resource in sorted(resources)]  # in one order: no deadlock
    try:
        for path in paths:
            try:
                descriptors.append(_lock(path))
            except OSError as error:
                raise _unusable(folder, "%s cannot be locked" % path, error) from error
        for descriptor in descriptors:
            _check_previous(_read_record(descriptor), claim, gpus_free, here)
        record = {
            "run_id": claim.run_id,
            "name": claim.name,
            "user": user_name(os.getuid()),
            "uid": os.getuid(),
            "workdir": claim.workdir,
            "process": claim.process,
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "beat_s": boot_seconds(),
            "state": "held",
        }
        for descriptor in descriptors:
            _write_record(descriptor, record)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return Lease(paths, descriptors, record)


def is_of(record: Mapping[str, Any], run_id: str, workdir: str) -> bool:
    """Whether a record is of this run: another workdir may have one of the same id."""
    same_id = record.get("run_id") == run_id
    return same_id and os.path.realpath(str(record.get("workdir"))) == os.path.realpath(workdir)


def clear_record(path: str, run_id: str, workdir: str, clean: bool) -> Optional[str]:
    """Mark a lease of a dead run of `workdir` free (or dirty); returns None, or why that could not be done.

    Nothing is changed if another run has taken it since.
    """
    try:
        descriptor = open_shared(path, create=False)
        try:
            record = _read_record(descriptor)
        finally:
            os.close(descriptor)
        if record is None or not is_of(record, run_id, workdir):
            return None  # another run's, which may hold it: its lock is not asked for
        descriptor = _lock(path)
    except FileNotFoundError:
        return None
    except LeaseRefused as refused:
        return str(refused)
    except OSError as error:
        return "%s: %s" % (path, error)
    try:
        record = _read_record(descriptor)
        if record and is_of(record, run_id, workdir):
            _write_record(descriptor, dict(record, state="free" if clean else "dirty"))
    finally:
        os.close(descriptor)
    return None


def list_leases(folder: str, readings: Optional[Readings] = None) -> List[Dict[str, Any]]:
    """Return the records that are not free, with `resource`, `alive`, `evidence` and `heartbeat_age_s`.

    It takes no lock, so it disturbs nobody who wants to.
    """
    here = readings or read_readings()
    leases: List[Dict[str, Any]] = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if not name.endswith(".lock"):
            continue
        try:
            descriptor = open_shared(os.path.join(folder, name), create=False)
        except OSError as error:
            leases.append({"resource": name[: -len(".lock")], "state": "unknown", "evidence": str(error)})
            continue
        try:
            record = _read_record(descriptor)
        finally:
            os.close(descriptor)
        if record and record.get("state") != "free":
            alive, evidence = judge(record["process"], here)
            age: Optional[float] = None
            if record["process"]["boot"] == here.boot and isinstance(record.get("beat_s"), (int, float)):
                age = round(max(0.0, boot_seconds() - record["beat_s"]), 1)
            leases.append(
                {
                    **record,
                    "resource": name[: -len(".lock")],
                    "alive": alive.value,
                    "evidence": evidence,
                    "heartbeat_age_s": age,
                }
            )
    return leases


def describe(record: Optional[Dict[str, Any]]) -> str:
    """Return "run R of user U since T, pid P"."""
    if not record:
        return "a process that left no record"
    return "run %s of user %s since %s, pid %s" % (
        record.get("run_id"),
        record.get("user"),
        record.get("since"),
        (record.get("process") or {}).get("pid"),
    )


def _is_shared(folder: str) -> bool:
    # Asked of the mode, not of our own rights: root and everybody else must arrive at the same folder.
    try:
        return bool(os.stat(folder).st_mode & stat.S_IWOTH)
    except FileNotFoundError:
        return False


def _check_previous(
    record: Optional[Dict[str, Any]], claim: Claim, gpus_free: Callable[[], Optional[str]], here: Readings
) -> None:
    if not record or record.get("state") == "free" or is_of(record, claim.run_id, claim.workdir):
        return
    reason = _still_there(record, here) or gpus_free()
    if reason:
        raise LeaseRefused(
            "lease-dirty",
            "%s ended unclean and is not proved gone: %s; `ctl stop %s` as that user clears it up"
            % (describe(record), reason, record.get("run_id")),
            record,
        )


def _still_there(record: Dict[str, Any], here: Readings) -> Optional[str]:
    """Return why processes of the recorded run may still live, None if they are proved dead."""
    alive, evidence = judge(record["process"], here)
    if alive is not Liveness.DEAD:
        return evidence
    if record["process"]["boot"] != here.boot:
        return None
    table = snapshot(here.proc)
    living = find_marked(os.path.join(Layout(record["workdir"]).runs, record["run_id"]), table, here.proc)
    if living:
        return "its processes live: %s" % ", ".join("%d (%s)" % (m.pid, m.comm) for m in living[:8])
    if os.getuid() in (0, record["uid"]):
        return None
    # The environment of another user's processes is closed to us, so any that began later could belong to the run.
    hidden = [
        s
        for s in table.values()
        if s.start_ticks >= record["process"]["start_ticks"]
        and _owner(s.pid, here.proc) == record["uid"]
        and read_environ(s.pid, here.proc) is None
    ]
    if hidden:
        return "processes of user %s cannot be told apart from it: %s" % (
            record["user"],
            ", ".join("%d (%s)" % (s.pid, s.comm) for s in hidden[:8]),
        )
    return None


def _owner(pid: int, proc: str) -> Optional[int]:
    try:
        return os.stat("%s/%d" % (proc, pid)).st_uid
    except FileNotFoundError:
        return None


def _lock(path: str) -> int:
    """Return a descriptor that holds the lock. Raises LeaseRefused naming the holder, OSError."""
    deadline = time.monotonic() + RETRY_S
    while True:
        descriptor = open_shared(path, create=True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                record = _read_record(descriptor)
                os.close(descriptor)
                raise LeaseRefused("lease-busy", "held by %s" % describe(record), record) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.05)


def open_shared(path: str, create: bool) -> int:
    """Open a file that every user of the host may lock, made mode 0666 if need be. Raises OSError."""
    # First without O_CREAT: with it, fs.protected_regular refuses another user's file in a sticky folder.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            descriptor = os.open(path, flags)
            break
        except FileNotFoundError:
            if not create:
                raise
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(descriptor, 0o666)  # whatever the umask: the other users of the host lock it too
            break
        except FileExistsError:
            continue
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def _write_record(descriptor: int, record: Dict[str, Any]) -> None:
    os.pwrite(descriptor, json.dumps(record).encode().ljust(RECORD_SIZE), 0)
    os.fsync(descriptor)


def _read_record(descriptor: int) -> Optional[Dict[str, Any]]:
    """Return the record; None for a new file, and for one that holds anything else: then only the lock counts."""
    data = os.pread(descriptor, RECORD_SIZE, 0).strip()
    if not data:
        return None
    try:
        record: Dict[str, Any] = json.loads(data)
        record["process"]["start_ticks"], record["run_id"], record["workdir"], record["uid"], record["user"]
    except (ValueError, KeyError, TypeError):
        return None
    return record

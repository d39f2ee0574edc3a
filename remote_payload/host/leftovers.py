"""What a run leaves behind on the host, and the proof that it is gone: shared memory, GPU memory, OOM kills.

The baseline is measured under the lease, before the job, and kept in the run folder, so that whoever ends the run,
its supervisor or a later `stop`, compares with the same figures.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from remote_payload.host.children import CommandFailed
from remote_payload.host.gpus import ComputeProcess, compute_processes, memory_used
from remote_payload.host.liveness import read_stat, user_name

SHM = "/dev/shm"  # noqa: S108 - looked at, never created in

SHM_NAMES = re.compile(r"(psm_|torch_|nccl-|sem\.mp-|sem\.loky-|vllm|VLLM|cuda\.shm\.|__KMP_)")
"""What vLLM, PyTorch, NCCL, CUDA and Python's multiprocessing call their segments."""

MEMORY_TOLERANCE = 64 << 20
"""Bytes; the driver's own bookkeeping moves by a few MiB, while the smallest CUDA context takes over 100."""

SETTLE_S = 20.0
"""The driver frees the memory of a killed process after the process is gone from /proc, usually within 2 s."""

Clean = Union[bool, str]
"""True, False, or "unknown" where this host's view does not allow a proof."""


class Baseline(NamedTuple):
    """State before the job. `gpu_memory`: bytes in use by UUID of the leased GPUs; {} on a CPU host."""

    leases: List[str]
    gpu_memory: Dict[str, Optional[int]]
    shm: List[str]
    oom_kills: Optional[int]

    def to_dict(self) -> Dict[str, Any]:
        return self._asdict()


def measure(leases: List[str], uuids: List[str]) -> Baseline:
    """Measure now. A driver that does not answer gives None as the memory of each GPU."""
    memory: Dict[str, Optional[int]] = dict.fromkeys(uuids)
    if uuids:
        try:
            used = memory_used()
            memory = {uuid: used.get(uuid) for uuid in uuids}
        except CommandFailed:
            pass  # None stands for it, and makes the proof "unknown"
    return Baseline(leases=leases, gpu_memory=memory, shm=list_shm(), oom_kills=count_oom_kills())


def list_shm(folder: str = SHM) -> List[str]:
    """Return the names in `folder`, [] where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def sweep_shm(
    before: List[str], since: float, folder: str = SHM, survivors: Sequence[int] = ()
) -> List[Dict[str, Any]]:
    """Delete the shared memory that the run left; return {path, reason, ours} of what had to stay.

    `ours` is False for what belongs to another user or is used by a process that is none of the run's `survivors`:
    no member of it lives, so that whoever has the file open now is somebody else.

    Deleted is only what was not there before, is ours, was created after `since` (Unix time), has a name of the
    libraries that run in a job, and is open or mapped in no process. If the clock was set back meanwhile, times say
    nothing, and the other signs have to do. What others made meanwhile is named and left.
    """
    found, kept = find_shm(before, since, folder)
    others = [{**each, "ours": each.get("pid") in survivors} for each in kept]
    return others + _unlink(found)


def find_shm(before: List[str], since: float, folder: str = SHM) -> Tuple[List[str], List[Dict[str, Any]]]:
    """Return the paths that `sweep_shm` would delete, and {path, reason, pid of a user} of what has to stay."""
    kept: List[Dict[str, Any]] = []
    clock_went_back = time.time() < since
    candidates: Dict[Tuple[int, int], str] = {}
    for name in sorted(set(list_shm(folder)) - set(before)):
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if not SHM_NAMES.match(name):
            continue
        if status.st_uid != os.getuid():
            kept.append({"path": path, "reason": "belongs to user %s; left untouched" % user_name(status.st_uid)})
        elif status.st_ctime >= since or clock_went_back:
            candidates[status.st_dev, status.st_ino] = path
    found, in_use = _unused(candidates)
    return found, kept + in_use


def delete_shm(paths: List[str], folder: str = SHM) -> List[Dict[str, Any]]:
    """Delete files of `folder` that are ours and in no use now; return those that stay.

    {path, reason}, with `pid` of a user where there is one, and `ours` True where the file itself is.
    """
    candidates: Dict[Tuple[int, int], str] = {}
    kept = []
    for path in paths:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if os.path.dirname(path) != folder or status.st_uid != os.getuid():
            kept.append({"path": path, "reason": "not ours to delete"})
        else:
            candidates[status.st_dev, status.st_ino] = path
    found, in_use = _unused(candidates)
    return kept + in_use + _unlink(found)


def _unused(candidates: Dict[Tuple[int, int], str]) -> Tuple[List[str], List[Dict[str, Any]]]:
    used = files_in_use(set(candidates)) if candidates else {}
    kept = [
        {"path": path, "reason": "in use by process %d" % used[key], "pid": used[key]}
        for key, path in candidates.items()
        if key in used
    ]
    return [path for key, path in candidates.items() if key not in used], kept


def _unlink(paths: List[str]) -> List[Dict[str, Any]]:
    """Delete files that are ours and in no use; return {path, reason, ours} of those that stay."""
    kept = []
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            kept.append({"path": path, "reason": str(error), "ours": True})
    return kept


def prove_clean(
    baseline: Optional[Baseline], known: Set[int], survivors: int, settle_s: float = SETTLE_S
) -> Tuple[Clean, str]:
    """Say whether the run's accelerator is as it was before, with the evidence as one sentence.

    `known` are the pids of the run's members, `survivors` counts those that could not be killed. On GPUs it waits up
    to `settle_s` seconds for the driver.
    """
    if survivors:
        return False, "%d processes of the run could not be killed" % survivors
    if baseline is None:
        return "unknown", "nothing was measured before the job"
    if not baseline.gpu_memory:
        return True, "no process of the run is left"
    deadline = time.monotonic() + settle_s
    while True:
        try:
            verdict, evidence, may_change = _compare(baseline.gpu_memory, known)
        except CommandFailed as error:
            return "unknown", str(error)
        if not may_change or time.monotonic() >= deadline:
            return verdict, evidence
        time.sleep(0.5)


def busy_gpus(uuids: List[str], memory_limit: int) -> Optional[str]:
    """Return why the GPUs are not free, None if they are.

    They are not if a compute process is on one, or more than `memory_limit` bytes of it are in use. Raises
    CommandFailed.
    """
    foreign = [p for p in compute_processes() if p.uuid in uuids]
    if foreign:
        return "compute processes on them: %s" % _names(foreign)
    full = {uuid: used for uuid, used in memory_used().items() if uuid in uuids and (used or 0) > memory_limit}
    if full:
        return "memory in use: %s" % ", ".join(
            "%s %d MiB" % (uuid, used >> 20) for uuid, used in full.items() if used
        )
    return None


def count_oom_kills(cgroup_root: str = "/sys/fs/cgroup") -> Optional[int]:
    """Return how often the kernel killed for memory in our cgroup (v2); None where that cannot be read."""
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as file:
            own = next((line[len("0::/") :].strip() for line in file if line.startswith("0::/")), None)
        if own is None:
            return None
        with open(os.path.join(cgroup_root, own, "memory.events"), encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except FileNotFoundError:
        return None


def _compare(before: Dict[str, Optional[int]], known: Set[int]) -> Tuple[Clean, str, bool]:
    """Return verdict, evidence, and whether a little time may change the verdict."""
    running = [p for p in compute_processes() if p.uuid in before]
    ours = [p for p in running if p.pid in known]
    if ours:
        return False, "still on the GPUs: %s" % _names(ours), True
    if running:
        # In a container the driver's pids are not ours, so what we cannot see may be a member about to vanish.
        unseen = any(read_stat(p.pid) is None for p in running)
        return "unknown", "processes not known to be of this run are on its GPUs: %s" % _names(running), unseen
    now = memory_used()
    for uuid, was in before.items():
        used = now.get(uuid)
        if was is None or used is None:
            return "unknown", "the memory of %s cannot be read" % uuid, False
        if used > was + MEMORY_TOLERANCE:
            return False, "%s uses %d MiB, before the run it was %d MiB" % (uuid, used >> 20, was >> 20), True
    return True, "the memory of all %d GPUs is back at its level before the run" % len(before), False


def _names(processes: List[ComputeProcess]) -> str:
    return ", ".join("%d (%s)" % (p.pid, p.name) for p in processes[:8])


def files_in_use(wanted: Set[Tuple[int, int]]) -> Dict[Tuple[int, int], int]:
    """Return which of the (device, inode) are open or mapped in a process that we may look into, and in which."""
    used = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        for key in _open_files(name) | _mapped_files(name):
            if key in wanted:
                used[key] = int(name)
    return used


def _open_files(pid: str) -> Set[Tuple[int, int]]:
    keys: Set[Tuple[int, int]] = set()
    folder = "/proc/%s/fd" % pid
    try:
        numbers = os.listdir(folder)
    except OSError:  # ended meanwhile, or another user's, who cannot open our 0600 files
        return keys
    for number in numbers:
        try:
            status = os.stat(os.path.join(folder, number))
        except OSError:
            continue
        keys.add((status.st_dev, status.st_ino))
    return keys


def _mapped_files(pid: str) -> Set[Tuple[int, int]]:
    keys: Set[Tuple[int, int]] = set()
    try:
        with open("/proc/%s/maps" % pid, "rb") as file:
            for line in file:
                fields = line.split(None, 5)
                major, minor = fields[3].split(b":")
                keys.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    except OSError:
        return keys
    return keys

"""What the accelerator and the host are doing, by nvidia-smi and /proc, each reading with a deadline.

A value that the driver cannot give ([N/A], [Not Supported]) is None and never spoils the rest of its row.
"""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from remote_payload.host.children import Command, CommandFailed

QUERY_TIMEOUT_S = 10.0
"""Without persistence mode each call wakes all GPUs, which takes seconds; a hung driver would block for ever."""

SAMPLE_TIMEOUT_S = 5.0
"""A sample that comes later than the next one is due is of no use."""

FAST_SAMPLE_S = 2.0
FAST_PERIOD_S = 120.0
SLOW_SAMPLE_S = 5.0
"""Often while a person watches the start, then sparingly: a run of two days makes 35 000 samples."""

MIB = 1 << 20

_GPU_LINE = re.compile(r"GPU (\d+): (.*) \(UUID: (GPU-[0-9a-fA-F-]+)\)")

_nvidia_smi = Command()


class Gpu(NamedTuple):
    number: int  # the index that nvidia-smi and CUDA_VISIBLE_DEVICES use
    name: str
    uuid: str


class ComputeProcess(NamedTuple):
    """A process with a compute context; `pid` is the driver's word and may belong to another PID namespace."""

    uuid: str
    pid: int
    name: str


def list_gpus() -> List[Gpu]:
    """Return all GPUs that the driver lists, in its order. Raises CommandFailed."""
    found = (_GPU_LINE.match(line) for line in _nvidia_smi.run(["nvidia-smi", "-L"], QUERY_TIMEOUT_S).splitlines())
    return [Gpu(number=int(m.group(1)), name=m.group(2), uuid=m.group(3)) for m in found if m]


def select_gpus(gpus: List[Gpu], count: int, visible: Optional[str]) -> List[Gpu]:
    """Return those that a job uses: the ones CUDA_VISIBLE_DEVICES names (indices or UUIDs), else the first `count`.

    Without either it may use all. Raises CommandFailed if one of them does not exist.
    """
    if not visible:
        if len(gpus) < count:
            raise CommandFailed("the plan needs %d GPUs, nvidia-smi lists %d" % (count, len(gpus)))
        return gpus[:count] if count else gpus
    chosen = []
    for word in (part.strip() for part in visible.split(",")):
        match = [gpu for gpu in gpus if word == str(gpu.number) or gpu.uuid.startswith(word)]
        if len(match) != 1:
            raise CommandFailed("CUDA_VISIBLE_DEVICES names %r, which is not one of the %d GPUs" % (word, len(gpus)))
        chosen.append(match[0])
    return chosen


def memory_used() -> Dict[str, Optional[int]]:
    """Return bytes in use by GPU UUID. Raises CommandFailed."""
    return {row[0]: _bytes(row[1]) for row in _query("gpu", "uuid,memory.used")}


def compute_processes() -> List[ComputeProcess]:
    """Return the processes with a compute context on any GPU. Raises CommandFailed."""
    rows = _query("compute-apps", "gpu_uuid,pid,process_name")
    return [ComputeProcess(uuid=row[0], pid=int(row[1]), name=row[2]) for row in rows if row[1].isdigit()]


def sample_gpus() -> List[Dict[str, Any]]:
    """Return one record a GPU as the `sample` event has it. Raises CommandFailed."""
    fields = "index,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu"
    return [
        {
            "index": int(row[0]),
            "util": _number(row[1]),
            "memory_used": _bytes(row[2]),
            "memory_total": _bytes(row[3]),
            "power_w": _number(row[4]),
            "temperature_c": _number(row[5]),
        }
        for row in _query("gpu", fields, SAMPLE_TIMEOUT_S)
    ]


class HostMeter:
    """CPU use since the last reading (percent of all cores), and memory in bytes."""

    def __init__(self) -> None:
        self._last = _cpu_times()

    def read(self) -> Dict[str, Any]:
        busy, total = _cpu_times()
        last_busy, last_total = self._last
        self._last = (busy, total)
        passed = total - last_total
        memory = _meminfo()
        return {
            "cpu_percent": round(100.0 * (busy - last_busy) / passed, 1) if passed > 0 else None,
            "memory_used": memory["MemTotal"] - memory.get("MemAvailable", memory["MemFree"]),
            "memory_total": memory["MemTotal"],
        }


def disk_room(folder: Optional[str]) -> Dict[str, Optional[int]]:
    """Return the bytes that the user may still write to the file system of `folder`, and its size.

    A folder that does not exist yet stands for the nearest one above it. Both are None where it cannot be told.
    """
    while folder and not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        status = os.statvfs(folder) if folder else None
    except OSError:  # a file system that went away is told by whoever writes to it
        status = None
    if status is None:
        return {"disk_free": None, "disk_total": None}
    return {"disk_free": status.f_bavail * status.f_frsize, "disk_total": status.f_blocks * status.f_frsize}


class Sampler(threading.Thread):
    """Calls `emit("sample", ...)` every two, later five seconds, until stopped.

    `output` is the folder that the job writes to, whose file system is measured too. A failing nvidia-smi is told
    once as a notice, again only after it worked in between, which is told too.
    """

    def __init__(self, emit: Callable[..., None], cuda: bool, output: Optional[str] = None) -> None:
        super().__init__(name="sampler", daemon=True)  # a query stuck in the driver must not hold up the end
        self._emit = emit
        self._cuda = cuda
        self._output = output
        self._halt = threading.Event()

    def run(self) -> None:
        meter = HostMeter()
        begun = time.monotonic()
        failing = False
        while not self._halt.wait(FAST_SAMPLE_S if time.monotonic() - begun < FAST_PERIOD_S else SLOW_SAMPLE_S):
            gpus: List[Dict[str, Any]] = []
            if self._cuda:
                try:
                    gpus = sample_gpus()
                    if failing:
                        self._emit("notice", level="info", code="gpu-query-works", text="nvidia-smi answers again")
                    failing = False
                except CommandFailed as error:
                    if not failing:
                        self._emit("notice", level="warn", code="gpu-query-failed", text=str(error))
                    failing = True
            self._emit("sample", gpus=gpus, **meter.read(), **disk_room(self._output))

    def stop(self) -> None:
        """Stop; waits for a sample under way, but no longer than its query may take."""
        self._halt.set()
        self.join(SAMPLE_TIMEOUT_S + 1.0)


def _query(what: str, fields: str, timeout_s: float = QUERY_TIMEOUT_S) -> List[List[str]]:
    argv = ["nvidia-smi", "--query-%s=%s" % (what, fields), "--format=csv,noheader,nounits"]
    output = _nvidia_smi.run(argv, timeout_s)
    wanted = fields.count(",") + 1
    rows = ([cell.strip() for cell in line.split(",", wanted - 1)] for line in output.splitlines())
    return [row for row in rows if len(row) == wanted]


def _number(cell: str) -> Optional[float]:
    try:
        return float(cell)
    except ValueError:
        return None


def _bytes(cell: str) -> Optional[int]:
    mebibytes = _number(cell)
    return None if mebibytes is None else int(mebibytes) * MIB


def _cpu_times() -> "tuple[float, float]":
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle and iowait
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), sum(ticks) / os.sysconf("SC_CLK_TCK")


def _meminfo() -> Dict[str, int]:
    with open("/proc/meminfo", encoding="ascii") as file:
        pairs = (line.split() for line in file)
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs}

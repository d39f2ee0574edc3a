"""The limits of one step: time to the first progress, silence, total time; and who it is that has fallen silent."""

from __future__ import annotations

import os
from typing import Callable, Dict, List, Optional, Tuple

from remote_payload.host.layout import RunPaths
from remote_payload.host.liveness import Stat, boot_seconds
from remote_payload.host.protocol import Limits
from remote_payload.host.segments import LogFiles

NOT_THE_JOBS = ("supervisor.jsonl", "pump.jsonl")
"""Events that ctl writes itself are no sign of life of the job."""

WAITING = b"No available shared memory broadcast block found"
"""vLLM's engine core says this once a minute for as long as a rank hangs: a line of log, and no sign of life."""

LOG_LOOK_BYTES = 64 << 10
"""More than this since the last look is more than a process says that only waits."""

_LOAD_STARTED = b'"type":"phase","name":"load","status":"started"'

HELD_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waits inside the kernel"}


class Watchdog:
    """Made before the step's program is started. Clocks are `boot_seconds`: nobody can set them back.

    `find` returns the run's living members; it is asked only when a limit is exceeded.
    """

    def __init__(self, paths: RunPaths, limits: Limits, run_boot_s: float, find: Callable[[], List[Stat]]) -> None:
        self._paths = paths
        self._find = find
        self._run_boot_s = run_boot_s
        self._load_s: Optional[float] = limits.get("load_timeout_s")
        self._silence_s: Optional[float] = limits.get("silence_timeout_s")
        self._time_s: Optional[float] = limits.get("time_limit_s")
        self._begun = self._heard = boot_seconds()
        self._progressed = False
        self._driver = os.path.join(paths.events, "driver.jsonl")
        # An earlier step may have written to the same file; only progress from here on counts.
        self._offset = _size(self._driver)
        self._ranks: Dict[str, Tuple[int, float]] = {}  # writer -> (bytes written, when last heard)
        self._logs: Dict[str, int] = {}  # path of a segment -> its bytes
        self._log_grew()
        self._written = self._read_sizes(self._begun)

    def check(self) -> Optional[str]:
        """Return which limit is exceeded and by how long, None while all is well."""
        now = boot_seconds()
        written = self._read_sizes(now)
        if self._log_grew() or written != self._written:
            self._written, self._heard = written, now
        if self._time_s is not None and now - self._run_boot_s > self._time_s:
            return "time_limit: the run has taken %.0f s (limit %g s)" % (now - self._run_boot_s, self._time_s)
        if self._silence_s is not None and now - self._heard > self._silence_s:
            silent = now - self._heard
            text = "silence_timeout: no line of log and no event for %.0f s (limit %g s)" % (silent, self._silence_s)
            return "; ".join([text, *self._silent_ranks(now), *self._held_members()])
        if self._load_s is not None and now - self._begun > self._load_s and not self._has_progressed():
            loading = now - self._begun
            text = "load_timeout: no sample was finished within %.0f s (limit %g s)" % (loading, self._load_s)
            return "; ".join([text, *self._held_members()])
        return None

    def _silent_ranks(self, now: float) -> List[str]:
        """Return one sentence for each rank that ever wrote, the one that has been silent longest first."""
        ages = sorted(((now - heard, writer) for writer, (_, heard) in self._ranks.items()), reverse=True)
        return ["%s has been silent for %.0f s" % (writer, age) for age, writer in ages]

    def _held_members(self) -> List[str]:
        """A stopped worker stalls all others in their next collective: it is the one to name."""
        return [
            "process %d (%s) does not run: %s" % (member.pid, member.comm, HELD_STATES[member.state])
            for member in self._find()
            if member.state in HELD_STATES
        ][:16]

    def _has_progressed(self) -> bool:
        if _size(self._driver) > self._offset:
            with open(self._driver, "rb") as file:
                file.seek(self._offset)
                data = file.read()
            # A line may still be half written: it is looked at again, whole, the next time.
            whole = data.rpartition(b"\n")[0]
            for line in whole.split(b"\n"):
                if b'"type":"progress"' in line:
                    self._progressed = True
                elif _LOAD_STARTED in line:
                    self._progressed = False  # what was told before the load is only how many samples there are
                elif b'"code":"resume-check"' in line:
                    # Proving terabytes of an earlier run's files is no part of the load.
                    self._begun = boot_seconds()
            self._offset += len(whole)
        return self._progressed

    def _log_grew(self) -> bool:
        """Whether the job has written to its log since the last look, lines that only say WAITING left out."""
        before, self._logs = self._logs, {path: _size(path) for path in LogFiles(self._paths).segments()}
        return any(
            size > before.get(path, 0) and not _only_waits(path, before.get(path, 0), size)
            for path, size in self._logs.items()
        )

    def _read_sizes(self, now: float) -> Tuple[int, ...]:
        """Return the sizes of all that the job writes beside its log, and note which ranks were heard."""
        sizes: List[int] = []
        ranks: Dict[str, int] = {}
        for folder in (self._paths.events, self._paths.ledger):
            for name in sorted(os.listdir(folder)):
                if name in NOT_THE_JOBS:
                    continue
                size = _size(os.path.join(folder, name))
                sizes.append(size)
                if name.startswith("rank-"):
                    writer = name[: -len(".jsonl")]
                    ranks[writer] = ranks.get(writer, 0) + size
        for writer, size in ranks.items():
            if self._ranks.get(writer, (-1, 0.0))[0] != size:
                self._ranks[writer] = (size, now)
        return tuple(sizes)


def _only_waits(path: str, begin: int, end: int) -> bool:
    """Whether these bytes of a log segment are nothing but lines that say WAITING."""
    if end - begin > LOG_LOOK_BYTES:
        return False
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            lines = file.read(end - begin).split(b"\n")
    except FileNotFoundError:  # given up under the log cap, which only a job does that writes much
        return False
    return all(WAITING in line or not line.strip() for line in lines)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0

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
        self._written = self._read_sizes(self._begun)

    def check(self) -> Optional[str]:
        """Return which limit is exceeded and by how long, None while all is well."""
        now = boot_seconds()
        written = self._read_sizes(now)
        if written != self._written:
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
        if not self._progressed and _size(self._driver) > self._offset:
            with open(self._driver, "rb") as file:
                file.seek(self._offset)
                data = file.read()
            # A line may still be half written: it is looked at again, whole, the next time.
            whole = data.rpartition(b"\n")[0]
            self._progressed = b'"type":"progress"' in whole
            if b'"code":"resume-check"' in whole:
                # Proving terabytes of an earlier run's files is no part of the load.
                self._begun = boot_seconds()
            self._offset += len(whole)
        return self._progressed

    def _read_sizes(self, now: float) -> Tuple[int, ...]:
        """Return the sizes of everything that the job writes, and note which ranks were heard."""
        sizes = [_size(path) for path in LogFiles(self._paths).segments()]
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


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0

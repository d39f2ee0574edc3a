"""Ends the driver's wait for an engine that is lost, when vLLM itself does not.

vLLM's client (0.24 to 0.33) waits without a limit for the answer to a call and for a step's outputs, and its engine
core listens to the first rank alone. So nobody tells the driver, or only after minutes, that

- the core died of an error while a call waits: only a step's outputs are told;
- the core was killed: neither is told;
- another rank than the first raised: the error stays in its log, and the first waits for it in a collective.

A thread therefore looks by itself: at the ranks' `exception` events, and at their processes. vLLM is given a moment
to raise an error of its own; then the main thread is interrupted wherever it waits.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from remote_payload.extract.canary_run import CanaryError
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.progress import LedgerTail
from remote_payload.host.liveness import ZOMBIE_STATES, read_stat, send_signal
from remote_payload.host.members import find_descendants, snapshot

LOOK_S = 0.5
"""Between two looks: a read of a few files in /proc and of what the ranks' event files grew by."""

GRACE_S = 5.0
"""For vLLM to raise its own error, and for the main thread to leave after each interruption."""

LAST_S = 40.0
"""After this long the main thread sits in native code or swallows errors: the process is ended under it."""

END_S = 5.0
"""For the engine's processes to end after its own shutdown, before they are killed."""

SIGNAL = signal.SIGUSR1
"""Nobody else in the driver uses it; a Python handler runs even while a lock is waited for."""

Key = tuple[int, int]
"""(pid, start ticks)."""


class EngineLostError(CaptureError):
    """A worker failed or died, and the engine cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    what: str
    at: float  # time.monotonic()
    died: bool


class EngineWatch:
    """Watches while its context is open. One at a time, in the main thread."""

    def __init__(self, events: str, give_up: Callable[[EngineLostError], None]) -> None:
        """`events`: the folder of the ranks' events. `give_up` records the error of a process that must be ended."""
        self._tail, self._give_up = LedgerTail(events), give_up
        for _ in self._tail.read():
            pass  # what an earlier process of this run said
        self._processes: dict[Key, str] = {}
        self._found: _Found | None = None
        self._unreadable = False
        self._open = False
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctl-engine-watch", daemon=True)

    def __enter__(self) -> Self:
        self._before = signal.signal(SIGNAL, self._interrupt)
        self._open = True
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises EngineLostError from an error that names no cause, or another: a process died without a word, or the
        canary misses the rows of a rank that raised, of which the core learns nothing unless it is the first.
        """
        self._open = False
        self._stop.set()
        self._thread.join()
        signal.signal(SIGNAL, self._before)
        failed = isinstance(error, Exception) and not isinstance(error, EngineLostError)  # not: it was told to end
        if failed:
            self._look()
        if error is not None and not self._processes:  # it failed while it was started
            children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
            below = find_descendants(children, table := snapshot(), "")
            started = [table[pid] for pid in children if pid in table] + list(below.values())
            self._processes.update(((stat.pid, stat.start_ticks), f"pid {stat.pid}") for stat in started)
        if failed and self._found is not None and (self._found.died or isinstance(error, CanaryError)):
            raise EngineLostError(self._found.what) from error

    @property
    def found(self) -> str | None:
        """What happened to the engine, None if nothing did."""
        return None if self._found is None else self._found.what

    def check(self) -> None:
        """Raise EngineLostError if a rank has failed or died, of which vLLM may not know."""
        self._look()
        if self._found is not None:
            raise EngineLostError(self._found.what)

    def ranks(self, pids: Iterable[int]) -> None:
        """Watch these processes, in the order of their ranks, and those between them and this one.

        What does not descend from this process (another node's, Ray's) is left alone: its pid says nothing here.
        """
        for rank, pid in enumerate(pids):
            chain: dict[Key, str] = {}
            stat = read_stat(pid)
            while stat is not None and stat.pid != os.getpid():
                name = "the engine core" if chain else f"rank {rank}"
                chain[stat.pid, stat.start_ticks] = f"{name} (pid {stat.pid})"
                stat = read_stat(stat.ppid)
            if stat is not None:
                self._processes = {**chain, **self._processes}

    def kill_left(self) -> None:
        """Kill what is left of the watched processes after the engine's own shutdown.

        An orphan of a killed core that waits in a collective never learns that it is to end.
        """
        deadline = time.monotonic() + END_S
        while len(self._dead()) < len(self._processes) and time.monotonic() < deadline:
            time.sleep(LOOK_S / 5)
        for pid, ticks in self._processes:
            send_signal(pid, ticks, signal.SIGKILL)

    def _run(self) -> None:
        interrupted = 0.0
        while not self._stop.wait(LOOK_S):
            self._look()
            if self._found is None:
                continue
            now = time.monotonic()
            if now - self._found.at > LAST_S:
                self._end(self._found.what)
            elif now - max(self._found.at, interrupted) > GRACE_S:
                interrupted = now
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def _look(self) -> None:
        with self._looking:
            self._find()

    def _find(self) -> None:
        if self._found is not None:
            return
        raised = [told(event) for event in self._events() if event.get("type") == "exception"]
        dead = self._dead()
        if raised:  # whoever reports an error may be gone already, and take others along
            self._found = _Found(what=raised[0], at=time.monotonic(), died=False)
        elif dead:
            what = f"the process of {dead[0]} is gone: it was killed, or ended without a word"
            self._found = _Found(what=what, at=time.monotonic(), died=True)

    def _events(self) -> list[dict[str, Any]]:
        """Return what the ranks' event files grew by; where they cannot be read, the processes are still watched."""
        found: list[dict[str, Any]] = []
        try:
            found = list(self._tail.read())
        except OSError as error:
            if not self._unreadable:
                print(f"ctl: the ranks' events cannot be read: {error}", file=sys.stderr, flush=True)
            self._unreadable = True
        return found

    def _dead(self) -> list[str]:
        """Return the names of the watched processes that have ended, workers before the core that they take along."""
        dead = []
        for (pid, ticks), name in list(self._processes.items()):
            stat = read_stat(pid)
            if stat is None or stat.start_ticks != ticks or stat.state in ZOMBIE_STATES:
                dead.append(name)
        return sorted(dead, key=lambda name: not name.startswith("rank"))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._open and self._found is not None:
            raise EngineLostError(self._found.what)

    def _end(self, what: str) -> None:
        print("ctl: the driver does not leave vLLM; its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        # A dead disk must not keep what follows from its end.
        last = threading.Timer(LAST_S, os._exit, (1,))
        last.daemon = True
        last.start()
        try:
            self._give_up(EngineLostError(what))
            self.kill_left()
        finally:
            os._exit(1)


def told(event: dict[str, Any]) -> str:
    """Return a rank's exception in a line."""
    return (
        f"rank {event.get('rank')} raised {event.get('exc_type')}: {event.get('message')} (in {event.get('where')})"
    )

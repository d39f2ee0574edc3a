"""What is known of one run for the screen: a sink of events and log bytes on one side, snapshots on the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from controller.core.clocks import HostClock
from controller.core.events import Event
from controller.core.runview import RunView
from controller.core.state import reduce
from controller.core.tracebacks import FoldedFailure
from controller.ui.logbuffer import LogBuffer


class Controls(Protocol):
    """What the keys may do to a run; both return at once or take seconds, and may raise CtlError."""

    def detach(self) -> None:
        """End the watch; the run goes on."""

    def stop(self) -> str:
        """Stop the run on its host, and return how that went in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """Why a run failed: a record of `core.triage` (code, what, why, fix, known, ...), and the tracebacks to read."""

    cause: Mapping[str, Any] | None = None
    failures: tuple[FoldedFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the events do not say.

    `earlier` are events that this machine wrote when it watched the run before. `ranks` gives the tensor-parallel
    rank of a GPU by its index, `usual` the seconds that a stage, step or phase took in earlier runs, `written` the
    time of each rank's last sample, `printed` that of the log's last byte (both seconds since the epoch by the host's
    clock; None where it is not known); for `ending_s` see RunView. `diagnose` is asked once,
    when a run has ended that is no success; it may take seconds.
    """

    title: str = ""
    earlier: tuple[Event, ...] = ()
    ranks: Mapping[int, int] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)
    ending_s: float | None = None
    written: Callable[[], Mapping[int, float]] = dict
    printed: Callable[[], float | None] = lambda: None
    diagnose: Callable[[], Diagnosed] = Diagnosed


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment. Times are seconds since the epoch by this machine's clock, `host_now` by the host's."""

    view: RunView
    now: float
    host_now: float
    quiet_s: float = 0.0
    silent: Mapping[int, float] = field(default_factory=dict)
    """Seconds since each rank's last sign of life."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)
    shards: tuple[int, int] | None = None
    cause: Mapping[str, Any] | None = None
    failures: tuple[FoldedFailure, ...] = ()
    """Nearest the cause first: those of the events until the run has ended, then those of the diagnosis."""


class RunBoard:
    """Collects what happens in a run; it may be fed from any thread, as often as things happen."""

    def __init__(self, *, run: str, host: str, known: Known, clock: Callable[[], float]) -> None:
        self.known = known
        self.controls: Controls | None = None
        self.lock = threading.Lock()
        self.log_buffer = LogBuffer()
        """To be read with `lock` held."""
        self._clock = clock
        self._view = replace(RunView(), run=run, host=host, playbook=known.title, ending_s=known.ending_s)
        self._signs: dict[int, float] = {}
        self._host_clock = HostClock()
        self._last_report: float | None = None
        self._last_log: float | None = None
        self._host_behind_s: float | None = None
        self._diagnosed = Diagnosed()

    def event(self, event: Event) -> None:
        """Take an event."""
        now = self._clock()
        with self.lock:
            before, self._view = self._view, reduce(self._view, event)
            view = self._view
            self._host_clock.heard(event, now)
            at = min(now, self._host_clock.here(event))  # a look at a run brings what happened long ago
            if view.host_time is not None and view.host_time != before.host_time:
                # The least delay seen is the best estimate of how far apart the clocks are.
                behind = now - view.host_time
                self._host_behind_s = min(behind, behind if self._host_behind_s is None else self._host_behind_s)
            if event.type == "progress" or self._last_report is None:
                self._last_report = at
            if event.writer.startswith("rank-") and event.writer[5:].isdigit():
                self._signs[int(event.writer[5:])] = at
        if view.end is not None and before.end is None and view.end.end_reason != "succeeded":
            diagnosed = self.known.diagnose()
            with self.lock:
                self._diagnosed = diagnosed

    def control(self, controls: Controls) -> None:
        """From now on the keys may act on the run."""
        self.controls = controls

    def log(self, data: bytes) -> None:
        """Take raw bytes of the job's output."""
        now = self._clock()
        with self.lock:
            self.log_buffer.feed(data, now)
            self._last_log = now

    def snapshot(self) -> Snapshot:
        """Return the run as it is now."""
        now = self._clock()
        written, printed = self.known.written(), self.known.printed()
        with self.lock:
            behind = self._host_clock.behind_s
            # The log comes in one piece at the beginning of a look; its last byte was printed when the host says.
            no_later = now if printed is None else min(now, printed + behind)
            logged = {rank: min(at, no_later) for rank, at in self.log_buffer.signs.items()}
            samples = {rank: min(now, at + behind) for rank, at in written.items()}
            outputs = [self._last_report, None if self._last_log is None else min(self._last_log, no_later)]
            heard = max((at for at in outputs if at is not None), default=now)
            last: dict[int, float] = {}
            for signs in (logged, self._signs, samples):
                for rank, at in signs.items():
                    last[rank] = max(at, last.get(rank, at))
            return Snapshot(
                view=self._view,
                now=now,
                host_now=now - (self._host_behind_s or 0.0),
                quiet_s=max(0.0, now - heard),
                silent={rank: max(0.0, now - at) for rank, at in last.items()},
                ranks=self.known.ranks,
                usual=self.known.usual,
                shards=self.log_buffer.shards,
                cause=self._diagnosed.cause,
                failures=self._diagnosed.failures or self._view.exceptions,
            )

"""Views without a dashboard: one line a change for people and CI logs, JSON lines for programs, or nothing.

Everything goes to stderr. Nothing here draws: no colour, no cursor movement, and no import of rich.live.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self, TextIO

from controller.core.clocks import HostClock
from controller.core.errors import UsageError
from controller.core.events import Event
from controller.core.logs import LogLine
from controller.core.runview import RunView
from controller.ui.board import Controls, Known
from controller.ui.clean import clean
from controller.ui.formats import clock_text
from controller.ui.plainlines import changes, heartbeat, progress_line
from controller.ui.viewsink import ViewSink
from remote_payload.host.protocol import RunState

HEARTBEAT_S = 30.0
"""A CI log without a line for longer looks dead, and some CI systems then end the job."""

ID_END = 6
"""Letters at the end of a run id that are its own: what comes before them is the time."""

PROGRESS_STEP = 0.1
"""A line for each tenth of the samples, besides the heartbeat."""

PROGRESS_MODES = ("auto", "plain", "json", "none")

SILENT = "silent"
"""What `-qq` makes of the modes: not even warnings."""


class RunSink(Protocol):
    """Takes what happens in one run, for a view."""

    def event(self, event: Event) -> None:
        """Take an event."""

    def log(self, data: bytes) -> None:
        """Take raw bytes of the job's output."""

    def control(self, controls: Controls) -> None:
        """Let keys act on the run from now on, where there are any."""


class View(Protocol):
    """A way to show one run, or several. Its sinks may be fed from any thread, as often as things happen."""

    def sink(self, *, run: str, host: str, known: Known) -> RunSink:
        """Add a run, and return what takes its events and its output."""

    @property
    def told(self) -> Collection[tuple[object, ...]]:
        """Causes (see `Failure.cause`) of the tracebacks that stand whole in what was printed, and stay there."""

    def paused(self) -> AbstractContextManager[None]:
        """Keep off the terminal while a question is asked."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def choose_view(
    stderr: TextIO,
    environ: Mapping[str, str],
    progress: str = "auto",
    *,
    show_log: bool = False,
    clock: Callable[[], float] = time.time,
    error_follows: bool = True,
) -> View:
    """Return the view for `progress`: auto, plain, json, none or SILENT.

    `show_log`: plain lines hold the job's output too; `clock` gives the times in front of plain lines, in seconds
    since the epoch. `error_follows`: what refuses a run or makes it fail is told by the error at the end, and not at
    the end of the view.

    auto is the dashboard only where stderr is a terminal that can move its cursor, nobody claims to be CI, and
    NO_COLOR (https://no-color.org) is not set; stdout does not matter, so that `ctl ... | tee` stays alive. Raises
    UsageError for another word.
    """
    if progress == "json":
        return JsonView(stderr)
    if progress == "none":
        return QuietView(stderr)
    if progress == SILENT:
        return SilentView()
    if progress not in PROGRESS_MODES:
        raise UsageError(f"unknown progress {progress!r}", fix=f"use one of {', '.join(PROGRESS_MODES)}")
    if progress == "auto" and animates(stderr, environ):
        from controller.ui.live import LiveView  # heavy, and only wanted on a terminal

        return LiveView(stderr, keyboard=keyboard(), error_follows=error_follows)
    return PlainView(stderr, show_log=show_log, clock=clock, error_follows=error_follows)


def animates(stderr: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether a dashboard is wanted and can be drawn."""
    able = stderr.isatty() and environ.get("TERM", "") not in ("", "dumb")
    return able and not environ.get("CI") and not environ.get("NO_COLOR")


def keyboard() -> int | None:
    """Return the descriptor of the terminal that keys come from; None where stdin is something else."""
    try:
        return sys.stdin.fileno() if sys.stdin.isatty() else None
    except (AttributeError, ValueError, OSError):  # no stdin, or one without a descriptor
        return None


class SilentView:
    """Shows nothing; errors still speak at the end."""

    shows_log = False

    @property
    def told(self) -> Collection[tuple[object, ...]]:
        return ()

    def sink(self, *, run: str, host: str, known: Known) -> RunSink:
        return ViewSink(self, run=run, host=host, known=known)

    def event(self, event: Event) -> None: ...

    def update(self, view: RunView) -> None: ...

    def log(self, lines: Sequence[LogLine], t: float | None = None) -> None: ...

    def heard(self) -> None: ...

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class QuietView(SilentView):
    """No progress, but what this side warns of: of a failed hook, or a damaged copy, nothing else would tell."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def event(self, event: Event) -> None:
        if is_own_warning(event):
            self._stream.write(f"WARN  {clean(str(event.get('text')))}\n")
            self._stream.flush()


def is_own_warning(event: Event) -> bool:
    """Whether an event is a warning of this workstation: the host's are in the summary, or in what ends the run."""
    return event.type == "notice" and event.writer == "controller" and event.get("level") == "warn"


class JsonView(SilentView):
    """Every event as one JSON line, exactly as it is recorded."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def event(self, event: Event) -> None:
        self._stream.write(event.to_json() + "\n")
        self._stream.flush()


class PlainView(SilentView):
    """One line a change, and a heartbeat; log lines stay in the run folder unless `show_log`."""

    def __init__(
        self,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.time,
        heartbeat_s: float = HEARTBEAT_S,
        show_log: bool = False,
        label: str = "",
        error_follows: bool = True,
    ) -> None:
        """`label` stands before each line, where several runs share a stream; `error_follows`: see `choose_view`."""
        self._stream = stream
        self._label = f"{label}: " if label else ""
        self._others: list[PlainView] = []
        self._names: list[tuple[str, str]] = []
        self._error_follows = error_follows
        self._told: set[tuple[object, ...]] = set()
        self.shows_log = show_log
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._view = RunView()
        self._host_clock = HostClock()
        self._at: float | None = None
        self._last_print = clock()
        self._last_output = clock()
        self._printed_tenth = 0
        self._paused = False
        self._closed = threading.Event()
        self._beat = threading.Thread(target=self._beat_on, name="ctl-heartbeat", daemon=True)

    def sink(self, *, run: str, host: str, known: Known) -> RunSink:
        """Return the sink of a run. From the second on each has a view of its own, and a name before its lines.

        The name is the host, and the end of the run's id where two are on one host.
        """
        self._names.append((host, run))
        if not self._view.run:
            self._view = replace(self._view, run=run, host=host)
            for event in known.earlier:
                self._host_clock.heard(event, self._clock())
            return super().sink(run=run, host=host, known=known)
        other = PlainView(
            self._stream, clock=self._clock, heartbeat_s=self._heartbeat_s, show_log=self.shows_log,
            error_follows=self._error_follows,
        )  # fmt: skip
        self._others.append(other.__enter__())
        hosts = [each for each, _ in self._names]
        for view, (name, run_id) in zip((self, *self._others), self._names, strict=True):
            view._label = f"{name}: " if hosts.count(name) == 1 else f"{name} {run_id[-ID_END:]}: "
        return other.sink(run=run, host=host, known=known)

    @property
    def told(self) -> Collection[tuple[object, ...]]:
        return self._told

    def __enter__(self) -> Self:
        self._beat.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for other in self._others:
            other.__exit__(exc_type, exc, trace)
        self._closed.set()
        self._beat.join(timeout=5)

    def event(self, event: Event) -> None:
        with self._lock:
            self._host_clock.heard(event, self._clock())
            self._at = self._host_clock.here(event)

    def update(self, view: RunView) -> None:
        with self._lock:
            before, self._view = self._view, view
            if view.state != RunState.STOPPING.value:
                self._told |= {failure.cause for failure in view.failures[len(before.failures) :]}
            self._print(changes(before, view, refused=not self._error_follows), self._at)
            self._print_tenth(view)

    def log(self, lines: Sequence[LogLine], t: float | None = None) -> None:
        with self._lock:
            at = None if t is None else min(self._clock(), t + self._host_clock.behind_s)
            self._print([f"| {clean(line.raw)}" for line in lines if not line.partial], at)

    def heard(self) -> None:
        self._last_output = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def heartbeat(self) -> None:
        """Say where the run stands, if nothing was said for long."""
        with self._lock:
            now = self._clock()
            if self._paused:
                return
            if self._view.end is None and now - self._last_print >= self._heartbeat_s:
                self._print([heartbeat(self._view, now, now - self._last_output)])

    def _beat_on(self) -> None:
        while not self._closed.wait(min(1.0, self._heartbeat_s)):
            self.heartbeat()

    def _print_tenth(self, view: RunView) -> None:
        progress = view.progress
        if progress is None or progress.fraction is None:
            return
        tenth = int(progress.fraction / PROGRESS_STEP + 1e-9)
        if tenth > self._printed_tenth:
            self._printed_tenth = tenth
            self._print([progress_line(view)], self._at)

    def _print(self, lines: Sequence[str], at: float | None = None) -> None:
        """Print lines with the time of what they tell, which may be long ago; without one it is now."""
        if not lines:
            return
        self._last_print = now = self._clock()
        stamp = clock_text(now if at is None else at, now)
        self._stream.write("".join(f"{stamp}  {self._label}{line}\n" for line in lines))
        self._stream.flush()

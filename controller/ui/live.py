"""The dashboard: the frames of `frame.render` at the bottom of the terminal, on stderr, until the run has ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live

from controller.core.events import Event
from controller.core.logs import LogLine
from controller.core.runview import RunView
from controller.ui.clean import Encodable
from controller.ui.frame import render
from controller.ui.glyphs import glyphs_for

__all__ = ["LiveView", "render"]

REFRESH_HZ = 4
"""Enough for a spinner to look alive, little enough for a slow link."""

TAIL = 200
"""Log lines kept: more than any terminal is high."""


class LiveView:
    """A dashboard on a terminal. Its last frame stays in the scrollback.

    `update` and `log` may be called from any thread, as often as things happen.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._lock = threading.Lock()
        self._view = RunView()
        self._tail: deque[LogLine] = deque(maxlen=TAIL)
        self._last_output: float | None = None
        self._host_behind_s: float | None = None
        self._live = self._new_live()

    def event(self, event: Event) -> None:
        """Nothing: the dashboard shows states, not events."""

    def update(self, view: RunView) -> None:
        """Show a new state."""
        now = self._clock()
        with self._lock:
            if view.host_time is not None and view.host_time != self._view.host_time:
                # The least delay seen is the best estimate of how far apart the clocks are.
                behind = now - view.host_time
                self._host_behind_s = min(behind, behind if self._host_behind_s is None else self._host_behind_s)
            if view.progress is not self._view.progress or self._last_output is None:
                self._last_output = now
            self._view = view

    def log(self, lines: Sequence[LogLine]) -> None:
        """Add lines to the tail; one that is complete replaces the unfinished one before it."""
        if not lines:
            return
        with self._lock:
            for line in lines:
                if self._tail and self._tail[-1].partial:
                    self._tail.pop()
                self._tail.append(line)
            self._last_output = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the dashboard off the screen, to ask a question."""
        self._live.transient = True
        self._live.stop()
        try:
            yield
        finally:
            self._live = self._new_live()
            self._live.start()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.frame(options.max_width, options.size.height, options.encoding)

    def frame(self, width: int, height: int, encoding: str = "utf-8") -> RenderableType:
        """Return the frame of this moment for a terminal of `width` by `height` cells."""
        now = self._clock()
        with self._lock:
            view, tail, last = self._view, list(self._tail), self._last_output
            behind = self._host_behind_s or 0.0
        glyphs = glyphs_for(encoding)
        frame = render(
            view,
            tail,
            width,
            height - 1,  # the cursor needs a line of its own, or the terminal scrolls
            now,
            quiet_s=0.0 if last is None else now - last,
            host_behind_s=behind,
            glyphs=glyphs,
        )
        return Encodable(frame)

    def _new_live(self) -> Live:
        return Live(
            get_renderable=lambda: self,
            console=self._console,
            refresh_per_second=REFRESH_HZ,
            redirect_stdout=False,  # stdout is data, and may go elsewhere
            vertical_overflow="crop",
        )

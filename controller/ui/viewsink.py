"""Joins a run's events and raw log bytes into what a view shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from controller.core.events import Event
from controller.core.logs import LogFolder, LogLine
from controller.core.runview import RunView
from controller.core.state import reduce
from controller.ui.board import Controls, Known


class View(Protocol):
    """A screen, plain lines or JSON lines."""

    def update(self, view: RunView) -> None: ...

    @property
    def shows_log(self) -> bool:
        """Whether `log` is to be called: a log read as lines takes ten times as long as a log that is only copied."""

    def log(self, lines: Sequence[LogLine], t: float | None = None) -> None:
        """Show lines; `t` is when they were printed, in seconds since the epoch by the host's clock, where known."""

    def heard(self) -> None:
        """The job has printed something."""

    def event(self, event: Event) -> None: ...


class ViewSink:
    """A `Sink` of a run that keeps a `RunView` up to date and hands it to a view."""

    def __init__(self, view: View, *, run: str, host: str, known: Known) -> None:
        self._view = view
        self._state = replace(RunView(), run=run, host=host, playbook=known.title, ending_s=known.ending_s)
        self._folder = LogFolder()

    def event(self, event: Event) -> None:
        self._state = reduce(self._state, event)
        self._view.event(event)
        self._view.update(self._state)

    def log(self, data: bytes) -> None:
        self.log_at(data, -math.inf)

    def log_at(self, data: bytes, t: float) -> None:
        """Take bytes of the log that were printed at `t`, -inf where that is not known."""
        self._view.heard()
        if not self._view.shows_log:
            return
        lines = self._folder.feed(data)
        if (partial := self._folder.partial) is not None:
            lines.append(partial)  # a progress bar at work; a view replaces it when the line is complete
        if lines:
            self._view.log(lines, t if math.isfinite(t) else None)

    def control(self, controls: Controls) -> None:
        """Nothing: there are no keys here."""

"""When something happened by this machine's clock, of which a host only says when by its own."""

from __future__ import annotations

import math

from controller.core.events import Event

CONTROLLER = "controller"
"""The writer whose clock is this machine's."""


class HostClock:
    """What is known of how far a host's clock is behind this machine's, from a run's events.

    Clocks are taken to agree unless the events say that they cannot: no event of the host is older than the launch of
    its run, and none came here before it happened. Old events alone do not tell a slow clock from a late look.
    """

    def __init__(self) -> None:
        self._launched: float | None = None
        self._least, self._most = -math.inf, math.inf

    def heard(self, event: Event, now: float) -> None:
        """Take an event into account that was met at `now` (seconds since the epoch, by this machine's clock)."""
        if event.writer != CONTROLLER:
            self._most = min(self._most, now - event.t)
            if self._launched is not None:
                self._least = max(self._least, self._launched - event.t)
        elif self._launched is None and (event.type, event.get("name")) == ("stage", "launch"):
            self._launched = event.t

    def here(self, event: Event) -> float:
        """Return when an event happened, by this machine's clock."""
        return event.t if event.writer == CONTROLLER else event.t + self.behind_s

    @property
    def behind_s(self) -> float:
        """Seconds to add to a time of the host's clock for one of this machine's."""
        return max(self._least, min(0.0, self._most))

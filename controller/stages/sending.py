"""How far a push of files is: told as it goes, often enough to be followed and seldom enough for a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from controller.core.finding import size
from controller.stages.base import Context

STEP = 0.05
"""Share of the bytes after which it is told at the latest."""

TOLD_S = 5.0
"""The same in seconds: a twentieth of a large data set takes minutes over a slow line."""


class Meter:
    """Emits the `stage` event anew with `done` and `total`, in bytes."""

    def __init__(
        self, ctx: Context, stage: str, what: str, total: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ctx, self._stage, self._what, self._total, self._clock = ctx, stage, what, total, clock
        self._told_at = clock()
        self._told = 0
        self.sent = 0

    def add(self, count: int) -> None:
        """So many bytes more were sent."""
        self.sent += count
        now = self._clock()
        if self.sent - self._told < STEP * self._total and now - self._told_at < TOLD_S:
            return
        self._told, self._told_at = self.sent, now
        text = f"{self._what}: {self.sent / self._total:.0%} of {size(self._total)}"
        self._ctx.emit("stage", name=self._stage, status="started", text=text, done=self.sent, total=self._total)

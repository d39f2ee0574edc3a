"""Deadlines that hold even where a library offers none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PAUSED_POLL_S = 0.2
"""How soon a guard notices that a paused deadline runs again."""


class Deadline:
    """A point in monotonic time, `seconds` from now, that stands still while a person is being asked something."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._end = time.monotonic() + seconds
        self._paused_at: float | None = None

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    @property
    def expired(self) -> bool:
        return self.remaining() <= 0

    def remaining(self) -> float:
        """Return the seconds left, never less than 0."""
        with self._lock:
            now = time.monotonic() if self._paused_at is None else self._paused_at
            return max(0.0, self._end - now)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock for the duration of the block."""
        with self._lock:
            self._paused_at = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._end += time.monotonic() - self._paused_at
                self._paused_at = None


@contextmanager
def guard(deadline: Deadline, abort: Callable[[], None]) -> Iterator[None]:
    """Call `abort` from another thread if the block is still running at its deadline.

    Paramiko waits without any limit in several places (the reply to an exec request is one); what ends such a
    wait is that somebody closes the channel or socket under it. `abort` does that.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_PAUSED_POLL_S if deadline.paused else max(deadline.remaining(), 0.01)):
            if deadline.expired and not deadline.paused:
                abort()
                return

    watcher = threading.Thread(target=watch, name="ctl-deadline", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()

"""Errors of the capture, and how any error reaches the run's events."""

from __future__ import annotations

import traceback
from typing import Any, Protocol

from remote_payload.host.errors import without_queries


class CaptureError(RuntimeError):
    """The engine does not deliver what is to be captured; the run ends rather than write something else."""


class Events(Protocol):
    """Takes events, as `EventWriter` does."""

    def emit(self, type: str, **fields: Any) -> None: ...  # noqa: A002 - the field's name on the wire


class ExceptionReporter:
    """Writes `exception` events with the whole traceback, chained causes included; each exception once.

    vLLM passes a worker's error on as its message alone, which may be empty, and the parent only says to look above.
    """

    def __init__(self, events: Events, rank: int | None) -> None:
        self._events = events
        self._rank = rank
        self._last: BaseException | None = None

    def report(self, error: BaseException, where: str) -> None:
        """Idempotent for the same exception, which passes several wrapped methods on its way up."""
        if error is self._last:
            return
        self._last = error
        self._events.emit(
            "exception",
            rank=self._rank,
            exc_type=type(error).__name__,
            message=without_queries(str(error)),
            traceback=without_queries("".join(traceback.format_exception(error))),
            where=where,
        )

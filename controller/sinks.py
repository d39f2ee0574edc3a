"""What a run is told to as it happens: the views, and whatever a script adds."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from controller.core.events import Event


class Sink(Protocol):
    """Consumes a run as it happens; every view is one."""

    def event(self, event: Event) -> None: ...

    def log(self, data: bytes) -> None: ...


@runtime_checkable
class TimedSink(Sink, Protocol):
    """One that shows when the job printed what."""

    def log_at(self, data: bytes, t: float) -> None:
        """Take, instead of `log`, raw bytes and when they came, in seconds since the epoch by the host's clock.

        -inf: not known.
        """


def give_log(sink: Sink, data: bytes, t: float) -> None:
    """Give a sink raw bytes of the log, with their time if it takes that."""
    if isinstance(sink, TimedSink):
        sink.log_at(data, t)
    else:
        sink.log(data)

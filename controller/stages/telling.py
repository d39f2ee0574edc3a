"""Events and log of a run in the order in which they happened, though a host sends them file after file."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

from controller.core.events import Event
from controller.core.loglines import Place, TimeIndex

Piece = tuple[Place | None, bytes]
"""Bytes of the log and where they lie in it; None for a line of ours, in the place of what is missing."""


def told(
    events: Iterable[tuple[float, Event]], log: Iterable[Piece], times: TimeIndex
) -> Iterator[tuple[float, Event | bytes]]:
    """Yield both by the host's clock, each with its time (seconds since the epoch); neither leaves its own order.

    `events` come by their times, as `state.in_order` gives them. Bytes come when `times` notes that they, or others
    up to a second before them, were printed: so never after what they came before. -inf is the time of bytes of
    which nothing is noted.
    """
    both: Sequence[Iterable[tuple[float, Event | bytes]]] = (events, _timed(log, times))
    yield from heapq.merge(*both, key=lambda each: each[0])


def _timed(log: Iterable[Piece], times: TimeIndex) -> Iterator[tuple[float, bytes]]:
    latest = -math.inf
    for place, data in log:
        for t, part in times.parts(place, data) if place is not None else [(None, data)]:
            latest = max(latest, -math.inf if t is None else t)
            yield latest, part

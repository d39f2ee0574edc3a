"""Which of a run's notices still hold: what a later event ended is past, and no longer for the screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from remote_payload.host.codes import PAUSES

ENDED_BY: Mapping[str, tuple[str, ...]] = {
    "disk-freed": PAUSES,
    "gpu-query-works": ("gpu-query-failed",),
    "events-written": ("events-unwritten",),
}
"""Code of a notice, and the codes of those that it ends, of its own writer."""

UNTIL_CAPTURED = ("sample-deferred",)
"""True until every sample is on disk, which the end of the drain says."""

UNTIL_ENDED = ("orphaned",)
"""True of a run that goes on."""


class Coded(Protocol):
    """A notice as far as this needs it."""

    @property
    def code(self) -> str: ...

    @property
    def writer(self) -> str: ...


N = TypeVar("N", bound=Coded)


def holding(notices: Sequence[N], *, captured: bool, ended: bool) -> list[N]:
    """Return the notices that still hold, in their order; they must be in the order of their writers.

    `captured`: every sample is on disk. `ended`: the run is over. A pause that nothing ended holds after the run:
    the disk was full when it ended.
    """
    past = {*(UNTIL_CAPTURED if captured else ()), *(UNTIL_ENDED if ended else ())}
    over: set[tuple[str, str]] = set()
    still: list[N] = []
    for notice in reversed(notices):
        if notice.code not in past and (notice.writer, notice.code) not in over:
            still.append(notice)
        over.update(_ends(notice))
    return still[::-1]


def _ends(notice: Coded) -> Iterable[tuple[str, str]]:
    return ((notice.writer, code) for code in ENDED_BY.get(notice.code, ()))

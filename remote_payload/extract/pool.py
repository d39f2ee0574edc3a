"""The bound on a rank's host buffers, and patience with a full disk.

A worker must never just wait: vLLM kills an engine whose step takes longer than its own time-out. So whoever wants
a buffer waits only while a writer is about to free one, and is told to give up otherwise.
"""

from __future__ import annotations

import bisect
import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

DEFAULT_BUFFER_BYTES = 4 << 30
"""Bytes a rank: 32 GiB on a host with 8. What torch's pinned allocator rounds up, and keeps once freed, is on top."""

ALIGNMENT = 8
"""Bytes: of the widest number that a buffer may hold."""

WAIT_S = 60.0
"""Seconds to wait for a slow disk: far below VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, whose default is 300."""

RETRY_S = 0.5
"""Seconds between two tries on a full disk: quick to go on, and a rewritten buffer costs nothing meanwhile."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""A quota is as full as a disk, and is emptied in the same way."""


class Abandoned(Exception):
    """What was to be written is no longer wanted."""


class BufferPool:
    """Hands out ranges of one piece of memory of `limit` bytes, first fit; never more than that piece.

    One piece, because pinned memory is slow to get (seconds for 4 GiB) and torch's own cache of it rounds every
    request up to a power of two and gives nothing back: many lengths would pin several times the limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._holes = [(0, limit)]  # (first byte, bytes), in order, never side by side
        self._taken: dict[int, int] = {}  # first byte -> bytes
        self._used = self._peak = 0
        self._writing = 0
        self._stalled: str | None = None
        self._changed = threading.Condition()

    @property
    def peak(self) -> int:
        """The most bytes that were in use at once."""
        return self._peak

    @property
    def stalled(self) -> str | None:
        """Why no writer makes progress (the disk is full); None while they do."""
        return self._stalled

    def acquire(self, size: int, check: Callable[[], None], wait_s: float = WAIT_S) -> int | None:
        """Take `size` bytes; return where they begin, None if there is no room and waiting is no use.

        Half-filled samples hold buffers until later steps complete them, so waiting is right only while a writer is
        about to free one. `check` runs about once a second meanwhile and may raise. Raises ValueError for no bytes:
        two such buffers would begin at one place.
        """
        if size <= 0:
            raise ValueError(f"a buffer of {size} bytes")
        size = -(-size // ALIGNMENT) * ALIGNMENT
        deadline = time.monotonic() + wait_s
        with self._changed:
            while (first := self._fit(size)) is None:
                if not self._writing or self._stalled or time.monotonic() >= deadline:
                    return None
                self._changed.wait(1.0)
                check()
            self._taken[first] = size
            self._used += size
            self._peak = max(self._peak, self._used)
            return first

    def writing(self) -> None:
        """A buffer was handed to a writer, which will release it."""
        with self._changed:
            self._writing += 1

    def release(self, first: int, *, written: bool) -> None:
        """Give back what `acquire` gave; `written`: by a writer."""
        with self._changed:
            size = self._taken.pop(first)
            self._used -= size
            self._writing -= written
            place = bisect.bisect(self._holes, (first, 0))
            if place < len(self._holes) and self._holes[place][0] == first + size:
                size += self._holes.pop(place)[1]
            if place and sum(self._holes[place - 1]) == first:
                first, before = self._holes.pop(place - 1)
                place, size = place - 1, size + before
            self._holes.insert(place, (first, size))
            self._changed.notify_all()

    def _fit(self, size: int) -> int | None:
        for place, (first, room) in enumerate(self._holes):
            if room >= size:
                self._holes[place : place + 1] = [(first + size, room - size)] if room > size else []
                return first
        return None

    def patiently(self, operation: Callable[[], Result], wanted: Callable[[], bool] = lambda: True) -> Result:
        """Return what `operation` returns, trying again for as long as the disk is full.

        Raises Abandoned when `wanted` turns false meanwhile, and any other error of `operation`.
        """
        while True:
            try:
                result = operation()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._stall(f"{error.filename or 'a file'}: {error.strerror}")
                if not wanted():
                    raise Abandoned from error
                time.sleep(RETRY_S)
            else:
                self._stall(None)
                return result

    def _stall(self, why: str | None) -> None:
        if why != self._stalled:
            with self._changed:
                self._stalled = why
                self._changed.notify_all()

"""What of a command's output has arrived over paramiko and is not read yet, kept as the packets that came."""

from __future__ import annotations

import threading
import time
from collections import deque

from paramiko.buffered_pipe import PipeTimeout


class ChannelBuffer:
    """Stands in for paramiko's `BufferedPipe` as a channel's `in_buffer` and `in_stderr_buffer`.

    That one is a single array: a read moves in memory whatever it leaves behind, so that all of the window has to be
    read at once, and each such read costs several copies of it. A consumer slower than the network then makes blocks
    of up to 16 MiB come and go, which the allocator keeps in pieces: a controller of 90 MB went up and down between
    100 and 190 MB. Here a read moves what it returns and at most one packet more, and no more than the window is ever
    held.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._packets: deque[bytes] = deque()
        self._size = 0
        self._closed = False

    def feed(self, data: bytes) -> None:
        """Add what arrived; called by paramiko's own thread."""
        with self._changed:
            if data:
                self._packets.append(data)
                self._size += len(data)
            self._changed.notify_all()

    def read(self, nbytes: int, timeout: float | None = None) -> bytes:
        """Return at most `nbytes` as soon as there are any, b"" at the end. Raises PipeTimeout after `timeout` s."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._packets and not self._closed:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise PipeTimeout
                self._changed.wait(left)
            return self._take(nbytes)

    def read_ready(self) -> bool:
        with self._changed:
            return bool(self._packets)

    def empty(self) -> bytes:
        """Return and forget everything held."""
        with self._changed:
            return self._take(self._size)

    def close(self) -> None:
        """Let `read` return b"" once everything held was read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return self._size

    def _take(self, nbytes: int) -> bytes:
        taken: list[bytes] = []
        room = nbytes
        while self._packets and room > 0:
            packet = self._packets.popleft()
            if len(packet) > room:
                self._packets.appendleft(packet[room:])
                packet = packet[:room]
            taken.append(packet)
            room -= len(packet)
        data = taken[0] if len(taken) == 1 else b"".join(taken)
        self._size -= len(data)
        return data

"""Waiting for a lease in order of arrival.

Beside each lock file lies a queue file. Who waits holds, or waits for, `flock` on it: the kernel hands it on in order
of arrival, and only the first in line tries for the lease itself. A run that is launched without waiting takes its
chance like anybody; it can be faster than the queue, never hold the lease beside it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from typing import List

from remote_payload.host.lease import open_shared, resource_path


class Turn:
    """A place in the queue for all of `resources`; `close` gives it up."""

    def __init__(self, folder: str, resources: List[str]) -> None:
        self._paths = [resource_path(folder, resource) + ".queue" for resource in sorted(resources)]
        self._descriptors: List[int] = []
        self._first = threading.Event()
        # flock cannot be waited for with a deadline; a thread waits, so that a request to stop is heard meanwhile.
        # When it is left waiting, it ends with this process, which has then nothing else to do than to end.
        threading.Thread(target=self._line_up, name="queue", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether we are the first in line, after at most `timeout_s` seconds."""
        return self._first.wait(timeout_s)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _line_up(self) -> None:
        for path in self._paths:  # sorted: two that wait for the same GPUs never wait for each other
            descriptor = open_shared(path, create=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._descriptors.append(descriptor)
        self._first.set()

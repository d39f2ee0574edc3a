"""When the bytes of a log were printed: log/times.jsonl, {"t", "segment", "offset"} a line.

A line says that the bytes of a segment from `offset` on came at `t` (seconds since the epoch) or later, up to those
of the next line. At most one a second is written, so a day of output costs a few megabytes.
"""

from __future__ import annotations

import time
from typing import Optional

from remote_payload.host.journal import Journal, complain
from remote_payload.host.layout import LOG_TIMES
from remote_payload.host.segments import LogFiles

INTERVAL_S = 1.0
"""What people can ask for with `--since` is no finer."""


class Times:
    """The writer of that file; the pump's. It never stops the log: what it cannot write is told once, and missing."""

    def __init__(self, files: LogFiles) -> None:
        self._noted = float("-inf")
        self._journal: Optional[Journal] = None
        try:
            self._journal = Journal("%s/%s" % (files.folder, LOG_TIMES))
        except OSError as error:
            self._give_up(error)

    def note(self, segment: int, offset: int) -> None:
        """Note that bytes from `offset` of a segment on have just come."""
        now = time.monotonic()
        if self._journal is None or now - self._noted < INTERVAL_S:
            return
        self._noted = now
        try:
            self._journal.append({"t": round(time.time(), 3), "segment": segment, "offset": offset})
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _give_up(self, error: OSError) -> None:
        complain("the times of the log are not kept any more: %s" % error)
        self.close()
        self._journal = None

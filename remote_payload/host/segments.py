"""The files of RUN/log: segments in a row, and a cap on what they hold together.

Over the cap the oldest segment of the middle is given up: its size and hash are recorded in gaps.jsonl, on disk,
before the file goes. So a loss is always declared, and a reader that has the segment already can prove its copy.
The beginning (the configuration, the first error) and the end are what people look for.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Dict, List, Optional

from remote_payload.host.files import read_json, read_lines, sha256_of
from remote_payload.host.journal import Journal
from remote_payload.host.layout import LOG_GAPS, RunPaths

SEGMENT_BYTES = 64 << 20
"""64 MiB: small enough to hash and re-send, large enough that a day's log is a handful of files."""

DEFAULT_CAP_BYTES = 4 << 30
"""4 GiB: weeks of vLLM's own output; a job that prints more has a loop, and must not fill the disk with it."""

SEGMENTS_UNDER_CAP = 8
"""A small cap is divided into at least this many segments, so that one loss is a small part of the log."""


class LogFiles:
    """The files of RUN/log beside the segments."""

    def __init__(self, paths: RunPaths) -> None:
        self.folder = paths.log
        self.pipe = paths.pipe
        self.lock = os.path.join(paths.log, "pump.lock")
        self.closed = os.path.join(paths.log, "closed")
        self.gaps = os.path.join(paths.log, LOG_GAPS)

    def segments(self) -> List[str]:
        """Return the paths of all segments that are there, in order."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [os.path.join(self.folder, name) for name in sorted(names) if name.endswith(".log")]

    def path(self, number: int) -> str:
        return os.path.join(self.folder, "%06d.log" % number)


class Segments:
    """Where the pump, the only writer, puts the bytes. `cap_bytes` bounds all segments together."""

    def __init__(self, files: LogFiles, cap_bytes: int, segment_bytes: Optional[int] = None) -> None:
        self.segment_bytes = segment_bytes or max(1, min(SEGMENT_BYTES, cap_bytes // SEGMENTS_UNDER_CAP))
        self._files = files
        self._kept = max(3, cap_bytes // self.segment_bytes)
        self._head = max(1, self._kept // 4)
        for gap in read_gaps(files):  # a pump that was killed between the record and the deletion
            with contextlib.suppress(FileNotFoundError):
                os.unlink(files.path(gap["segment"]))
        segments = files.segments()
        self._number = segment_number(segments[-1]) if segments else 1
        self.target = self._open()

    @property
    def number(self) -> int:
        """Of the segment that is being written."""
        return self._number

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return os.fstat(self.target).st_size

    def room(self) -> int:
        """Return the bytes that the segment still takes; 0 when `rotate` is due."""
        return max(0, self.segment_bytes - self.size)

    def rotate(self) -> List[Dict[str, Any]]:
        """Begin the next segment; return the gaps that this made, {"segment", "bytes", "sha256"} each.

        Raises OSError, for example on a full disk.
        """
        made = []
        while True:
            segments = self._files.segments()
            if len(segments) < self._kept:
                break
            made.append(self._give_up(segments[self._head]))
        os.close(self.target)
        self._number += 1
        self.target = self._open()
        return made

    def close(self) -> None:
        os.close(self.target)

    def _give_up(self, path: str) -> Dict[str, Any]:
        size, digest = sha256_of([path])
        gap = {"segment": segment_number(path), "bytes": size, "sha256": digest}
        journal = Journal(self._files.gaps)
        try:
            journal.append(gap, durable=True)
        finally:
            journal.close()
        os.unlink(path)
        return gap

    def _open(self) -> int:
        # Not O_APPEND: splice refuses it. The lock makes this process the only writer, so the end stays the end.
        descriptor = os.open(self._files.path(self._number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor


def segment_number(path: str) -> int:
    return int(os.path.basename(path)[: -len(".log")])


def read_gaps(files: LogFiles) -> List[Dict[str, Any]]:
    """Return the gap records in order; a cut last line belongs to a segment that is still there."""
    return [line for line in read_lines(files.gaps) if isinstance(line.get("segment"), int)]


def cap_of(paths: RunPaths) -> int:
    """Return the run's `log_cap_bytes`, or the default."""
    plan = read_json(paths.plan) or {}
    cap = plan.get("job", {}).get("limits", {}).get("log_cap_bytes")
    return DEFAULT_CAP_BYTES if cap is None else int(cap)

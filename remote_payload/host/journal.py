"""Append-only files with one JSON object a line, each with exactly one writing process.

A line is one write() on a descriptor opened O_APPEND, so a killed writer leaves at most one cut line, at the end;
the next writer of that file starts on a fresh line and goes on with the sequence.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from typing import Any, Dict

from remote_payload.host.files import read_lines, write_all
from remote_payload.host.protocol import WIRE


def complain(text: str) -> None:
    """Say on stderr what could not be recorded; a full disk, which is the likely cause, may swallow this too."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Journal:
    """One such file. Thread safe. `append` raises OSError, for example on a full disk."""

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._cut = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end_cut_line()

    def append(self, record: Dict[str, Any], durable: bool = False) -> None:
        """Append `record` as one line; with `durable` it is on disk when this returns.

        After an error (a full disk) the same record may be appended again: it then starts on a fresh line.
        """
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str) + "\n"
        with self._lock:
            before, self._cut = self._cut, True
            # A lone surrogate (a file name that is no UTF-8, in a traceback) must not lose the event.
            write_all(self._descriptor, ("\n" * before + line).encode("utf-8", "backslashreplace"))
            self._cut = False
            if durable:
                os.fsync(self._descriptor)

    def close(self) -> None:
        with self._lock:
            os.close(self._descriptor)

    def _end_cut_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            write_all(self._descriptor, b"\n")


class EventWriter:
    """Writes FOLDER/WRITER.jsonl with the events of `controller.core.events`; thread safe.

    `seq` counts from 1 and goes on after a restart of the same writer.
    """

    def __init__(self, folder: str, writer: str, run: str, host: str) -> None:
        path = os.path.join(folder, "%s.jsonl" % writer)
        self._journal = Journal(path)
        self._common = {"run": run, "host": host, "writer": writer}
        self._lock = threading.Lock()
        self._seq = max((r["seq"] for r in read_lines(path) if isinstance(r.get("seq"), int)), default=0)

    def emit(self, type: str, **fields: Any) -> None:  # noqa: A002 - the field's name on the wire
        """Append one event. Raises OSError, for example on a full disk."""
        with self._lock:
            self._seq += 1
            record = {"wire": WIRE, "seq": self._seq, **self._common, "t": time.time(), "type": type, **fields}
            self._journal.append(record)

    def close(self) -> None:
        self._journal.close()

"""Progress by what is on disk: the ranks' ledgers, read as they grow, and events that survive a full disk."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remote_payload.extract.pool import FULL
from remote_payload.host.journal import EventWriter

INTERVAL_S = 1.0
"""Seconds between two `progress` events: what a person can follow, and a few bytes of event file a second."""


class LedgerTail:
    """Follows the ranks' files `rank-*.jsonl` of a folder (ledgers or events), whole lines only."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records that came since the last call."""
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        for name in sorted(n for n in names if n.startswith("rank-") and n.endswith(".jsonl")):
            with open(os.path.join(self._folder, name), "rb") as file:
                file.seek(self._offsets.get(name, 0))
                for line in file:  # never a file as a whole: a late reader of a ledger would need gigabytes
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[name] = self._offsets.get(name, 0) + len(line)
                    if record := _record(line):
                        yield record


def _record(line: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:  # cut by a full disk; the writer put the same record on the next line
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Samples, tokens and bytes that are on disk."""

    done: int = 0
    tokens: int = 0
    bytes: int = 0

    def plus(self, record: dict[str, Any]) -> Counts:
        return Counts(done=self.done + 1, tokens=self.tokens + record["tokens"], bytes=self.bytes + record["bytes"])


class PatientEvents:
    """An EventWriter whose events wait while its disk is full, instead of ending the job that they are about."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self._lock = threading.Lock()

    def emit(self, type: str, **fields: Any) -> None:  # noqa: A002 - the field's name on the wire
        """Write the event, after all that wait. Raises OSError for anything but a full disk."""
        with self._lock:
            if type == "progress":  # a later one says more
                self._waiting = deque(each for each in self._waiting if each[0] != "progress")
            self._waiting.append((type, fields))
            while self._waiting:
                try:
                    self._events.emit(self._waiting[0][0], **self._waiting[0][1])
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    return
                self._waiting.popleft()


class Progress:
    """A thread that emits a `progress` event whenever something was written, at most one every INTERVAL_S.

    A context manager for the capture: an event says that it begins, the last is emitted at its end. `beat` may be
    called before.
    """

    def __init__(self, events: PatientEvents, *, total: int, skipped: int, records: int, kept: Counts) -> None:
        """`total` samples are wanted, `skipped` records gave none, `kept` are there from an earlier run.

        `records` are those of the whole data set: of a share neither `total` nor `skipped` tells them.
        """
        self._events, self._records = events, records
        self._total, self._skipped, self._counts = total, skipped, kept
        self._told: Counts | None = None
        self.paused: str | None = None
        """Code of the notice that said why nothing is admitted; every event says it until it is None again."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctl-progress", daemon=True)

    def __enter__(self) -> Progress:
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._counts != self._told:
            self.beat()

    @property
    def done(self) -> int:
        """Samples on disk, those of earlier runs included."""
        return self._counts.done

    def add(self, record: dict[str, Any]) -> None:
        """Count a sample by its ledger line; always by the same thread."""
        self._counts = self._counts.plus(record)

    def beat(self) -> None:
        """Emit an event now: a sign of life where nothing changes."""
        self._told = counts = self._counts
        self._events.emit(
            "progress", done=counts.done, total=self._total, tokens=counts.tokens, bytes=counts.bytes,
            skipped=self._skipped, failed=0, records=self._records,
            **({"paused": self.paused} if self.paused else {}),
        )  # fmt: skip

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            if self._counts != self._told:
                self.beat()

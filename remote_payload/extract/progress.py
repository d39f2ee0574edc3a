"""Progress by what is on disk: the ranks' ledgers, read as they grow."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remote_payload.host.journal import EventWriter

INTERVAL_S = 1.0
"""Seconds between two `progress` events: what a person can follow, and a few bytes of event file a second."""


class LedgerTail:
    """Follows the ledgers `rank-*.jsonl` of a folder, whole lines only."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records that came since the last call."""
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        for name in sorted(n for n in names if n.startswith("rank-") and n.endswith(".jsonl")):
            with open(os.path.join(self._folder, name), "rb") as file:
                file.seek(self._offsets.get(name, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[name] = self._offsets.get(name, 0) + len(whole)
            yield from (json.loads(line) for line in whole.splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Samples, tokens and bytes that are on disk."""

    done: int = 0
    tokens: int = 0
    bytes: int = 0

    def plus(self, record: dict[str, Any]) -> Counts:
        return Counts(done=self.done + 1, tokens=self.tokens + record["tokens"], bytes=self.bytes + record["bytes"])


class Progress:
    """A thread that emits a `progress` event whenever something was written, at most one every INTERVAL_S.

    A context manager: the first event says that capturing begins, the last is emitted at the end.
    """

    def __init__(self, events: EventWriter, ledger: str, *, total: int, skipped: int, kept: Counts) -> None:
        """`total` samples are wanted, `skipped` records gave none, `kept` are there from an earlier run."""
        self._events, self._tail = events, LedgerTail(ledger)
        self._total, self._skipped, self._counts = total, skipped, kept
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctl-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._emit()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._update()

    @property
    def done(self) -> int:
        """Samples on disk, as of the last event; exact after the end."""
        return self._counts.done

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._update()

    def _update(self) -> None:
        before = self._counts
        for record in self._tail.read():
            self._counts = self._counts.plus(record)
        if self._counts != before:
            self._emit()

    def _emit(self) -> None:
        counts = self._counts
        self._events.emit(
            "progress", done=counts.done, total=self._total, tokens=counts.tokens, bytes=counts.bytes,
            skipped=self._skipped, failed=0,
        )  # fmt: skip

"""Stream a run to whoever watches: every byte of its append-only files from a cursor on, its documents, its state.

The reader's own copies are its cursors (local size = offset), so any number of disconnects neither loses nor repeats
a byte. A heartbeat each second lets the reader notice a dead connection, and this end a reader that has gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from typing import Any, BinaryIO, Dict, Iterator, Optional, Tuple

from remote_payload.host.errors import HostError
from remote_payload.host.files import CHUNK
from remote_payload.host.framing import pack_head
from remote_payload.host.layout import LOG_GAPS, LOG_TIMES, MIRRORED_DOCUMENTS, MIRRORED_STREAMS, Layout, check_run_id
from remote_payload.host.protocol import check_record
from remote_payload.host.ps import Standing, judge_run
from remote_payload.host.pump import PumpKeeper

HEARTBEAT_S = 1.0

DEFAULT_INTERVAL_S = 0.25
"""Between two looks for new bytes: faster than a reader of text, slower than a load on the host."""

LAST_PUMP_S = 10.0
"""How long the end waits for a pump that still empties the pipe of a lost run."""


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `tail`: {"workdir", "run_id", "cursor": {relpath: offset}, "documents": {relpath: sha256}, "follow"}.

    "times" asks for log/times.jsonl too: a reader that does not know it would take it for a part of the log.

    Writes frames: `append`, `document`, `status`, `look` (all that one look at the files has found is sent), and at
    last `end`: once the run is over and all is sent, or,
    without `follow`, once all that is there is sent. BrokenPipeError ends it when the reader goes.
    """
    check_record(
        request, {"workdir": str, "run_id": str, "cursor": dict, "documents": dict, "follow": bool}, "tail request"
    )
    layout = Layout(request["workdir"])
    run_id = check_run_id(request["run_id"])
    if not os.path.isdir(layout.run(run_id).folder):
        raise HostError("no-such-run", "this host has no run %s" % run_id, "", "ctl ps lists its runs")
    Tail(request, out).follow()
    return 0


class Tail:
    """One reader's stream."""

    def __init__(self, request: Dict[str, Any], out: BinaryIO) -> None:
        self._paths = Layout(request["workdir"]).run(request["run_id"])
        self._out = out
        self._follow: bool = request["follow"]
        self._hidden = () if request.get("times") else (LOG_TIMES,)
        self._interval_s = float(request.get("interval_s", DEFAULT_INTERVAL_S))
        self._cursor: Dict[str, int] = dict(request["cursor"])
        self._documents: Dict[str, str] = dict(request["documents"])
        # Of files that were sent from their first byte on; for others the end reads once more what was sent before.
        self._digests: Dict[str, Any] = {}
        self._stamps: Dict[str, Tuple[int, int, int]] = {}
        self._keeper = PumpKeeper(request["workdir"], request["run_id"])
        self._standing: Optional[Standing] = None
        self._judged = self._beaten = float("-inf")
        self._sent_status: Optional[Dict[str, Any]] = None

    def follow(self) -> None:
        over_since: Optional[float] = None
        while True:
            standing = self._judge()  # before draining: what was written before the end is then sent for certain
            self._send_status()
            if not standing.is_over:
                self._keeper.ensure()
            sent = self._send_appended()
            self._send_documents()
            if sent:
                self._send({"type": "look"})
            if standing.is_over or not self._follow:
                over_since = over_since if over_since is not None else time.monotonic()
                waiting = self._keeper.is_running() and time.monotonic() - over_since < LAST_PUMP_S
                if not self._follow or not (sent or waiting):
                    break
            elif not sent:
                time.sleep(self._interval_s)
        self._send_end(standing)

    def _judge(self) -> Standing:
        # A verdict on a dead supervisor costs a pass over /proc, so it is renewed with the heartbeat only, except
        # that a result, which is cheap to see, is never reported late.
        stale = time.monotonic() - self._judged >= HEARTBEAT_S
        if self._standing is None or stale or (not self._standing.is_over and os.path.exists(self._paths.result)):
            self._standing = judge_run(self._paths)
            self._judged = time.monotonic()
        return self._standing

    def _send_status(self) -> None:
        standing = self._judge()
        status = {
            "type": "status",
            "state": standing.state.value,
            "end_reason": standing.end_reason,
            "step": standing.step,
            "evidence": standing.evidence,
        }
        if status != self._sent_status or time.monotonic() - self._beaten >= HEARTBEAT_S:
            self._send(status)
            self._sent_status = status
            self._beaten = time.monotonic()

    def _send_appended(self) -> bool:
        sent = False
        for relpath, path in self._streams():
            offset = self._cursor.get(relpath, 0)
            try:
                with open(path, "rb") as file:
                    file.seek(offset)
                    while True:
                        data = file.read(CHUNK)
                        if not data:
                            break
                        self._send({"type": "append", "path": relpath, "offset": offset}, data)
                        if offset == 0:
                            self._digests[relpath] = hashlib.sha256()
                        if relpath in self._digests:
                            self._digests[relpath].update(data)
                        offset += len(data)
                        sent = True
                        self._send_status()
            except FileNotFoundError:
                # Given up under the log cap since it was listed: the gap is to be told before what follows it.
                return self._send_appended() or sent
            self._cursor[relpath] = offset
        return sent

    def _send_documents(self) -> None:
        for relpath in MIRRORED_DOCUMENTS:
            path = os.path.join(self._paths.folder, relpath)
            try:
                with open(path, "rb") as file:
                    status = os.fstat(file.fileno())
                    stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                    if self._stamps.get(relpath) == stamp:
                        continue
                    data = file.read()
            except FileNotFoundError:
                continue
            self._stamps[relpath] = stamp
            digest = hashlib.sha256(data).hexdigest()
            if self._documents.get(relpath) != digest:
                self._documents[relpath] = digest
                self._send({"type": "document", "path": relpath}, data)

    def _send_end(self, standing: Standing) -> None:
        files = {}
        for relpath, path in self._streams():
            size = self._cursor.get(relpath, 0)
            with contextlib.suppress(FileNotFoundError):  # given up under the log cap: a later contact tells the gap
                sent = self._digests.get(relpath)
                files[relpath] = {"size": size, "sha256": sent.hexdigest() if sent else _prefix_digest(path, size)}
            self._send_status()
        self._send({"type": "end", "state": standing.state.value, "files": files})

    def _streams(self) -> Iterator[Tuple[str, str]]:
        for folder in MIRRORED_STREAMS:
            path = os.path.join(self._paths.folder, folder)
            names = sorted(os.listdir(path)) if os.path.isdir(path) else []
            # The gaps first: every segment that this list lacks is then told before the one that follows it. One that
            # goes after it was listed is yielded all the same: skipped here, it would be told too late.
            if os.path.exists(os.path.join(path, LOG_GAPS)):
                yield "%s/%s" % (folder, LOG_GAPS), os.path.join(path, LOG_GAPS)
            for name in names:
                if name.endswith((".log", ".jsonl")) and name != LOG_GAPS and name not in self._hidden:
                    yield "%s/%s" % (folder, name), os.path.join(path, name)

    def _send(self, header: Dict[str, Any], body: bytes = b"") -> None:
        self._out.write(pack_head(header, len(body)))
        self._out.write(body)
        self._out.flush()


def _prefix_digest(path: str, size: int) -> str:
    """Return the sha256 of the first `size` bytes: what was sent of a file that may still grow."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while size > 0:
            data = file.read(min(CHUNK, size))
            if not data:
                break
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()

"""push: the payload to the host, under its content hash. One question and its answer when it is there already."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from controller.core.errors import CtlError, HostUnusable, RemoteFailed
from controller.core.finding import size
from controller.payload import Payload, load_payload
from controller.stages.base import Emit, python_error
from controller.transport.base import Process, Transport
from remote_payload.host.framing import pack_frame
from remote_payload.host.protocol import HostRecord

ANSWER_TIMEOUT_S = 60.0
"""For one answer of the receiver: a Python start and the syncing of some 50 small files, on a busy NFS too."""

_PIECE_BYTES = 1 << 20
_ANSWER_MAX_BYTES = 1 << 16

_CONFIGURED = frozenset({"python-old", "workdir-unsafe", "workdir-unusable"})
"""Codes of the receiver that speak of a value of hosts.toml, and not of what happened on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """Where the payload is. `skipped`: it was there, whole, and only the question travelled."""

    hash: str
    path: str  # absolute, on the host
    bytes_sent: int
    files: int
    skipped: bool
    seconds: float


def run(transport: Transport, host: HostRecord, *, emit: Emit, payload: Payload | None = None) -> PushOutcome:
    """Make sure that the host has the payload (by default the installed one), whole and verified.

    Any number of pushes of the same payload may run at once. Raises HostUnusable (`python-missing`, `python-old`,
    `python-unusable`, `workdir-unsafe`, `workdir-unusable`), RemoteFailed (`push-damaged`, `push-failed`),
    ConnectionFailed, ConnectionLost.
    """
    started = time.monotonic()
    emit("stage", name="push", status="started")
    try:
        payload = payload or load_payload()
        path, sent, skipped = _converse(transport, host, payload)
    except CtlError as error:
        emit("stage", name="push", status="failed", text=str(error), seconds=round(time.monotonic() - started, 3))
        raise
    outcome = PushOutcome(
        hash=payload.digest,
        path=path,
        bytes_sent=sent,
        files=len(payload.files),
        skipped=skipped,
        seconds=time.monotonic() - started,
    )
    what = "already there" if skipped else f"{outcome.files:,} files, {size(sent)} sent"
    text = f"payload {payload.digest[:12]}: {what}"
    emit("stage", name="push", status="done", text=text, seconds=round(outcome.seconds, 3))
    return outcome


def _converse(transport: Transport, host: HostRecord, payload: Payload) -> tuple[str, int, bool]:
    """Return the payload's path on the host, the bytes sent, and whether the host had it."""
    python = [host["bootstrap_python"], "-I", "-S", "-c"]
    process = transport.start([*python, payload.receiver, host["workdir"], payload.digest])
    try:
        answer = _answer(process, host)
        skipped, sent = bool(answer.get("have")), 0
        if not skipped:
            manifest = pack_frame({"manifest": dict(payload.manifest)})
            process.write(manifest, timeout=ANSWER_TIMEOUT_S)
            sent = len(manifest)
            archive = payload.archive()
            for start in range(0, len(archive), _PIECE_BYTES):
                piece = archive[start : start + _PIECE_BYTES]
                frame = pack_frame({"last": start + _PIECE_BYTES >= len(archive)}, piece)
                process.write(frame, timeout=ANSWER_TIMEOUT_S)
                sent += len(frame)
            answer = _answer(process, host)
        return str(answer["path"]), sent, skipped
    finally:
        process.close()


def _answer(process: Process, host: HostRecord) -> dict[str, Any]:
    """Read one line of the receiver. Raises RemoteFailed if it reports an error, or ended without an answer."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < _ANSWER_MAX_BYTES:
            data = process.read(timeout=ANSWER_TIMEOUT_S)
            if not data:
                break
            line += data
    except TimeoutError as error:
        raise RemoteFailed(
            f"{host['name']} did not answer the push within {ANSWER_TIMEOUT_S:g} s",
            why="the receiver was started and is silent",
            fix=f"check the disk that holds {host['workdir']} on the host",
            code="push-failed",
        ) from error
    try:
        answer = json.loads(line)
    except ValueError:
        raise _no_answer(process, host, line) from None
    if "error" in answer:
        raise (HostUnusable if answer["error"]["code"] in _CONFIGURED else RemoteFailed)(**answer["error"])
    return dict(answer)


def _no_answer(process: Process, host: HostRecord, output: bytes) -> RemoteFailed:
    """Explain a receiver that never spoke: most often there is no such Python."""
    code = process.wait(timeout=ANSWER_TIMEOUT_S)
    stderr = process.stderr or output
    return python_error(host["name"], host["bootstrap_python"], code, stderr, failed="push-failed")

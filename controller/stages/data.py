"""data: a data set of the workstation to the host, under its content's hash. One round trip when it is there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from controller.core.errors import CtlError, RefusedError, RemoteFailed
from controller.core.finding import size
from controller.localdata import LocalData
from controller.stages.base import HOST_ERROR, Context, host_error, refusals
from controller.stages.sending import Meter
from controller.transport.base import Process
from remote_payload.host.framing import pack_frame

ANSWER_TIMEOUT_S = 600.0
"""For the receiver's last answer: it syncs all that was sent, perhaps to a network file system."""

WRITE_TIMEOUT_S = 120.0
DAMAGED = "data-damaged"
"""The host's word that a file is not what was announced; nothing of it is kept there."""

_ANSWER_MAX_BYTES = 1 << 24
"""16 MiB: the checksums of some 200,000 files."""


def run(ctx: Context, data: LocalData) -> str:
    """Make sure that the host has the data set, whole and verified, and return its path there.

    Raises RemoteFailed (`data-no-room`, `data-disk-full`), ConnectionFailed, ConnectionLost;
    RefusedError if a file here cannot be read any more (`local-file-gone`), or was written to since (`data-damaged`).
    """
    started = time.monotonic()
    ctx.emit("stage", name="data", status="started", text=f"{data.path.name}: {size(data.size)}")
    try:
        path, sent = _converse(ctx, data)
    except CtlError as error:
        ctx.emit("stage", name="data", status="failed", text=str(error))
        raise
    what = f"{size(sent)} sent" if sent else "already there"
    seconds = round(time.monotonic() - started, 3)
    ctx.emit("stage", name="data", status="done", text=f"{data.path.name}: {what}", seconds=seconds)
    return path


def _converse(ctx: Context, data: LocalData) -> tuple[str, int]:
    """Return the path on the host, and the bytes sent."""
    process = ctx.transport.start(ctx.argv("data"))
    answers = Answers(process, "data")
    try:
        request = {
            "workdir": ctx.host["workdir"], "digest": data.digest, "name": data.path.name, "files": list(data.files),
        }  # fmt: skip
        process.write(pack_frame(request), timeout=WRITE_TIMEOUT_S)
        answer = answers.take()
        if answer.get("have"):
            return str(answer["path"]), 0
        meter = Meter(ctx, "data", data.path.name, data.size)
        for piece in readable(data.pieces()):
            process.write(pack_frame({"end": False}, piece), timeout=WRITE_TIMEOUT_S)
            meter.add(len(piece))
        process.write(pack_frame({"end": True}), timeout=WRITE_TIMEOUT_S)
        return str(answers.take()["path"]), meter.sent
    finally:
        process.close()


def readable(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what is read of files here. Raises RefusedError if one is gone since it was hashed, or unreadable."""
    try:
        yield from pieces
    except OSError as error:
        raise RefusedError(
            f"cannot read {error.filename or 'a file here'} any more",
            why=f"{error.strerror or error}; it was there when the run was planned, moments ago",
            fix="leave the files alone until they are sent, then run the command again",
            code="local-file-gone",
        ) from error


class Answers:
    """The lines of a receiver's conversation, one by one; where it has nothing to wait for, two come in one piece."""

    def __init__(self, process: Process, verb: str) -> None:
        self._process, self._verb = process, verb
        self._read = b""

    def take(self) -> dict[str, Any]:
        """Return the next line.

        Raises RefusedError (`data-damaged`) if what arrived is not what was announced, most often because somebody
        wrote to it meanwhile; RemoteFailed with the host's own explanation.
        """
        while b"\n" not in self._read and len(self._read) < _ANSWER_MAX_BYTES:
            try:
                data = self._process.read(timeout=ANSWER_TIMEOUT_S)
            except TimeoutError as error:
                what = f"the host did not answer while it received the {self._verb}"
                raise RemoteFailed(what, code="data-failed") from error
            if not data:
                break
            self._read += data
        line, end, self._read = self._read.partition(b"\n")
        if line.startswith(b'{"error"') or not end:
            code = self._process.wait(timeout=ANSWER_TIMEOUT_S)
            with refusals(DAMAGED.__eq__):
                raise host_error(self._verb, code or HOST_ERROR, line, self._process.stderr)
        answer: dict[str, Any] = json.loads(line)
        return answer

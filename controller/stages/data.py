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
    try:
        request = {
            "workdir": ctx.host["workdir"], "digest": data.digest, "name": data.path.name, "files": list(data.files),
        }  # fmt: skip
        process.write(pack_frame(request), timeout=WRITE_TIMEOUT_S)
        answer = read_answer(process, "data")
        if answer.get("have"):
            return str(answer["path"]), 0
        meter = Meter(ctx, "data", data.path.name, data.size)
        for piece in readable(data.pieces()):
            process.write(pack_frame({"end": False}, piece), timeout=WRITE_TIMEOUT_S)
            meter.add(len(piece))
        process.write(pack_frame({"end": True}), timeout=WRITE_TIMEOUT_S)
        return str(read_answer(process, "data")["path"]), meter.sent
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


def read_answer(process: Process, verb: str) -> dict[str, Any]:
    """Return one line of a receiver's conversation.

    Raises RefusedError (`data-damaged`) if what arrived is not what was announced, most often because somebody wrote
    to it meanwhile; RemoteFailed with the host's own explanation.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < _ANSWER_MAX_BYTES:
        try:
            data = process.read(timeout=ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise RemoteFailed(f"the host did not answer while it received the {verb}", code="data-failed") from error
        if not data:
            break
        line += data
    if line.startswith(b'{"error"') or not line.endswith(b"\n"):
        code = process.wait(timeout=ANSWER_TIMEOUT_S)
        with refusals(DAMAGED.__eq__):
            raise host_error(verb, code or HOST_ERROR, line, process.stderr)
    answer: dict[str, Any] = json.loads(line)
    return answer

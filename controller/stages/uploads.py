"""uploads: a command's files to the host, those only that it does not have. One round trip when nothing changed."""

from __future__ import annotations

import json
import time

from controller.core.errors import CtlError
from controller.core.finding import size
from controller.localfiles import LocalFiles
from controller.stages.base import Context
from controller.stages.data import WRITE_TIMEOUT_S, Answers, readable
from controller.stages.sending import Meter
from remote_payload.host.framing import pack_frame


def run(ctx: Context, files: LocalFiles) -> int:
    """Make sure that the host has the tree, and return the bytes sent.

    Raises RemoteFailed (`upload-no-room`, `upload-disk-full`), ConnectionFailed, ConnectionLost;
    RefusedError if a file here cannot be read any more (`local-file-gone`), or was written to since (`data-damaged`).
    """
    started = time.monotonic()
    what = f"{len(files.files):,} files, {size(files.size)}"
    ctx.emit("stage", name="uploads", status="started", text=what)
    try:
        changed, sent = _converse(ctx, files)
    except CtlError as error:
        ctx.emit("stage", name="uploads", status="failed", text=str(error))
        raise
    text = f"{what}: {changed} changed, {size(sent)} sent" if changed else f"{what}: already there"
    ctx.emit("stage", name="uploads", status="done", text=text, seconds=round(time.monotonic() - started, 3))
    return sent


def _converse(ctx: Context, files: LocalFiles) -> tuple[int, int]:
    """Return how many files travelled, and their bytes."""
    process = ctx.transport.start(ctx.argv("uploads"))
    answers = Answers(process, "uploads")
    try:
        body = json.dumps({"files": list(files.files)}, separators=(",", ":")).encode()
        process.write(pack_frame({"workdir": ctx.host["workdir"]}, body), timeout=WRITE_TIMEOUT_S)
        wanted = [str(sha256) for sha256 in answers.take()["missing"]]
        sizes = {str(file["sha256"]): int(file["size"]) for file in files.files}
        meter = Meter(ctx, "uploads", f"{len(wanted):,} files", sum(sizes[sha256] for sha256 in wanted))
        if wanted:
            for piece in readable(files.pieces(wanted)):
                process.write(pack_frame({"end": False}, piece), timeout=WRITE_TIMEOUT_S)
                meter.add(len(piece))
            process.write(pack_frame({"end": True}), timeout=WRITE_TIMEOUT_S)
        answers.take()
        return len(wanted), meter.sent
    finally:
        process.close()

"""sweep: show what an output folder holds, and delete exactly that, by the host's own `clear`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.errors import RefusedError
from controller.stages.base import Context, refusals
from remote_payload.host.layout import OWNER_MARKER
from remote_payload.host.protocol import OwnedOutput

LOOK_TIMEOUT_S = 120.0
"""A million entries take about 10 s to list on a local disk, and more over a network."""

SWEEP_TIMEOUT_S = 3600.0
"""Millions of files on a network disk; the host goes on deleting what was confirmed if we leave earlier."""


CHANGED = "clear-changed"
"""The host's word, and ours, that a folder is not what was shown."""

HALF_DONE = frozenset({"output-io", "output-not-deleted"})
"""Codes of the host for a deletion that broke off: something may be gone, so that they are no refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """An output folder as the host sees it: `listing` of `host.listing`, the runs that write, and our user there."""

    output: OwnedOutput
    listing: Mapping[str, Any]
    writers: tuple[str, ...]
    user: str

    @property
    def is_empty(self) -> bool:
        return not self.listing["entries"] and not self.listing["problems"]


def look(ctx: Context, output: OwnedOutput) -> Folder:
    """Return what the folder holds; nothing is changed. Raises RemoteFailed, ConnectionLost."""
    return _folder(output, ctx.call_json("look", _request(ctx, output), timeout=LOOK_TIMEOUT_S))


def refuse(folder: Folder) -> None:
    """Raise RefusedError if the folder may not be deleted from: not ours, in use, or not to be read whole."""
    path, listing = folder.output["path"], folder.listing
    for problem in listing["problems"]:
        raise RefusedError(
            f"{path} may not be cleared", why=problem["what"], fix="see `ctl preflight`, which says more",
            code=f"output-{problem['code']}",
        )  # fmt: skip
    if listing["foreign"]:
        raise RefusedError(
            f"{path} holds files that no run of ctl wrote",
            why=f"it has no {OWNER_MARKER}",
            fix="delete them yourself, on the host, if they may go",
            code="output-foreign",
        )
    if folder.writers:
        raise RefusedError(
            f"{path} is being written by run {', '.join(folder.writers)}",
            why="a run that is under way must not lose its files",
            fix=f"wait for it, or stop it: `ctl stop {folder.writers[0]}`",
            code="output-in-use",
        )


def run(ctx: Context, folder: Folder, run_id: str) -> tuple[Mapping[str, Any], Folder]:
    """Delete what `folder` shows; return the host's report (see `host.clear`) and the folder as it is afterwards.

    Raises RefusedError if the folder is not what was shown, or a run took it meanwhile (`clear-changed`,
    `output-in-use`, ...): nothing is deleted then; and if it is not empty afterwards (`clear-changed`). Raises
    RemoteFailed if the deletion broke off (HALF_DONE).
    """
    ctx.emit("stage", name="clear", status="started")
    request = {**_request(ctx, folder.output), "run_id": run_id}
    with refusals(_is_refusal):
        answer = ctx.call_json("sweep", request, timeout=SWEEP_TIMEOUT_S)
    after = _folder(folder.output, answer)
    if not after.is_empty:
        raise RefusedError(
            f"{folder.output['path']} is not empty after it was cleared",
            why=f"{after.listing['entries']:,} entries appeared meanwhile, and were left",
            fix="find out what writes there, then run `ctl clear` again",
            code=CHANGED,
        )
    ctx.emit("stage", name="clear", status="done", text=f"{answer['report']['deleted_entries']:,} entries deleted")
    return answer["report"], after


def _is_refusal(code: str) -> bool:
    return code == CHANGED or (code.startswith("output-") and code not in HALF_DONE)


def _request(ctx: Context, output: OwnedOutput) -> dict[str, Any]:
    return {"workdir": ctx.host["workdir"], "lease_dir": ctx.host["lease_dir"], "output": dict(output)}


def _folder(output: OwnedOutput, answer: Mapping[str, Any]) -> Folder:
    listing = answer["listing"]
    shown: OwnedOutput = {
        **output, "digest": listing["digest"], "entries": listing["entries"], "bytes": listing["bytes"],
    }  # fmt: skip
    return Folder(output=shown, listing=listing, writers=tuple(answer["writers"]), user=str(answer["user"]))

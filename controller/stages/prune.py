"""prune: which run folders of a host may go, and the deletion of exactly those (`remote_payload.host.prune`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.errors import RemoteFailed
from controller.stages.base import Context, refusals
from controller.stages.sweep import SWEEP_TIMEOUT_S

LOOK_TIMEOUT_S = 600.0
"""What commands were sent is read whole, to compare it with what lies in their work folders now."""

CHANGED = "prune-changed"
"""The host's word that a folder is not what was shown; nothing was deleted then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Runs that ended more than `older_than_s` seconds ago (None: any time), less the newest `keep`.

    `copied` is {run_id: {relative path: bytes}} of what this workstation holds of runs.
    """

    older_than_s: float | None
    keep: int
    copied: Mapping[str, Mapping[str, int]]


def look(ctx: Context, wanted: Wanted) -> dict[str, Any]:
    """Return {"runs", "kept", ...} of the host; nothing is changed. Raises RemoteFailed."""
    return _call(ctx, wanted, None, LOOK_TIMEOUT_S)


def run(ctx: Context, wanted: Wanted, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Delete the folders that `look` returned; the answer has "deleted" and is of a second look.

    Raises RefusedError (`prune-changed`) if one of them is not what was shown: nothing is deleted then. Raises
    RemoteFailed (`prune-incomplete`, its data {"deleted", "failed", "remaining"}) if not all of them are gone.
    """
    confirmed = {row["folder"]: row["digest"] for row in shown["runs"]}
    with refusals(CHANGED.__eq__):
        answer = _call(ctx, wanted, confirmed, SWEEP_TIMEOUT_S)
    if answer["failed"] or answer["remaining"]:
        failed = "; ".join(f"{each['run_id']}: {each['why']}" for each in answer["failed"])
        raise RemoteFailed(
            f"{len(answer['deleted'])} of {len(confirmed)} run folders were deleted, {len(answer['remaining'])} stay",
            why=failed or ", ".join(answer["remaining"]),
            fix="run `ctl prune` again: it says what is left of them and ends what was begun",
            code="prune-incomplete",
            data={key: answer[key] for key in ("deleted", "failed", "remaining")},
        )
    return answer


def _call(ctx: Context, wanted: Wanted, confirmed: Mapping[str, str] | None, timeout: float) -> dict[str, Any]:
    request = {
        "workdir": ctx.host["workdir"],
        "lease_dir": ctx.host["lease_dir"],
        "older_than_s": wanted.older_than_s,
        "keep": wanted.keep,
    }
    body = {"copied": wanted.copied, "confirmed": confirmed}  # too much for a header where there are many runs
    return ctx.call_json("prune", request, body=json.dumps(body).encode(), timeout=timeout)

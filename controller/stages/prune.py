"""prune: which run folders of a host may go, and the deletion of exactly those (`remote_payload.host.prune`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.core.errors import RefusedError
from controller.stages.base import Context
from controller.stages.sweep import LOOK_TIMEOUT_S, SWEEP_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Runs that ended more than `older_than_s` ago (None: any time), less the newest `keep`.

    `everything`: also those whose samples are still in their output, and those that are not among `copied`.
    """

    older_than_s: float | None
    keep: int
    copied: Sequence[str]
    everything: bool


def look(ctx: Context, wanted: Wanted) -> dict[str, Any]:
    """Return {"runs", "kept", ...} of the host; nothing is changed. Raises RemoteFailed."""
    return ctx.call_json("prune", _request(ctx, wanted, None), timeout=LOOK_TIMEOUT_S)


def run(ctx: Context, wanted: Wanted, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Delete the folders that `look` returned; the answer has "deleted" and is of a second look.

    Raises RemoteFailed (`prune-changed`: nothing is deleted then), RefusedError if not all of them are gone.
    """
    confirmed = {row["run_id"]: row["digest"] for row in shown["runs"]}
    answer = ctx.call_json("prune", _request(ctx, wanted, confirmed), timeout=SWEEP_TIMEOUT_S)
    if answer["failed"] or answer["remaining"]:
        failed = "; ".join(f"{each['run_id']}: {each['why']}" for each in answer["failed"])
        raise RefusedError(
            f"{len(answer['deleted'])} of {len(confirmed)} run folders were deleted, {len(answer['remaining'])} stay",
            why=failed or ", ".join(answer["remaining"]),
            fix="run `ctl prune` again to see what is left of them",
            code="prune-incomplete",
        )
    return answer


def _request(ctx: Context, wanted: Wanted, confirmed: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "workdir": ctx.host["workdir"],
        "lease_dir": ctx.host["lease_dir"],
        "older_than_s": wanted.older_than_s,
        "keep": wanted.keep,
        "copied": list(wanted.copied),
        "all": wanted.everything,
        "confirmed": confirmed,
    }

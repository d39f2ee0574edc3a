"""Clear up what dead runs left on a host: first the plan, then that plan or nothing (`remote_payload.host.tidy`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.stages.base import Context, refusals
from controller.stages.sweep import LOOK_TIMEOUT_S, SWEEP_TIMEOUT_S
from remote_payload.host.protocol import Plan

ACTION_TIMEOUT_S = 90.0
"""For one action on processes: a grace of 10 s, the kill, draining the log, and the driver that frees the memory."""


CHANGED = "tidy-changed"
"""The host's word that what is left there is not what was shown; nothing was done then."""


def look(ctx: Context, plan: Plan) -> dict[str, Any]:
    """Return {"actions", "digest", ...} of what could be cleared up; nothing is changed. Raises RemoteFailed."""
    return ctx.call_json("tidy", _request(plan, None), timeout=LOOK_TIMEOUT_S)


def run(ctx: Context, plan: Plan, planned: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `look` returned; the answer has "done", "failed" and, looked for anew, "remaining".

    Raises RefusedError (`tidy-changed`) if it is no longer what was shown: nothing is done then; and RemoteFailed.
    """
    actions: Sequence[Any] = planned["actions"]
    # All is looked at twice, and an output may hold millions of files.
    timeout = 2 * LOOK_TIMEOUT_S
    timeout += sum(SWEEP_TIMEOUT_S if action["kind"] == "output" else ACTION_TIMEOUT_S for action in actions)
    with refusals(CHANGED.__eq__):
        return ctx.call_json("tidy", _request(plan, planned["digest"]), timeout=timeout)


def _request(plan: Plan, confirmed: str | None) -> dict[str, Any]:
    host = plan["host"]
    return {
        "workdir": host["workdir"],
        "lease_dir": host["lease_dir"],
        "outputs": plan["job"]["outputs"],
        "confirmed": confirmed,
    }

"""launch: exactly once, or an honest "unknown".

The run id is made here, and the host starts an id at most once: a second start of the same id answers with the
first one's record. So this stage, unlike any other command, may be repeated over a new connection until it is
answered. When patience ends, a `cancel` is written on the host; a late start obeys it. Only if neither a start nor
a cancel could be answered is the outcome unknown, and the user is told so.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.errors import ConnectionFailed, ConnectionLost, CtlError, LaunchUnknown, RefusedError
from controller.stages.base import Context, host_error
from remote_payload.host.framing import pack_frame
from remote_payload.host.protocol import Confirmation, EndReason, Plan, RunState, parse_confirmation

PATIENCE_S = 120.0
"""For an answer to start, over any number of connections: a Wi-Fi change takes seconds, a sleeping laptop longer."""

START_TIMEOUT_S = 75.0
"""For one answer: the host itself waits up to 60 s for an earlier start of the same run to be decided."""

RETRY_PAUSE_S = 1.0

_UNDECIDED = frozenset({"start-timeout", "start-busy"})
"""Answers of the host that say only that the launch is still under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    confirmation: Confirmation
    seconds: float


def run(
    ctx: Context, plan: Plan, secret_values: Mapping[str, str], *, patience_s: float = PATIENCE_S
) -> LaunchOutcome:
    """Start the run's supervisor and return its confirmation.

    Raises RefusedError (somebody else holds the GPUs), RemoteFailed, ConnectionFailed if it is certain that
    nothing was started, LaunchUnknown if it is not.
    """
    started = time.monotonic()
    ctx.emit("stage", name="launch", status="started")
    nonce = secrets.token_hex(16)
    request = {"nonce": nonce, "workdir": plan["host"]["workdir"]}
    body = json.dumps({"plan": plan, "secrets": dict(secret_values)}).encode()
    try:
        confirmation = _settle(ctx, plan, request, body, nonce, started + patience_s)
        _check(confirmation, plan)
    except CtlError as error:
        ctx.emit("stage", name="launch", status="failed", text=error.what)
        raise
    seconds = time.monotonic() - started
    ctx.emit("stage", name="launch", status="done", text=_text(confirmation), seconds=round(seconds, 3))
    return LaunchOutcome(confirmation=confirmation, seconds=seconds)


def _settle(
    ctx: Context, plan: Plan, request: dict[str, Any], body: bytes, nonce: str, deadline: float
) -> Confirmation:
    """Return the host's word: an answer to the start, or to the cancel that follows when there was none.

    Raises KeyboardInterrupt if the user gave up in time; if the run is held already, it only sets `ctx.cancel`, so
    that the watch detaches at once.
    """
    try:
        confirmation = _start(ctx, request, body, nonce, deadline)
    except KeyboardInterrupt:
        confirmation = _cancel(ctx, plan)
        if confirmation["outcome"] == "cancelled":
            raise
        ctx.cancel.set()
        return confirmation
    if confirmation is None:
        confirmation = _cancel(ctx, plan)
        if confirmation["outcome"] == "cancelled":
            raise ConnectionFailed(
                "the launch was given up, and nothing was started",
                why="the host did not answer in time; the cancel is on its disk and a late start obeys it",
                fix="run the same command again",
            )
    return confirmation


def _start(ctx: Context, request: dict[str, Any], body: bytes, nonce: str, deadline: float) -> Confirmation | None:
    """Repeat the start request until it is answered; None when patience has ended without an answer."""
    frame = pack_frame(request, body)
    while (left := deadline - time.monotonic()) > 0 and not ctx.cancel.is_set():
        try:
            done = ctx.transport.run(ctx.argv("start"), stdin=frame, timeout=min(START_TIMEOUT_S, left + 1))
        except (ConnectionLost, ConnectionFailed) as error:
            ctx.emit("contact", status="reconnecting", text=f"launch not confirmed yet: {error.what}")
            ctx.cancel.wait(RETRY_PAUSE_S)
            continue
        confirmation = parse_confirmation(done.stdout, nonce)
        if confirmation is not None:
            return confirmation
        refusal = host_error("start", done.code, done.stdout, done.stderr)
        if refusal.code not in _UNDECIDED:
            raise refusal
        ctx.emit("contact", status="connected", text=f"launch not confirmed yet: {refusal.what}")
    return None


def _cancel(ctx: Context, plan: Plan) -> Confirmation:
    """Deny the launch on the host ("cancelled"), or learn that it happened after all ("exists")."""
    run_id = plan["run_id"]
    request = {"workdir": plan["host"]["workdir"], "run_id": run_id, "reason": "the controller gave up"}
    try:
        answer = ctx.call_json("cancel", request, timeout=START_TIMEOUT_S)
    except CtlError as error:
        raise LaunchUnknown(
            "the launch could be neither confirmed nor denied",
            why=str(error),
            fix=f"when the host answers again: `ctl attach {run_id}` (it may be running) or `ctl stop {run_id}`",
            data={"run_id": run_id},
        ) from error
    return Confirmation(nonce="", outcome=answer["outcome"], run=answer["run"], result=None, detail=None)


QUEUED = ("extract", "command")
"""Kinds of jobs whose verbs take `--wait`."""


def _check(confirmation: Confirmation, plan: Plan) -> None:
    if confirmation["outcome"] in ("launched", "exists"):
        return
    result, host = confirmation["result"], plan["host"]["name"]
    if confirmation["outcome"] == "refused" and result is not None:
        detail = confirmation["detail"] or {}
        message = result["message"] or "the host refused the run"
        why = str(detail.get("why", ""))
        if result["end_reason"] == EndReason.SUPERVISOR_FAILED.value:
            # What the host found wrong has a code and a remedy of its own; the end reason only says who found it.
            message = str(detail.get("what") or message)
            fix = f"look at what is wrong there: `ctl preflight --host {host}`"
        else:
            fix = f"see who holds it with `ctl ps --host {host}`"
        if result["end_reason"] == EndReason.LEASE_BUSY.value:
            # Nobody held it when preflight looked.
            message = f"host {host} is {message}"
            why = "; ".join(filter(None, ["it came first, after preflight had looked", why]))
            if plan["job"]["kind"] in QUEUED:
                fix = f"queue behind it: the same command with `--wait`; {fix}"
        raise RefusedError(
            message,
            why="; ".join(filter(None, [why, "nothing was launched"])),
            fix=str(detail.get("fix", fix)),
            code=str(detail.get("code") or result["end_reason"]),
            data=detail,
        )
    raise RefusedError("this run was cancelled before it started", fix="start a new one", code="cancelled")


def _text(confirmation: Confirmation) -> str:
    run, detail = confirmation["run"], confirmation["detail"] or {}
    if run is not None and run["state"] == RunState.QUEUED.value:
        return f"queued on the host: {detail.get('why', 'the lease is not free')}"
    return "supervisor confirmed: from here on Ctrl-C detaches, and the run goes on"

"""stop: ask the host to end a run, and repeat what it proved afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from controller.stages.base import Context

DEFAULT_GRACE_S = 30.0
"""Between TERM and KILL: vLLM's workers need seconds to leave their collectives and free the GPUs."""

PROOF_S = 90.0
"""On top of the grace: rescans, the look at the GPUs (nvidia-smi may hang) and the sweep of /dev/shm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOutcome:
    state: str
    end_reason: str | None
    gpus_clean: bool | str
    killed: list[dict[str, Any]]
    leftovers: list[dict[str, Any]]
    message: str
    was_over: bool
    """Whether the run had ended before anybody asked."""


def run(ctx: Context, run_id: str, *, grace_s: float = DEFAULT_GRACE_S) -> StopOutcome:
    """Stop a run whatever its state; stopping a finished run changes nothing and says so.

    Raises RemoteFailed, ConnectionLost: the stop may then have been done all the same, and may be repeated.
    """
    ctx.emit("stage", name="stop", status="started")
    request = {"workdir": ctx.host["workdir"], "run_id": run_id, "grace_s": grace_s, "force": False}
    answer = ctx.call_json("stop", request, timeout=grace_s + PROOF_S)
    outcome = StopOutcome(
        state=str(answer["state"]),
        end_reason=answer.get("end_reason"),
        gpus_clean=answer.get("gpus_clean", "unknown"),
        killed=list(answer.get("killed", [])),
        leftovers=list(answer.get("leftovers", [])),
        message=str(answer.get("message", "")),
        was_over=bool(answer.get("was_over", False)),  # payloads of earlier versions do not say
    )
    ctx.emit("stage", name="stop", status="done", text=outcome.message)
    return outcome

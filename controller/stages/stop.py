"""stop: ask the host to end a run, and repeat what it proved afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from controller.stages.base import Context
from remote_payload.host.protocol import RunState

DEFAULT_GRACE_S = 30.0
"""Between TERM and KILL: vLLM's workers need seconds to leave their collectives and free the GPUs."""

PROOF_S = 90.0
"""On top of the grace: rescans, the look at the GPUs (nvidia-smi may hang) and the sweep of /dev/shm."""

IDLE_S = 5.0
"""Who waits for a stop and reads nothing for longer asks whether it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOutcome:
    state: str
    end_reason: str | None
    gpus_clean: bool | str
    killed: list[dict[str, Any]]
    leftovers: list[dict[str, Any]]
    message: str
    was_over: bool
    """Whether the run had ended, or was lost, before anybody asked."""
    had_ended: bool = False
    """Whether its end was written before anybody asked; of a lost run none is, by its stop neither."""


class Telling(Protocol):
    """Tells a person how far a stop is, for which the job alone may take the whole grace."""

    def doing(self, text: str) -> None:
        """Say what is done now."""

    def waiting(self) -> None:
        """Say that it goes on; nothing else was said for IDLE_S seconds."""


def run(
    ctx: Context, run_id: str, *, grace_s: float = DEFAULT_GRACE_S, telling: Telling | None = None
) -> StopOutcome:
    """Stop a run whatever its state; stopping one that is over changes nothing of how it ended, and says so.

    Raises RemoteFailed, ConnectionLost: the stop may then have been done all the same, and may be repeated.
    """
    ctx.emit("stage", name="stop", status="started")
    request = {"workdir": ctx.host["workdir"], "run_id": run_id, "grace_s": grace_s, "force": False}
    if telling is None:
        answer = ctx.call_json("stop", request, timeout=grace_s + PROOF_S)
    else:
        answer = ctx.call_telling(
            "stop", request, tell=telling.doing, idle=telling.waiting, idle_s=IDLE_S, timeout=grace_s + PROOF_S
        )
    outcome = StopOutcome(
        state=str(answer["state"]),
        end_reason=answer.get("end_reason"),
        gpus_clean=answer.get("gpus_clean", "unknown"),
        killed=list(answer.get("killed", [])),
        leftovers=list(answer.get("leftovers", [])),
        message=str(answer.get("message", "")),
        was_over=bool(answer.get("was_over", False)),  # payloads of earlier versions do not say
        had_ended=answer.get("was") == RunState.FINISHED.value,
    )
    ctx.emit("stage", name="stop", status="done", text=outcome.message)
    return outcome

"""What a run was at when it ended without success: the stage that it did not come out of, as its events tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.core.runview import RunView, StageView, Status
from remote_payload.host.protocol import EndReason

_UNFINISHED = (Status.STARTED, Status.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStage:
    """The supervisor's step, the driver's phase in it (None between two, and of a step that has none), and for how
    many seconds the run had been in the innermost of them; None where no clock of the host says."""

    step: str
    phase: str | None
    seconds: float | None

    def record(self) -> dict[str, Any]:
        """Return it as `last_stage` of a summary."""
        return asdict(self)


def last_stage(view: RunView) -> LastStage | None:
    """Return the stage that a run ended in; None of a success, and where it had begun none.

    Of a run that has not ended, or of which the end is not known, it is the stage of its last sign of life. The
    seconds end where the work did: what the stop or the clean-up took afterwards is not in them.
    """
    if view.end is not None and view.end.end_reason == EndReason.SUCCEEDED.value:
        return None
    step = _last_unfinished(view.steps)
    if step is None:
        return None
    over = view.stopping_since or view.ended or view.host_time
    if step.status is Status.FAILED and step.started is not None and step.seconds is not None:
        over = step.started + step.seconds
    phase = _last_unfinished(view.phases)
    stage = phase or step
    seconds = stage.seconds if stage.status is Status.FAILED else None
    if seconds is None and stage.started is not None and over is not None:
        seconds = max(0.0, over - stage.started)
    return LastStage(step=step.name, phase=phase.name if phase else None, seconds=seconds)


def _last_unfinished(stages: Sequence[StageView]) -> StageView | None:
    return next((stage for stage in reversed(stages) if stage.status in _UNFINISHED), None)

"""How long a run will take, by the earlier run whose plan is nearest to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.finding import section
from remote_payload.host.protocol import Plan

RATED_TOKENS = 100_000
RATED_S = 10.0
"""A run that captured fewer tokens in less time tells no rate: most of it is the first steps and the last file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """Seconds of a run, and the run they were learnt from. None: nothing to learn from.

    `rest_s` is what that run took beside load, capture and rehearsal: its start, probe, canaries, the engine's end
    and the proof of the files. `rehearse_s` is what its rehearsal took, 0 where there was nothing to try.
    `too_short` is the nearest run where all that are known captured too little to tell a rate.
    """

    load_s: float | None
    load_from: str
    rest_s: float | None
    rehearse_s: float
    extract_s: float | None
    extract_from: str
    too_short: str = ""


def duration(report: Mapping[str, Any], plan: Plan, tokens: int | None) -> Duration | None:
    """Expect the time of earlier runs of the same model on this host and as many ranks; None if there are none.

    `tokens` is what is left to capture. The load of a rehearsal is that of a cut model, so only the first steps are
    taken from it where no run is known.
    """
    spec, found = plan["extract"], section(report, "history")
    if spec is None or found is None:
        return None
    size, kind = spec["engine"].get("tensor_parallel_size"), plan["host"]["accelerator"]
    # A record of an earlier version does not say what it ran on.
    same = [
        run
        for run in found["runs"]
        if run["tensor_parallel_size"] == size and (run.get("accelerator") or kind) == kind
    ]
    runs = sorted(same, key=lambda run: _distance(run, spec, tokens))  # stable: of equals the newest stays first
    timed = next((run for run in runs if run["load_s"]), None)
    rehearsed = next((each for each in found["rehearsals"] if each["load_s"]), None)
    rated = next((run for run in runs if tells_rate(run)), None)
    if timed is None and rehearsed is None and not runs:
        return None
    return Duration(
        load_s=timed["load_s"] if timed else None,
        load_from=timed["run_id"] if timed else "",
        rest_s=_rest(timed) if timed else None,
        rehearse_s=(timed or {}).get("rehearse_s") or 0.0,
        extract_s=tokens / rated["tokens_per_s"] if rated and tokens is not None else None,
        extract_from=rated["run_id"] if rated else "",
        too_short="" if rated or not runs else runs[0]["run_id"],
    )


def tells_rate(run: Mapping[str, Any]) -> bool:
    """Whether a run captured for so long, or so much, that its rate says something of other runs."""
    seconds, rate = run.get("extract_s") or 0.0, run["tokens_per_s"] or 0.0
    return bool(rate) and (seconds >= RATED_S or rate * seconds >= RATED_TOKENS)


def _distance(run: Mapping[str, Any], spec: Mapping[str, Any], tokens: int | None) -> tuple[int, float]:
    """Return how far a run is from a plan: settings that differ, then how many times larger or smaller it was."""
    engine = run.get("engine")
    mine = spec["engine"]
    differing = 1 if engine is None else sum(engine.get(key) != mine.get(key) for key in {*engine, *mine})
    for there, here in ((run.get("format"), spec["format"]), (run.get("store_dtype"), spec["store_dtype"])):
        differing += there is not None and there != here
    if not isinstance(spec["boundaries"], str):
        differing += len(run.get("boundaries") or ()) != len(spec["boundaries"])
    captured = (run["tokens_per_s"] or 0.0) * (run.get("extract_s") or 0.0)
    return differing, abs(math.log(max(captured, 1.0) / max(tokens or 1.0, 1.0)))


def _rest(run: Mapping[str, Any]) -> float | None:
    parts = [run.get(name) for name in ("host_s", "load_s", "extract_s")]
    if None in parts:
        return None
    whole, load, extract = (float(part or 0.0) for part in parts)
    return max(0.0, whole - load - extract - float(run.get("rehearse_s") or 0.0))

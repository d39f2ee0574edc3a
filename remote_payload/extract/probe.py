"""The probe: a loaded engine's first prompts, by which it is decided from where every state is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remote_payload.extract.collect import PROBE_KEY
from remote_payload.extract.dataset import Samples
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.requests import generate
from remote_payload.extract.settings import CaptureSettings

PROMPTS, TOKENS = 3, 64
"""Real prompts, cut: enough rows for a median, few enough to cost nothing beside a load."""

RANK_TOLERANCE = 1e-2
"""Relative difference of a state's norm between ranks. They hold the same states; a rank with a share of them, or
with half a sum, is off by tens of per cent."""


def choose_path(
    llm: Any,
    facts: Sequence[Mapping[str, Any]],
    settings: CaptureSettings,
    samples: Samples,
    notice: Callable[[str, str, str], None],
) -> str:
    """Probe the engine and tell every rank where the states come from; return the path's name.

    `facts` are the ranks' `ctl_facts`; `notice` takes level, code and text. Raises CaptureError if the ranks
    disagree, or if native states are demanded and not proved.
    """
    prompts = [sample.token_ids[:TOKENS] for sample, _ in zip(samples, range(PROMPTS), strict=False)]
    native = all(rank["native"] for rank in facts)
    for kind in ("native", "hooks") if native else ("hooks",):
        llm.collective_rpc("ctl_probe", args=(kind,))
        generate(llm, prompts, [{PROBE_KEY: number} for number in range(len(prompts))])
    proofs = llm.collective_rpc("ctl_proof")
    _check_ranks_agree(proofs)
    wanted = [b for b, _ in proofs[0]["norms"]]
    proved = sorted(set.intersection(*(set(proof["proved"]) for proof in proofs)))
    unproved = [b for b in wanted if b not in proved]
    if native and unproved:
        text = f"the engine returns {proofs[0]['returned']} native states and does not prove boundaries {unproved}"
        if settings.capture == "native" and (facts[0]["compiled"] or not proved):
            raise CaptureError(f'{text}: use capture = "auto" or "hooks"')
        notice("warn", "native-unproved", f"{text}: they are captured with hooks")
    path = str(llm.collective_rpc("ctl_use", args=(proved,))[0])
    errors = ", ".join(f"{b}: {error:.1e}" for b, error in proofs[0]["errors"])
    text = f"states are captured by: {path}" + (f" (native against hooks, {errors})" if errors else "")
    notice("info", "capture-path", text)
    return path


def _check_ranks_agree(proofs: Sequence[dict[str, Any]]) -> None:
    for figures in zip(*(proof["norms"] for proof in proofs), strict=True):
        norms = [norm for _, norm in figures]
        if any(math.isnan(norm) for norm in norms):
            raise CaptureError(f"the probe's states at boundary {figures[0][0]} hold NaN")
        if max(norms) - min(norms) > RANK_TOLERANCE * max(norms):
            raise CaptureError(f"the ranks hold different states at boundary {figures[0][0]}: norms {norms}")

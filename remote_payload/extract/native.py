"""The native path: vLLM's own auxiliary hidden states, which also come out of compiled graphs.

Whether a class returns what it was asked for depends on model and version: some drop the last boundary without a
word, some give a boundary one layer early. So nothing is believed: a few probe prompts are run once this way and once
with hooks, and a boundary counts as proved only if its state is the hooked one and not a neighbour's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import nn

from remote_payload.extract import versions

TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
"""Median relative error of a token, in half precision, where eager and compiled kernels round differently."""


DROPS_LAST = {"DeepseekV2Model": (Version("0.18"), Version("0.28"))}
"""Class of vLLM -> the first release with native states, and the first that returns the one after the last layer.

Read in the sources: 0.24 drops it, 0.28 does not. A build that names another version is left as it is.
"""


class NativeStates:
    """Asks the model for the states after `boundaries` layers and takes them from the runner after each step."""

    def __init__(self, runner: Any, model: Any, layers: nn.ModuleList, boundaries: Iterable[int]) -> None:
        self.boundaries = tuple(sorted(boundaries))
        self._runner, self._model, self._layers = runner, model, layers
        self._dropping = _drops_last(model, layers) if len(layers) in self.boundaries else None

    @staticmethod
    def supported(runner: Any, model: Any) -> bool:
        """Whether class and runner have the means; only a proof says whether they work."""
        return callable(getattr(model, "set_aux_hidden_state_layers", None)) and all(
            hasattr(runner, name) for name in ("use_aux_hidden_state_outputs", "execute_model_state")
        )

    def enable(self) -> None:
        """Must come before compilation: the compiled graph returns what is set now."""
        if self._dropping is not None:
            self._layers.append(PastLast())
            self._dropping.end_layer += 1
        self._model.set_aux_hidden_state_layers(self.boundaries)
        self._runner.use_aux_hidden_state_outputs = True

    def disable(self) -> None:
        """For eager execution only: a compiled graph would go on returning states."""
        self._model.set_aux_hidden_state_layers(())
        self._runner.use_aux_hidden_state_outputs = False
        if self._dropping is not None:
            del self._layers[-1]
            self._dropping.end_layer -= 1

    def take(self) -> list[torch.Tensor]:
        """Return the states [rows, hidden] of the step just executed, as many as the engine gives."""
        return list(getattr(self._runner.execute_model_state, "aux_hidden_states", None) or ())


class PastLast(nn.Module):
    """Stands behind the last decoder layer and changes nothing.

    A forward that keeps a state as it enters the next layer never keeps the one after the last: here it enters one
    more. The compiled graph gets that state with it, so that one boundary does not make the whole engine eager.
    """

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, residual


def _drops_last(model: nn.Module, layers: nn.ModuleList) -> Any:
    """Return the module that runs `layers` if its forward, in this vLLM, drops the state after the last; or None."""
    try:
        release = Version(versions.vllm_version()).release
    except InvalidVersion:
        return None
    for owner in model.modules():
        first, fixed = DROPS_LAST.get(type(owner).__name__, (None, None))
        if first and fixed and getattr(owner, "layers", None) is layers and owner.end_layer == len(layers):
            return owner if first.release <= release < fixed.release else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`positions`: proved boundary -> its place among the native states. `errors`: median relative error of each."""

    positions: dict[int, int]
    errors: dict[int, float]


def prove(native: Sequence[torch.Tensor], hooked: Mapping[int, torch.Tensor], wanted: Sequence[int]) -> Proof:
    """Find each wanted boundary among the native states. `hooked` also holds the neighbours of the wanted ones.

    A native state proves the boundary whose hooked state it is nearest to, if it is near enough. Where several are
    equally near (dummy weights leave early boundaries equal), its place in the order asked for decides.
    """
    positions, errors = {}, {}
    for place, state in enumerate(native):
        distances = {boundary: _distance(state, other) for boundary, other in hooked.items()}
        least = min(distances.values())
        nearest = [boundary for boundary, distance in distances.items() if distance <= least * 1.001]
        expected = wanted[place] if len(native) == len(wanted) else None
        found = expected if expected in nearest else nearest[0]
        tolerance = TOLERANCE.get(state.dtype, HALF_TOLERANCE)
        if found in wanted and least <= tolerance and found not in positions and (expected or len(nearest) == 1):
            positions[found], errors[found] = place, least
    return Proof(positions=positions, errors=errors)


def _distance(state: torch.Tensor, reference: torch.Tensor) -> float:
    state, reference = state.float(), reference.float()
    if state.shape != reference.shape:
        return float("inf")
    scale = reference.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((state - reference).norm(dim=-1) / scale).median())


class Probe:
    """What the probe prompts gave on this rank: one pass of native states, one of hooked ones."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], list[tuple[int, int, torch.Tensor]]] = {}

    def add(self, kind: str, key: int, prompt: int, start: int, state: torch.Tensor) -> None:
        """Keep the rows of one prompt from position `start` on, in the host's memory."""
        self._rows.setdefault((kind, key), []).append((prompt, start, state.cpu().clone()))

    def states(self, kind: str) -> dict[int, torch.Tensor]:
        """Return key -> all prompts' rows, in the order of prompt and position."""
        return {
            key: torch.cat([rows for _, _, rows in sorted(parts, key=lambda part: part[:2])])
            for (of_kind, key), parts in self._rows.items()
            if of_kind == kind
        }

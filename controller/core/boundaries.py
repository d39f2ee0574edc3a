"""Which states are captured. Boundary b = number of decoder layers completed: 0 the embeddings, N the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from controller.core.errors import ConfigError

EAGLE3 = "eagle3"


def resolve_boundaries(spec: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the boundaries that `spec` means for a model of `num_layers` decoder layers, in the order given.

    `eagle3` means [2, N//2, N-3, N]. Raises ConfigError (code `boundaries`) for another word, an empty list, a
    boundary outside 0..N or given twice, and `eagle3` on a model too small for four distinct, rising boundaries.
    """
    if isinstance(spec, str):
        if spec != EAGLE3:
            raise _error(f"`{spec}` is not a set of boundaries", "", f"a list such as [2, {num_layers}]")
        boundaries: tuple[int, ...] = (2, num_layers // 2, num_layers - 3, num_layers)
        if any(low >= high for low, high in pairwise(boundaries)):
            raise _error(
                f"eagle3 gives {list(boundaries)} on {num_layers} layers",
                "it needs at least 7 layers for four distinct, rising boundaries",
                f"a list such as [{num_layers // 2}, {num_layers}]",
            )
        return boundaries
    boundaries = tuple(spec)
    if not boundaries:
        raise _error("no boundary is asked for", "", f"a list such as [2, {num_layers}]")
    outside = [item for item in boundaries if type(item) is not int or not 0 <= item <= num_layers]
    if outside:
        raise _error(
            f"boundaries {outside} do not exist in this model",
            f"it has {num_layers} decoder layers",
            f"numbers from 0 (the embeddings) to {num_layers} (after the last layer)",
        )
    twice = sorted({item for item in boundaries if boundaries.count(item) > 1})
    if twice:
        rest = list(dict.fromkeys(boundaries))
        raise _error(f"boundaries {twice} are given twice", "each state is captured once", f"{rest}")
    return boundaries


def _error(what: str, why: str, instead: str) -> ConfigError:
    return ConfigError(what, why=why, fix=f"set `boundaries` in [capture] to {instead}", code="boundaries")

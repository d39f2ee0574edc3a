"""Whether a checkpoint's tensors are those of the model that its configuration describes: layers and experts.

Every tensor that the index names may be there and the model still not be whole: a configuration of another size, or
an index that was cut with its shards, loads until a layer is asked for, or silently leaves one out.
"""

from __future__ import annotations

import re
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Set

LAYER = re.compile(r"^(?P<prefix>(?:.*\.)?(?:layers|h|blocks))\.(?P<layer>\d+)\.(?P<rest>.*)$")
EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
OTHER = re.compile(r"vision|visual|audio|mtp|draft|encoder|connector|resampler")
"""Parts of a model that have layers of their own."""

PARTS = ("attention", "ffn")
"""Of a decoder layer, under the names of `block_configs`."""

MAX_NUMBERS = 8
"""Listed of what is missing: enough to see whether it is one, or all from somewhere on."""


def left_out(config: Mapping[str, Any]) -> List[str]:
    """Return what each decoder layer of a (text) configuration leaves out: "", "attention", "ffn", "attention ffn".

    Nemotron-NAS left out parts of single layers, and says so in `block_configs`. Empty for other models, and for a
    list of another length than the layers.
    """
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != config.get("num_hidden_layers"):
        return []
    return [" ".join(part for part in PARTS if _is_no_op(block, part)) for block in blocks]


def empty_layers(config: Mapping[str, Any]) -> List[int]:
    """Return the decoder layers that leave out all, and so have no tensor.

    vLLM calls such a layer all the same, and it passes the state on: its boundary is there.
    """
    return [number for number, parts in enumerate(left_out(config)) if parts == " ".join(PARTS)]


def _is_no_op(block: Any, part: str) -> bool:
    described = block.get(part) if isinstance(block, dict) else None
    return isinstance(described, dict) and described.get("no_op") is True


def compare_keys(
    names: Iterable[str], layers: Any, experts: Any, draft_layers: Any, empty: Collection[int] = ()
) -> Optional[Dict[str, Any]]:
    """Return how the tensors `names` differ from a configuration of so many decoder layers and routed experts.

    `empty`: layers that have no tensor, see `empty_layers`.

    {"layers": how many have one, "missing": numbers below `layers` without a tensor, "beyond": numbers above it that
    are not of `draft_layers`, "experts": {"layer", "found": how many, "wrong": numbers} of the first layer whose
    numbered experts are not those of the configuration, else None}. None where nothing can be told: no number in the
    configuration, no list of layers by a known name.
    """
    if type(layers) is not int:
        return None
    found: Dict[str, Dict[int, Set[int]]] = {}  # prefix -> layer -> experts
    for name in names:
        match = LAYER.match(name)
        if match is None or OTHER.search(match["prefix"]):
            continue
        kept = found.setdefault(match["prefix"], {}).setdefault(int(match["layer"]), set())
        expert = EXPERT.search(match["rest"])
        if expert is not None:
            kept.add(int(expert[1]))
    if not found:
        return None
    prefix = max(found, key=lambda each: (len(found[each]), -len(each)))
    numbers = found[prefix]
    last = layers + (draft_layers if type(draft_layers) is int else 0)
    return {
        "layers": len(numbers),
        "missing": _first(set(range(layers)) - set(numbers) - set(empty)),
        "beyond": _first({number for number in numbers if number >= last}),
        "experts": _experts(numbers, layers, experts),
    }


def _experts(numbers: Dict[int, Set[int]], layers: int, experts: Any) -> Optional[Dict[str, Any]]:
    if type(experts) is not int:
        return None
    for layer in sorted(number for number, found in numbers.items() if found and number < layers):
        wrong = set(range(experts)) ^ numbers[layer]
        if wrong:
            return {"layer": layer, "found": len(numbers[layer]), "wrong": _first(wrong)}
    return None


def _first(numbers: Set[int]) -> List[int]:
    return sorted(numbers)[:MAX_NUMBERS]

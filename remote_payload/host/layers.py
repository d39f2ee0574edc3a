"""The numbers by which each system calls a captured state."""

from __future__ import annotations

from typing import List, Sequence

from remote_payload.host.errors import ProtocolError

LAYER_CONVENTIONS = {
    "boundaries": 0,
    "vllm": 0,
    "speculators": 0,  # 0.5 and newer
    "speculators-0.3": 1,  # and 0.4
    "specforge": 1,
    "torchspec": 1,
    "angelslim": 1,
    "modelopt": 1,  # its HF and TensorRT-LLM dumps; its vLLM dump passes ids on unshifted
    "modelopt-vllm": 0,
}
"""By which number each system calls a state: boundary = its layer id + this. (Ours are boundaries already.)"""


def boundaries_of(ids: Sequence[int], convention: str) -> List[int]:
    """Return the boundaries that another system's layer ids mean. Raises ProtocolError for an unknown convention."""
    return [number + _shift(convention) for number in ids]


def layer_ids(boundaries: Sequence[int], convention: str) -> List[int]:
    """Return what another system calls these boundaries; -1 for the embeddings where it counts layers' outputs."""
    return [boundary - _shift(convention) for boundary in boundaries]


def _shift(convention: str) -> int:
    if convention not in LAYER_CONVENTIONS:
        raise ProtocolError("no layer convention %r; there are %s" % (convention, ", ".join(LAYER_CONVENTIONS)))
    return LAYER_CONVENTIONS[convention]

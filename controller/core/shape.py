"""What a model's shape, as far as it is known before the host is asked, says of the bytes to come."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.model import Playbook
from remote_payload.host.protocol import Plan

EAGLE3_STATES = 4
"""States that `eagle3` captures, whatever the number of layers."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}

SAMPLE_OVERHEAD_BYTES = 4096
"""Header of a sample file: tensor table, boundaries, versions, run id, hashes. Measured ones are below 2 KiB."""

TOKEN_BYTES = 16
"""Of each token beside its states: its id, and its place in the loss mask (or its scale), 8 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What is known of a model before the host is asked; None: unknown."""

    num_layers: int | None = None
    hidden: int | None = None


KNOWN_SHAPES = {"kimi-k2.5": ModelShape(num_layers=61, hidden=7168)}
"""By the beginning of the model's folder name, in lower case."""


def model_shape(playbook: Playbook) -> ModelShape:
    """Return the model's shape as the playbook says, else as its folder's name tells."""
    folder = posixpath.basename(playbook.model.path).lower()
    known = next((shape for name, shape in KNOWN_SHAPES.items() if folder.startswith(name)), ModelShape())
    return ModelShape(
        num_layers=playbook.model.num_layers or known.num_layers, hidden=playbook.model.hidden or known.hidden
    )


def bytes_expected(plan: Plan, playbook: Playbook | None) -> int | None:
    """Return the bytes that an extraction writes at most, every sample being of full length; None if unknown.

    A model whose own dtype is stored ("auto") is taken to have 2 bytes an element.
    """
    spec, each = plan["extract"], sample_bytes(plan, playbook)
    if spec is None or each is None or spec["max_samples"] is None:
        return None
    return -(-int(spec["max_samples"]) // int(spec["shard"][1])) * each


def sample_bytes(plan: Plan, playbook: Playbook | None) -> int | None:
    """Return the bytes that a sample of full length takes, as `bytes_expected` counts them; None if unknown."""
    spec = plan["extract"]
    hidden = model_shape(playbook).hidden if playbook else None
    if spec is None or hidden is None:
        return None
    token = state_count(spec) * hidden * element_bytes(spec) + TOKEN_BYTES
    return int(spec["max_seq_len"]) * token + SAMPLE_OVERHEAD_BYTES


def state_count(spec: Mapping[str, Any]) -> int:
    """Return how many states of each token an ExtractSpec captures."""
    return EAGLE3_STATES if spec["boundaries"] == "eagle3" else len(spec["boundaries"])


def element_bytes(spec: Mapping[str, Any]) -> int:
    """Return the bytes of one stored element, 2 where only the model knows."""
    stored = spec["dtype"] if spec["store_dtype"] == "auto" else spec["store_dtype"]
    return DTYPE_BYTES.get(stored, 2)

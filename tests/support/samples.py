"""Sample files of every format without an engine: seeded states, as the worker would describe them."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remote_payload.extract.formats import SampleData, format_named, mask_of_spans, publish, token_digest
from remote_payload.extract.quantize import to_fp8
from remote_payload.host.layers import layer_ids

BOUNDARIES, LAYERS, HIDDEN = [2, 4, 5, 8], 8, 16
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was written: `states` [tokens, states, hidden], and the ledger's line."""

    index: int
    ids: list[int]
    mask: list[int]
    states: torch.Tensor
    line: dict[str, Any]


def make_sample(
    folder: Path, form: str, index: int, tokens: int, *, dtype: torch.dtype = torch.bfloat16, fp8: bool = False,
    final_norm: bool | None = None, boundaries: list[int] = BOUNDARIES, hidden: int = HIDDEN,
    record_id: str | None = None,
) -> Made:  # fmt: skip
    """Write one sample of `tokens` tokens; the first third of them does not count."""
    generator = torch.Generator().manual_seed(index)
    states = torch.randn(tokens, len(boundaries), hidden, generator=generator).to(dtype)
    ids = torch.randint(10, 1000, (tokens,), generator=generator).tolist()
    layout = format_named(form)
    spans = [[tokens // 3, tokens]]
    raw = array("q", ids).tobytes()
    normed = layout.final_norm if final_norm is None else final_norm
    values, scales = to_fp8(states) if fp8 else (states, None)
    figures = [
        {"boundary": b, "norm_mean": 1.0, "norm_max": 1.0, "nan": 0, "inf": 0, "zero_rows": 0} for b in boundaries
    ]
    metadata = {
        "format": form, "index": str(index), "boundaries": json.dumps(boundaries), "num_layers": str(LAYERS),
        "final_norm": json.dumps(normed), "model": "m", "revision": "", "run_id": "r",
        "loss_spans": json.dumps(spans),
        "layer_ids": json.dumps(layer_ids(boundaries, layout.convention)), "layer_convention": layout.convention,
        "token_sha256": token_digest(raw), "states": json.dumps(figures),
        **({} if record_id is None else {"record_id": record_id}),
    }  # fmt: skip
    data = SampleData(
        token_ids=raw, loss_mask=mask_of_spans(spans, tokens), hidden=values.view(torch.uint8).numpy().data.cast("B"),
        shape=(tokens, len(boundaries), hidden), dtype="F8_E4M3" if fp8 else CODES[dtype],
        scales=scales.numpy().data.cast("B") if scales is not None else None, metadata=metadata,
    )  # fmt: skip
    name = layout.file_name(index)
    folder.mkdir(parents=True, exist_ok=True)
    size, sha256 = publish(str(folder / name), lambda sink: layout.write(data, sink))
    line = {
        "index": index, "file": name, "tokens": tokens, "bytes": size, "sha256": sha256,
        "token_sha256": token_digest(raw), "states": figures, "seconds": 0.1,
    }  # fmt: skip
    return Made(index=index, ids=ids, mask=list(mask_of_spans(spans, tokens)), states=states, line=line)


def from_fp8(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the states [rows, states, hidden] in `dtype`, of e4m3 values and fp32 scales [rows]."""
    return (values.float() * scales[:, None, None]).to(dtype)

"""Bytes, memory and time of a run, from what the host reports: pure numbers, judged by `checks_arithmetic`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.boundaries import resolve_boundaries
from controller.core.errors import ConfigError
from controller.core.finding import section
from controller.core.shape import DTYPE_BYTES, SAMPLE_OVERHEAD_BYTES, TOKEN_BYTES
from remote_payload.host.protocol import Plan

CACHE_BYTES = 2
"""Of an element of the KV cache where neither the playbook nor the model says otherwise: bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a run reads and writes. `error`: half of the 95 % interval, in tokens; 0 where all were counted."""

    samples: int
    tokens: int
    error: int
    how: str  # see `remote_payload.host.lengths.Lengths`
    token_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all sample files, by the estimate."""
        return self.tokens * self.token_bytes + self.samples * SAMPLE_OVERHEAD_BYTES

    @property
    def bytes_at_most(self) -> int:
        """Bytes at the upper end of the interval."""
        return self.bytes + self.error * self.token_bytes


def written(report: Mapping[str, Any], plan: Plan) -> Written | None:
    """Return what this run will write, None where lengths or the model's size are not known."""
    spec, found, model = plan["extract"], section(report, "lengths"), section(report, "model")
    lengths = (found or {}).get("lengths")
    config = (model or {}).get("config") or {}
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    if spec is None or not lengths or type(layers) is not int or type(hidden) is not int:
        return None
    try:
        states = len(resolve_boundaries(spec["boundaries"], layers))
    except ConfigError:  # it is a finding of its own
        return None
    dtype = config.get("dtype") if spec["dtype"] == "auto" else spec["dtype"]
    stored = dtype if spec["store_dtype"] == "auto" else spec["store_dtype"]
    shares = int(spec["shard"][1]) if spec.get("shard") else 1
    return Written(
        samples=-(-int(lengths["samples"]) // shares),
        tokens=-(-int(lengths["tokens"]) // shares),
        error=-(-int(lengths["error"]) // shares),
        how=lengths["how"],
        token_bytes=states * hidden * DTYPE_BYTES.get(str(stored), 2) + TOKEN_BYTES,
    )


def cache_bytes_per_token(config: Mapping[str, Any], spec: Mapping[str, Any], ranks: int) -> int | None:
    """Return the bytes that one rank's KV cache takes for a token over all layers; None if the sizes are not known.

    Multi-head latent attention keeps one compressed vector (`kv_lora_rank`) and the rotary part (`qk_rope_head_dim`)
    on every rank; other attention keeps keys and values of the rank's own heads, at least one.
    """
    layers = config.get("num_hidden_layers")
    if type(layers) is not int:
        return None
    kind = str(spec["engine"].get("kv_cache_dtype") or "auto")
    element = 1 if kind.startswith("fp8") else CACHE_BYTES
    latent, rotary = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if type(latent) is int and type(rotary) is int:
        return layers * (latent + rotary) * element
    heads = config.get("attention_heads")
    kept, size = config.get("kv_heads") or heads, config.get("head_dim")
    if size is None and type(heads) is int and type(config.get("hidden_size")) is int:
        size = config["hidden_size"] // heads
    if type(kept) is not int or type(size) is not int:
        return None
    return layers * 2 * max(1, kept // ranks) * size * element


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """Seconds of a run, and the run they were learnt from. None: nothing to learn from.

    `rest_s` is what that run took beside load, capture and rehearsal: its start, probe, canaries, the engine's end
    and the proof of the files. `rehearse_s` is what its rehearsal took, 0 where there was nothing to try.
    """

    load_s: float | None
    load_from: str
    rest_s: float | None
    rehearse_s: float
    extract_s: float | None
    extract_from: str


def duration(report: Mapping[str, Any], plan: Plan, tokens: int | None) -> Duration | None:
    """Expect the time of earlier runs of the same model on this host and as many ranks; None if there are none.

    The load of a rehearsal is that of a cut model, so only the first steps are taken from it where no run is known.
    """
    spec, found = plan["extract"], section(report, "history")
    if spec is None or found is None:
        return None
    size = spec["engine"].get("tensor_parallel_size")
    runs = [run for run in found["runs"] if run["tensor_parallel_size"] == size]
    timed = next((run for run in runs if run["load_s"]), None)
    rehearsed = next((each for each in found["rehearsals"] if each["load_s"]), None)
    rate = runs[0]["tokens_per_s"] if runs else None
    if timed is None and rehearsed is None and rate is None:
        return None
    return Duration(
        load_s=timed["load_s"] if timed else None,
        load_from=timed["run_id"] if timed else "",
        rest_s=_rest(timed) if timed else None,
        rehearse_s=(timed or {}).get("rehearse_s") or 0.0,
        extract_s=tokens / rate if rate and tokens is not None else None,
        extract_from=runs[0]["run_id"] if rate else "",
    )


def _rest(run: Mapping[str, Any]) -> float | None:
    parts = [run.get(name) for name in ("host_s", "load_s", "extract_s")]
    if None in parts:
        return None
    whole, load, extract = (float(part or 0.0) for part in parts)
    return max(0.0, whole - load - extract - float(run.get("rehearse_s") or 0.0))

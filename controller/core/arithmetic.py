"""Bytes, memory and time of a run, from what the host reports: pure numbers, judged by `checks_arithmetic`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from controller.core.boundaries import resolve_boundaries
from controller.core.errors import ConfigError
from controller.core.finding import section
from controller.core.shape import DTYPE_BYTES, SAMPLE_OVERHEAD_BYTES, TOKEN_BYTES
from remote_payload.host.protocol import Plan, Stale

CACHE_BYTES = 2
"""Of an element of the KV cache where neither the playbook nor the model says otherwise: bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a run reads and writes. `error`: half of the 95 % interval, in tokens; 0 where all were counted.

    `kept_samples` and `kept_bytes` are there already and not among the others: see `left`.
    """

    samples: int
    tokens: int
    error: int
    how: str  # see `remote_payload.host.lengths.Lengths`
    token_bytes: int
    kept_samples: int = 0
    kept_bytes: int = 0

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


def left(sizes: Written, report: Mapping[str, Any], plan: Plan) -> Written:
    """Return what of a run is left to write: all of it, or in a resume what the folder does not hold.

    Samples count by their names; what of them turns out not to be good is written too.
    """
    kept = [found["whole"] for found in resumed(report)]
    count = min(sizes.samples, sum(each["count"] for each in kept))
    if not count or plan["extract"] is None:
        return sizes
    missing = sizes.samples - count
    return replace(
        sizes,
        samples=missing,
        tokens=-(-sizes.tokens * missing // sizes.samples),
        error=-(-sizes.error * missing // sizes.samples),
        kept_samples=count,
        kept_bytes=sum(each["bytes"] for each in kept),
    )


def bytes_left(report: Mapping[str, Any], plan: Plan, bytes_expected: int | None) -> int | None:
    """Return what a run may write at most, beside what a resume keeps; None if nobody knows.

    `bytes_expected` is what the caller knows, who could only take every sample to be as long as allowed; the host
    knows the lengths. The longest samples may be those that are missing, so not the estimate's share is taken off but
    the bytes that are there.
    """
    sizes, kept = written(report, plan), sum(found["whole"]["bytes"] for found in resumed(report))
    if sizes is not None:
        if not left(sizes, report, plan).samples:
            return 0
        at_most = sizes.bytes_at_most
        bytes_expected = at_most if bytes_expected is None else min(bytes_expected, at_most)
    return None if bytes_expected is None else max(0, bytes_expected - kept)


def resumed(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the listings of the outputs that the run goes on with."""
    outputs = (section(report, "outputs") or {"outputs": []})["outputs"]
    return [found for found in outputs if found["stale"] == Stale.RESUME]


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

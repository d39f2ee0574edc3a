"""Checks by arithmetic: bytes against disk, the KV cache against GPU memory, and how long it will take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.arithmetic import Written, cache_bytes_per_token, left, written
from controller.core.checks_gpus import ranks, selected
from controller.core.durations import Duration, duration
from controller.core.finding import Finding, failed, passed, section, size, span, warned
from remote_payload.host.protocol import Accelerator, Plan

GPU_MEMORY_UTILIZATION = 0.92
"""Share of a GPU's memory, on a CPU host of the host's, that vLLM takes where the playbook does not say."""

ACTIVATION_SHARE = 0.05
"""Of a GPU's memory: activations of the profiling step, CUDA graphs off, and what CUDA and NCCL keep themselves."""

REHEARSED_S = 5.0
"""A rehearse step that took less found nothing to try, or remembered that it had been tried."""

HOW = {
    "all": "counted",
    "sampled": "sampled",
    "first": "from its first records",
    "bound": "at most, by the bytes of the data",
}


def check_arithmetic(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Say what will be written and how long it takes; judge the KV cache. Disks are judged by `check_disk`."""
    yield from check_lengths(report, plan)
    whole = written(report, plan)
    sizes = left(whole, report, plan) if whole is not None else None
    if sizes is not None:
        yield _size_of(sizes, report)
    yield from _check_cache(report, plan)
    yield from _check_share(report, plan)
    yield from _check_positions(report, plan)
    yield from _time(report, plan, sizes)


def check_lengths(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Warn where the lengths of the data are not known, because then neither are bytes and time."""
    found = section(report, "lengths")
    if found is None or plan["extract"] is None:
        return
    if found["error"]:
        yield warned(
            "data-lengths",
            "the lengths of the data could not be told",
            why=found["error"],
            fix="nothing, if there is room for samples of full length; the job counts them before the load",
        )
    elif found["lengths"] and not found["lengths"]["samples"]:
        yield failed(
            "data-none",
            "not one record that was looked at gives a sample",
            why=f"{found['lengths']['looked_at']:,} records were read",
            fix='see what a record needs in docs/inputs.md; `over_long = "skip"` drops all that are too long',
        )


def _size_of(sizes: Written, report: Mapping[str, Any]) -> Finding:
    """Say what is written, beside what is kept; not as in order where there is no room for it, see `disk-low`."""
    kept = f"{sizes.kept_samples:,} samples ({size(sizes.kept_bytes)}) are there"
    if sizes.kept_samples and not sizes.samples:
        return passed("size", f"{kept}: nothing is left to write if they prove to be good")
    share = f" ± {sizes.error / sizes.tokens:.0%}" if sizes.error and sizes.tokens else ""
    disks = (section(report, "disk") or {"paths": []})["paths"]
    outputs = (section(report, "outputs") or {"outputs": []})["outputs"]
    found = next(((out, disk) for out in outputs for disk in disks if disk["path"] == out["root"]), None)
    room, spare = "", 0
    if found is not None:
        free = found[1]["free"] + (found[0]["bytes"] if found[0]["stale"] == "clear" else 0)
        spare = free - sizes.bytes_at_most
        room = f" of {size(free)} free, {size(spare)} to spare" if spare >= 0 else f", {size(free)} are free"
    what = (
        f"{sizes.tokens:,}{share} tokens in {sizes.samples:,} samples ({HOW[sizes.how]}): "
        f"{size(sizes.bytes)} to write{room}" + (f"; {kept}" if sizes.kept_samples else "")
    )
    if spare >= 0:
        return passed("size", what)
    return warned(
        "size",
        what,
        why=f"up to {size(sizes.bytes_at_most)} are written, {size(-spare)} more than there is room for",
        fix="see `disk-low`: free some, lower `max_samples`, or choose another output root",
    )


def _check_cache(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Compare what is left of a GPU beside its weights with what one prompt of full length needs."""
    spec, model, gpus = plan["extract"], section(report, "model"), section(report, "gpus")
    if spec is None or model is None or gpus is None or plan["host"]["accelerator"] == Accelerator.CPU:
        return
    config, engine = model["config"] or {}, spec["engine"]
    memory = [gpu["memory_total"] for gpu in selected(gpus, plan)][: ranks(plan)]
    token = cache_bytes_per_token(config, spec, ranks(plan))
    if token is None or not memory or None in memory or engine.get("cpu_offload_gb"):
        return
    length = int(engine.get("max_model_len") or spec["max_seq_len"] + 1)
    share = float(engine.get("gpu_memory_utilization") or GPU_MEMORY_UTILIZATION)
    weights = model.get("weight_bytes", model["total_bytes"]) // ranks(plan)
    room = int(min(memory) * (share - ACTIVATION_SHARE)) - weights
    if engine.get("kv_cache_memory_bytes"):
        room = int(engine["kv_cache_memory_bytes"])
    if room < 0:
        return  # `model-too-large` or `model-tight` says so
    if room < token * length:
        yield failed(
            "kv-memory",
            f"a prompt of {length:,} tokens takes {size(token * length)} of KV cache, about {size(room)} are left",
            why=f"{size(min(memory))} of a GPU x {share:.0%}, less {size(weights)} of weights and its activations",
            fix=f"set `max_seq_len = {max(1, room // token // 16 * 16)}` in [data], or raise `tensor_parallel_size`",
        )
    else:
        yield passed(
            "kv-memory",
            f"about {size(room)} of KV cache on each GPU: {room // token:,} tokens, a prompt has up to {length:,}",
        )


def _check_share(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Warn of a CPU host where vLLM would refuse to start, because it finds less memory than the share it takes.

    vLLM looks at one NUMA node at its start, this at the whole host before it: so near the edge it can be otherwise.
    """
    spec, memory = plan["extract"], section(report, "memory")
    if spec is None or memory is None or plan["host"]["accelerator"] != Accelerator.CPU:
        return
    engine = spec["engine"]
    if engine.get("kv_cache_memory_bytes") or "VLLM_CPU_KVCACHE_SPACE" in plan["job"]["env"]:
        return  # then vLLM takes that much for its cache, and no share
    share = float(engine.get("gpu_memory_utilization") or GPU_MEMORY_UTILIZATION)
    available, total = memory["available"], memory["total"]
    if available < share * total:
        yield warned(
            "memory-share",
            f"vLLM takes {share:.0%} of the host's memory, {size(int(share * total))}; {size(available)} of "
            f"{size(total)} are available",
            why="on a CPU host too `gpu_memory_utilization` is that share, and where it is not free the load ends at "
            "once",
            fix=f"set `gpu_memory_utilization = {_share_below(available / total)}` in [engine], or end what else "
            "uses the memory: `free -h` on the host",
        )


def _share_below(available: float) -> float:
    """Return a share with room for what the job's own processes take before vLLM looks, down to the 0.05."""
    return max(0.05, int((available - ACTIVATION_SHARE) * 20) / 20)


def _check_positions(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    spec, model = plan["extract"], section(report, "model")
    config = (model or {}).get("config") or {}
    limit = config.get("max_positions")
    if spec is None or type(limit) is not int or _is_scaled(config.get("rope")):
        return  # scaled positions reach beyond the configured number, by rules of their own
    length = int(spec["engine"].get("max_model_len") or spec["max_seq_len"] + 1)
    if length > limit:
        yield failed(
            "max-model-len",
            f"the model has {limit:,} positions, {length:,} are asked for",
            why="vLLM refuses a max_model_len (here max_seq_len and one) beyond max_position_embeddings",
            fix=f"set `max_seq_len = {limit - 1}` in [data] of the playbook",
        )


def _is_scaled(rope: Any) -> bool:
    if not isinstance(rope, Mapping):
        return False
    kind = rope.get("rope_type") or rope.get("type")
    return kind not in (None, "default") or any(_is_scaled(value) for value in rope.values())


def _time(report: Mapping[str, Any], plan: Plan, sizes: Written | None) -> Iterator[Finding]:
    if sizes is not None and sizes.kept_samples and not sizes.samples:
        yield passed("time", "the samples that are there are proved; if all are good, no engine is started")
        return
    found = duration(report, plan, sizes.tokens if sizes else None)
    if found is None:
        return
    parts = []
    if found.load_s is not None:
        rest = "" if found.rest_s is None else f", probe, canary and shutdown {span(found.rest_s)}"
        parts.append(f"load {span(found.load_s)}{rest} (as run {found.load_from})")
    if found.extract_s is not None:
        parts.append(f"extraction {span(found.extract_s)} (at the rate of run {found.extract_from})")
    if parts:
        total = (found.load_s or 0.0) + (found.rest_s or 0.0) + (found.extract_s or 0.0)
        without = [] if found.rest_s is not None else ["probe, canary and shutdown"]
        if found.too_short:
            without.append(f"extraction, because run {found.too_short} was too short to tell a rate")
        elif found.extract_s is None:
            without.append("extraction")
        without += ["the proof of what is kept"] if sizes is not None and sizes.kept_samples else []
        without += ["a rehearsal"] if _may_rehearse(found, plan) else []
        left_out = f"; without {', '.join(without)}" if without else ""
        yield passed("time", f"about {span(total)}: {', '.join(parts)}{left_out}")


def _may_rehearse(found: Duration, plan: Plan) -> bool:
    """Whether a rehearsal may come on top: one is always made, or the earlier run made one that took time."""
    spec = plan["extract"]
    mode = spec.get("rehearse") if spec is not None else None
    return mode == "always" or (mode == "auto" and found.rehearse_s >= REHEARSED_S)

"""Checks of the playbook's engine arguments, and of the ways that a GPU leaves open to the installed vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.core.checks_gpus import ranks
from controller.core.checks_health import describe_links
from controller.core.enginevalues import NUMBERS, refused, wants, written
from controller.core.finding import Finding, failed, passed, section, some, warned
from controller.core.suggest import nearest
from remote_payload.host.protocol import Plan

NO_PLACE = "[engine] of the playbook"


def check_engine(report: Mapping[str, Any], plan: Plan, places: Mapping[str, str]) -> Iterator[Finding]:
    """Judge names and values of arguments against vLLM's own, and say which attention and all-reduce it can take.

    `places` says where an argument was set, as `file:line`.
    """
    spec, found = plan["extract"], section(report, "capability")
    if spec is None or found is None or found["package"] is None:
        return
    vllm = f"vLLM {found['version'] or 'of unknown version'}"
    known: Sequence[str] = found.get("engine_arguments") or ()
    for name in sorted(set(spec["engine"]) - set(known or spec["engine"])):
        close, place = nearest(name, known), places.get(name, NO_PLACE)
        yield failed(
            "engine-argument",
            f"{vllm} has no engine argument `{name}`",
            why=f"its EngineArgs in {found['package']} has {len(known)} others",
            fix=f"in {place}: did you mean `{close}`?" if close else f"remove `{name}` from {place}",
        )
    types: Mapping[str, Mapping[str, Any]] = found.get("engine_types") or {}
    for name in sorted(types.keys() & spec["engine"].keys()):
        yield from _check_value(name, spec["engine"][name], types[name], vllm, places.get(name, NO_PLACE))
    if found.get("paths"):
        yield from _check_paths(found, report, plan, vllm)


def _check_value(name: str, value: Any, wanted: Mapping[str, Any], vllm: str, place: str) -> Iterator[Finding]:
    if refused(value, wanted):
        close = nearest(value, map(str, wanted["choices"])) if isinstance(value, str) else None
        yield failed(
            "engine-value",
            f"[engine] {name} is {written(value)}; {vllm} wants {wants(wanted)}",
            why="the load would end with it, after older output was cleared",
            fix=f"in {place}: " + (f"did you mean `{close}`?" if close else "write what it wants, or leave it out"),
        )
    elif isinstance(value, bool) and set(wanted["types"]) <= NUMBERS and not wanted["choices"]:
        yield warned(
            "engine-value",
            f"[engine] {name} is {written(value)}, which {vllm} takes for {int(value)}",
            why=f"it wants {wants(wanted)}",
            fix=f"in {place}: write the number",
        )


def _check_paths(found: Mapping[str, Any], report: Mapping[str, Any], plan: Plan, vllm: str) -> Iterator[Finding]:
    paths, model = found["paths"], section(report, "model") or {}
    latent = type((model.get("config") or {}).get("kv_lora_rank")) is int
    backends = paths["mla" if latent else "attention"]
    compute = next((gpu["compute_cap"] for gpu in (section(report, "gpus") or {}).get("gpus", ())), "unknown")
    kind = "latent attention" if latent else "attention"
    able = [item["name"] for item in backends or () if item["able"] is not False]
    if backends and not able:
        yield failed(
            "gpu-attention",
            f"{vllm} has no {kind} for compute capability {compute}",
            why=f"none of {some([item['name'] for item in backends])} takes it",
            fix="use another vLLM on this host: docs/compatibility.md shows what each release can",
        )
        return
    parts = [f"{kind} by {some(able, 4)}"] if able else []
    if ranks(plan) > 1:
        parts.append(f"all-reduce by {' or '.join(reduces(paths, report, ranks(plan)))}")
    if parts:
        yield passed("gpu-paths", f"compute capability {compute} in {vllm}: {', '.join(parts)}")
    wanted = plan["job"]["env"].get("VLLM_ATTENTION_BACKEND")
    if wanted and backends and wanted not in able:
        yield warned(
            "gpu-attention-set",
            f"VLLM_ATTENTION_BACKEND is {wanted}, which {vllm} does not take on these GPUs",
            why=f"for {kind} it takes {some(able, 6)}",
            fix="leave it out of [env], or name one of these",
        )


def reduces(paths: Mapping[str, Any], report: Mapping[str, Any], count: int) -> Sequence[str]:
    """Return the all-reduces that vLLM can take between `count` GPUs, its own kernel first, NCCL always."""
    links = (section(report, "health") or {}).get("links")
    pairs = describe_links(links)
    linked = bool(pairs) and all(kind.split(" x ")[-1].startswith("NV") for kind in pairs.split(", "))
    found = []
    if count == 2 or linked or paths["custom_needs_nvlink"] is False:
        found.append("vLLM's own kernel")
    if paths["symmetric_memory"] and linked:
        found.append("symmetric memory")
    return [*found, "NCCL"]

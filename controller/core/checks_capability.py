"""Checks of what the installed vLLM can capture of the model, as read from its source (see `host/capability.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.core.boundaries import resolve_boundaries
from controller.core.errors import ConfigError
from controller.core.finding import Finding, failed, passed, section, some, warned
from remote_payload.host.protocol import Plan

OTHER_VLLM = "use another vLLM on this host: docs/compatibility.md shows what each release can"


def check_capability(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge model class, native states, layers and the names that the capture needs, before the model is loaded."""
    spec, found = plan["extract"], section(report, "capability")
    if spec is None or found is None or found["package"] is None:
        return
    vllm = f"vLLM {found['version'] or 'of unknown version'}"
    if found["class"] is None:
        yield failed(
            "capability-architecture",
            f"{vllm} has no class for {found['architecture'] or 'this model'}",
            why=f"its registry in {found['package']} does not name it",
            fix=OTHER_VLLM,
        )
        return
    problems = [*_check_names(found, spec, vllm), *_check_native(report, found, spec, vllm)]
    if found["llama_4_scaling"]["needed"] and not found["llama_4_scaling"]["known"]:
        problems.append(
            failed(
                "capability-llama-4-scaling",
                f"config.json asks for llama_4_scaling, and {found['decoder'] or found['class']} of {vllm} has none",
                why="the positions would be scaled wrongly, without an error",
                fix=OTHER_VLLM,
            )
        )
    yield from problems
    if found["layer_parameters"] is None or found["embedding"] is None:
        yield warned(
            "capability-unread",
            f"the layers of {found['class']} in {vllm} could not be read from its source",
            why=f"found: decoder {found['decoder']}, layer {found['layer']}, embedding {found['embedding']}",
            fix="nothing, if the rehearsal passes: it runs them",
        )
    if not any(problem.level == "fail" for problem in problems):
        yield passed("capability", f"{vllm}: {_described(report, found, spec)}")


def native_boundaries(found: Mapping[str, Any], boundaries: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return those of `boundaries` that the class returns natively; `found` is the report's capability."""
    native = found["native"]
    if not native["method"] or not found["runner"]["state"]:
        return ()
    return tuple(b for b in boundaries if native["first" if b == 0 else "last" if b == layers else "inner"])


def _check_names(found: Mapping[str, Any], spec: Mapping[str, Any], vllm: str) -> Iterator[Finding]:
    needs = {"capture", *(("native",) if spec["capture"] == "native" else ())}
    missing = [each["name"] for each in found["missing"] if each["need"] in needs]
    if missing:
        yield failed(
            "capability-names",
            f"{vllm} lacks names that the capture uses",
            why=f"not found in {found['package']}: {some(missing)}",
            fix=OTHER_VLLM,
        )
    if spec["final_norm"] and not found["runner"]["final_norm"]:
        yield failed(
            "capability-final-norm",
            f"the model runner of {vllm} does not keep the states after the final norm",
            why="ExecuteModelState has no hidden_states, or the runner no execute_model_state",
            fix=f"set `final_norm = false` in [capture], or {OTHER_VLLM}",
        )


def _check_native(
    report: Mapping[str, Any], found: Mapping[str, Any], spec: Mapping[str, Any], vllm: str
) -> Iterator[Finding]:
    if spec["capture"] != "native":
        return
    boundaries, layers = _boundaries(report, spec)
    lacking = [b for b in boundaries if b not in native_boundaries(found, boundaries, layers)]
    if lacking or not found["native"]["method"]:
        able = "returns no hidden states natively" if not found["native"]["method"] else f"does not return {lacking}"
        yield failed(
            "capability-native",
            f"{found['text_class'] or found['class']} of {vllm} {able}",
            why='`path = "native"` in [capture] demands it',
            fix='set `path = "auto"` in [capture]: what is missing is captured with hooks',
        )


def _boundaries(report: Mapping[str, Any], spec: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the boundaries and the number of layers; none where the model's section cannot tell (it says so)."""
    model = section(report, "model")
    layers = ((model or {}).get("config") or {}).get("num_hidden_layers")
    if type(layers) is not int:
        return (), 0
    try:
        return tuple(resolve_boundaries(spec["boundaries"], layers)), layers
    except ConfigError:
        return (), 0


def _described(report: Mapping[str, Any], found: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    boundaries, layers = _boundaries(report, spec)
    native = () if spec["capture"] == "hooks" else native_boundaries(found, boundaries, layers)
    hooked = [b for b in boundaries if b not in native]
    ways = [
        f"boundaries {some([str(b) for b in states], 8)} {way}"
        for states, way in ((native, "natively"), (hooked, "with hooks"))
        if states
    ]
    inner = f" over {found['text_class']}" if found["text_class"] not in (None, found["class"]) else ""
    layer = f"{found['layer']}({', '.join(found['layer_parameters'] or ['?'])})"
    parts = [
        f"{found['class']}{inner}",
        *ways,
        layer,
        f"{found['embedding']}()",
        f"runner {found['runner']['default']}",
    ]
    return ", ".join(parts)

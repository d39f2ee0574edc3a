"""What the extraction job was asked to do, checked against the model before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from remote_payload.extract.formats import DTYPE_CODES, format_named, why_unfit
from remote_payload.host.files import read_json
from remote_payload.host.layout import RunPaths
from remote_payload.host.protocol import Accelerator, ExtractSpec, Stale

MANIFEST = "extract.json"
"""In the run folder, written by the driver: what the verify step must find (see `engine.manifest`)."""

CANARY = "canary.json"
"""In the run folder, written by the driver: what the canary measured; part of the summary."""

REHEARSAL = "rehearsal.json"
"""In the run folder: what the rehearsal proved, and what it cannot prove; part of the summary."""

CONFIG_KEY = "ctl_capture"
"""Our entry in vLLM's `additional_config`, which its compile-cache hash covers."""

WORKER = "remote_payload.extract.worker.CaptureWorker"

CAPTURES = ("auto", "hooks", "native")
STORE_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8")
CONFIG_EXIT = 2
CANARY_EXIT = 3

# Each of these would hand a worker only part of a batch's rows or layers, or run the model more than once a step.
SPLITTING = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)
UNSUPPORTED = ("speculative_config", "kv_transfer_config", "enable_dbo", "kv_sharing_fast_prefill")


class ConfigError(Exception):
    """The plan asks for something that cannot be. Nothing has been loaded; the job ends with exit code 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One extraction, as read from its run folder."""

    paths: RunPaths
    run_id: str
    host: str
    cpu: bool
    resume: bool  # whole files of an earlier run are kept
    spec: ExtractSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's config.json says, without loading or executing anything of the model."""

    layers: int  # decoder layers of the language model
    hidden: int
    vocabulary: int | None
    model_type: str
    multimodal: bool
    dtype: str | None
    residual_scale: float  # DeepSeek's routed_scaling_factor; 1.0 elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """What the worker captures; travels in vLLM's `additional_config`, so only what changes the graph is in it."""

    boundaries: tuple[int, ...]  # in the order in which the states are stored
    layers: int
    capture: str
    final_norm: bool
    store_dtype: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "boundaries": list(self.boundaries)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CaptureSettings:
        return cls(**{**record, "boundaries": tuple(record["boundaries"])})


def load_job(environ: Mapping[str, str]) -> Job:
    """Read CTL_RUN_DIR/plan.json. Raises ConfigError if there is none or it is no plan for an extraction."""
    folder = environ.get("CTL_RUN_DIR")
    if not folder:
        raise ConfigError("CTL_RUN_DIR is not set: this is started by ctl's supervisor")
    paths = RunPaths(folder)
    plan = read_json(paths.plan)
    if plan is None or not isinstance(plan.get("extract"), dict):
        raise ConfigError(f"{paths.plan} is not the plan of an extraction")
    outputs = plan["job"]["outputs"]
    return Job(
        paths=paths,
        run_id=plan["run_id"],
        host=environ.get("CTL_HOST") or plan["host"]["name"],
        cpu=plan["host"].get("accelerator") == Accelerator.CPU.value,
        resume=bool(outputs) and outputs[0]["stale"] == Stale.RESUME.value,
        spec=cast("ExtractSpec", plan["extract"]),
    )


def read_model_facts(spec: ExtractSpec) -> ModelFacts:
    """Read the model's config.json (from its folder, or the hub). Raises ConfigError if a needed key is missing."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(spec["model"], revision=spec["revision"])
    except OSError as error:
        raise ConfigError(f"no config.json of the model {spec['model']}: {error}") from error
    text = config.get("text_config") or config
    layers, hidden = text.get("num_hidden_layers", text.get("n_layer")), text.get("hidden_size", text.get("n_embd"))
    if not isinstance(layers, int) or not isinstance(hidden, int):
        raise ConfigError(f"config.json of {spec['model']} does not say num_hidden_layers and hidden_size")
    return ModelFacts(
        layers=layers,
        hidden=hidden,
        vocabulary=text.get("vocab_size"),
        model_type=str(config.get("model_type", "")),
        multimodal="text_config" in config,
        dtype=text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"),
        residual_scale=float(text.get("routed_scaling_factor") or 1.0),
    )


def resolve_boundaries(wanted: str | Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the boundaries to store, in order; boundary b is the state after b of `layers` decoder layers.

    "eagle3" stands for [2, N//2, N-3, N]. Raises ConfigError for a boundary outside 0..N or named twice.
    """
    if isinstance(wanted, str):
        if wanted != "eagle3":
            raise ConfigError(f'boundaries are "eagle3" or a list of numbers, not {wanted!r}')
        boundaries = [2, layers // 2, layers - 3, layers]
    else:
        boundaries = list(wanted)
    if not boundaries:
        raise ConfigError("no boundary is asked for")
    outside = [b for b in boundaries if not isinstance(b, int) or isinstance(b, bool) or not 0 <= b <= layers]
    if outside:
        raise ConfigError(f"boundaries {outside} are outside 0..{layers}: the model has {layers} decoder layers")
    twice = sorted({b for b in boundaries if boundaries.count(b) > 1})
    if twice:
        raise ConfigError(f"boundaries {boundaries} name {twice} twice (the model has {layers} decoder layers)")
    return tuple(boundaries)


def capture_settings(spec: ExtractSpec, facts: ModelFacts) -> CaptureSettings:
    """Check the capture part of the plan against the model. Raises ConfigError."""
    boundaries = resolve_boundaries(spec["boundaries"], facts.layers)
    for name, value, known in (
        ("capture", spec["capture"], CAPTURES),
        ("store_dtype", spec["store_dtype"], STORE_DTYPES),
    ):
        if value not in known:
            raise ConfigError(f"{name} is one of {', '.join(known)}, not {value!r}")
    try:
        form = format_named(spec["format"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if spec["final_norm"] and facts.layers not in boundaries:
        raise ConfigError(f"final_norm needs boundary {facts.layers} (the last) among the boundaries {boundaries}")
    if spec["capture"] == "native" and 0 in boundaries:
        raise ConfigError('boundary 0 (the embeddings) cannot be captured natively: use capture = "auto" or "hooks"')
    dtype = facts.dtype if spec["dtype"] == "auto" else spec["dtype"]
    if dtype == "float16" and facts.residual_scale != 1.0:
        raise ConfigError(
            f"in float16 vLLM divides this model's residual stream by {facts.residual_scale}, so the states would "
            'not be the model\'s: use dtype = "bfloat16"'
        )
    stored = dtype if spec["store_dtype"] == "auto" else spec["store_dtype"]
    reason = why_unfit(
        form, boundaries=boundaries, layers=facts.layers, final_norm=spec["final_norm"],
        dtype=DTYPE_CODES.get(str(stored)),
    )  # fmt: skip
    if reason:
        raise ConfigError(reason)
    return CaptureSettings(
        boundaries=boundaries,
        layers=facts.layers,
        capture=spec["capture"],
        final_norm=spec["final_norm"],
        store_dtype=spec["store_dtype"],
    )


def engine_arguments(job: Job, settings: CaptureSettings, facts: ModelFacts) -> dict[str, Any]:
    """Return the keyword arguments of vllm.LLM: the plan's win, except where the capture depends on ours.

    Compiled graphs are tried only where they can pay: `capture = "hooks"`, boundary 0 (which native capture lacks)
    and a CPU run eagerly, since Python hooks do not run inside a compiled graph. CUDA graphs are always off: prompts
    are longer than any captured size, and a replayed graph would bypass the hooks. Raises ConfigError.
    """
    spec, given = job.spec, dict(job.spec["engine"])
    for name in SPLITTING:
        if given.get(name, 1) != 1:
            raise ConfigError(f"engine.{name} = {given[name]} is not supported by the capture: it must be 1")
    for name in UNSUPPORTED:
        if given.get(name):
            raise ConfigError(f"engine.{name} is not supported by the capture")
    if given.get("enable_prefix_caching"):
        raise ConfigError(
            "engine.enable_prefix_caching must stay off: cached rows are never computed, so not captured"
        )
    if given.get("worker_cls"):
        raise ConfigError("engine.worker_cls is the capture's own")
    length = given.setdefault("max_model_len", spec["max_seq_len"] + 1)
    if length <= spec["max_seq_len"]:
        raise ConfigError(
            f"engine.max_model_len {length} must exceed max_seq_len {spec['max_seq_len']} by one: vLLM adds a token"
        )
    if facts.model_type.startswith("kimi_k2") and facts.multimodal:
        given.setdefault("limit_mm_per_prompt", {"vision_chunk": 0})
    if not facts.multimodal:
        given.setdefault("skip_tokenizer_init", True)  # prompts are token ids; processors of images need one
    if settings.capture == "hooks" or 0 in settings.boundaries or job.cpu:
        given.setdefault("enforce_eager", True)
    if settings.capture == "hooks" and not given["enforce_eager"]:
        raise ConfigError('engine.enforce_eager = false contradicts capture = "hooks"')
    compilation = given.get("compilation_config") or {}
    if not isinstance(compilation, Mapping):
        raise ConfigError("engine.compilation_config must be a table")
    given["compilation_config"] = {**compilation, "cudagraph_mode": "NONE"}
    given["additional_config"] = {**(given.get("additional_config") or {}), CONFIG_KEY: settings.to_dict()}
    defaults = {
        "model": spec["model"], "revision": spec["revision"], "trust_remote_code": spec["trust_remote_code"],
        "dtype": spec["dtype"], "disable_log_stats": True,
    }  # fmt: skip
    return {**defaults, **given, "worker_cls": WORKER, "enable_prefix_caching": False}

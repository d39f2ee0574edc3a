"""Every private name of vLLM that the capture relies on, looked for before it is used.

vLLM promises none of them. A version that has renamed one fails here with the name and the version, in the
rehearsal, rather than with an AttributeError after a long load or, worse, with nothing captured. Names that the
capture can do without (native states, `preempted_req_ids`, `attn_groups`) are asked for where they are used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from remote_payload.extract.errors import CaptureError

CPU_WORKER = ("vllm.v1.worker.cpu_worker", "CPUWorker")
GPU_WORKER = ("vllm.v1.worker.gpu_worker", "Worker")
CPU_ROTARY = ("vllm._custom_ops", "rotary_embedding")
ALL_GATHER = ("vllm.distributed", "tensor_model_parallel_all_gather")
COMPILED = ("vllm.compilation.decorators", "do_not_compile")
"""The module, and the flag that it gives to every module it compiles."""

LLM = ("llm_engine", "collective_rpc", "generate")
ENGINE = ("add_request", "step", "has_unfinished_requests")
WORKER_METHODS = ("init_device", "load_model", "determine_available_memory", "execute_model")
WORKER_ATTRIBUTES = ("vllm_config", "model_config", "parallel_config", "rank")
WORKER_DEVICE = ("device", "model_runner")
VLLM_CONFIG = ("additional_config", "model_config", "cache_config")
MODEL_CONFIG = ("get_hidden_size", "dtype", "quantization", "enforce_eager")
PARALLEL_CONFIG = ("tensor_parallel_size", "enable_expert_parallel")
CACHE_CONFIG = ("cache_dtype",)
RUNNER = ("get_model", "execute_model", "execute_model_state")
MODEL = ("compute_logits",)
STEP = (
    "finished_req_ids", "num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs",
    "total_num_scheduled_tokens",
)  # fmt: skip
STEP_CACHED = ("req_ids", "num_computed_tokens")
STEP_NEW = ("req_id", "prompt_token_ids", "sampling_params", "num_computed_tokens")
SAMPLING = ("extra_args",)
BATCH = ("req_ids",)
STATE = ("hidden_states",)


def vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "of unknown version"))


def named(module: str, name: str) -> Any:
    """Return what `module` of vLLM calls `name`. Raises CaptureError if this vLLM has no such module or name."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CaptureError(f"vLLM {vllm_version()} has no module {error.name}") from error
    require(found, (name,), f"module {module}")
    return getattr(found, name)


def worker_class(cpu: bool) -> Any:
    """Return the platform's worker class. Raises CaptureError if this vLLM has it under another name."""
    return named(*(CPU_WORKER if cpu else GPU_WORKER))


def require(owner: Any, names: Sequence[str], what: str) -> None:
    """Raise CaptureError naming what `owner`, described by `what`, lacks in this version."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise CaptureError(f"vLLM {vllm_version()}: {what} has no {', '.join(missing)}, which the capture relies on")


def require_llm(llm: Any) -> None:
    """Check the driver's side of the engine. Raises CaptureError."""
    require(llm, LLM, "the class LLM")
    require(llm.llm_engine, ENGINE, f"LLM.llm_engine ({type(llm.llm_engine).__name__})")


def require_worker(worker: Any) -> None:
    """Check a worker before it has a device. Raises CaptureError."""
    require(worker, WORKER_ATTRIBUTES, f"the worker class {type(worker).__name__}")
    require(worker.vllm_config, VLLM_CONFIG, "the configuration")
    for owner, names in (
        (worker.model_config, MODEL_CONFIG),
        (worker.parallel_config, PARALLEL_CONFIG),
        (worker.vllm_config.cache_config, CACHE_CONFIG),
    ):
        require(owner, names, f"the configuration's {type(owner).__name__}")


def require_loaded(worker: Any, model: Any) -> None:
    """Check a worker that has loaded `model`. Raises CaptureError."""
    require(model, MODEL, f"the model class {type(model).__name__}")
    if worker.parallel_config.tensor_parallel_size > 1:
        named(*ALL_GATHER)
    if not worker.model_config.enforce_eager:
        require_compiled_flag()


def require_compiled_flag() -> None:
    """Check that compiled modules can still be switched to plain calls. Raises CaptureError.

    The flag exists on instances that this vLLM compiles, which a model need not have: so the source must name it.
    """
    module, name = COMPILED
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (ModuleNotFoundError, OSError) as error:
        raise CaptureError(f"vLLM {vllm_version()} has no readable module {module}") from error
    if f"self.{name}" not in source:
        raise CaptureError(f"vLLM {vllm_version()}: module {module} sets no {name}, which the capture relies on")


def require_step(scheduled: Any) -> None:
    """Check one scheduler output. Raises CaptureError."""
    require(scheduled, STEP, f"the scheduler's {type(scheduled).__name__}")
    require(scheduled.scheduled_cached_reqs, STEP_CACHED, f"the scheduler's {type(scheduled).__name__}")
    for new in scheduled.scheduled_new_reqs[:1]:
        require(new, STEP_NEW, f"the scheduler's {type(new).__name__}")
        require(new.sampling_params, SAMPLING, "SamplingParams")


def batch_of(runner: Any) -> Any:
    """Return the batch of the step just executed, in the runner's own order. Raises CaptureError.

    vLLM's second model runner keeps it with the step's state, the first as its own attribute.
    """
    batch = getattr(runner.execute_model_state, "input_batch", None) or getattr(runner, "input_batch", None)
    if batch is None:
        raise CaptureError(
            f"vLLM {vllm_version()}: neither the runner {type(runner).__name__} nor its execute_model_state has "
            "input_batch, which the capture relies on"
        )
    return batch


def require_executed(runner: Any) -> None:
    """Check what a runner holds after a step. Raises CaptureError."""
    require(batch_of(runner), BATCH, f"the batch of {type(runner).__name__}")
    require(runner.execute_model_state, STATE, f"execute_model_state of {type(runner).__name__}")

"""Every private name of vLLM that the capture relies on, looked for before it is used.

vLLM promises none of them. A version that has renamed one fails here with the name and the version, in the
rehearsal, rather than with an AttributeError after a long load or, worse, with nothing captured.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from remote_payload.extract.errors import CaptureError

CPU_WORKER = ("vllm.v1.worker.cpu_worker", "CPUWorker")
GPU_WORKER = ("vllm.v1.worker.gpu_worker", "Worker")

WORKER_METHODS = ("init_device", "load_model", "determine_available_memory", "execute_model")
WORKER_ATTRIBUTES = ("vllm_config", "model_config", "parallel_config", "rank")
RUNNER = ("get_model", "execute_model", "execute_model_state")
MODEL = ("compute_logits",)
STEP = (
    "finished_req_ids", "num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs",
    "total_num_scheduled_tokens",
)  # fmt: skip
STEP_CACHED = ("req_ids", "num_computed_tokens")
STEP_NEW = ("req_id", "prompt_token_ids", "sampling_params", "num_computed_tokens")


def vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "of unknown version"))


def worker_class(cpu: bool) -> Any:
    """Return the platform's worker class. Raises CaptureError if this vLLM has it under another name."""
    module, name = CPU_WORKER if cpu else GPU_WORKER
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CaptureError(f"vLLM {vllm_version()} has no module {error.name}") from error
    require(found, (name,), f"module {module}")
    return getattr(found, name)


def require(owner: Any, names: Sequence[str], what: str) -> None:
    """Raise CaptureError naming what `owner`, described by `what`, lacks in this version."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise CaptureError(f"vLLM {vllm_version()}: {what} has no {', '.join(missing)}, which the capture relies on")


def require_step(scheduled: Any) -> None:
    """Check one scheduler output. Raises CaptureError."""
    require(scheduled, STEP, f"the scheduler's {type(scheduled).__name__}")
    require(scheduled.scheduled_cached_reqs, STEP_CACHED, f"the scheduler's {type(scheduled).__name__}")
    for new in scheduled.scheduled_new_reqs[:1]:
        require(new, STEP_NEW, f"the scheduler's {type(new).__name__}")

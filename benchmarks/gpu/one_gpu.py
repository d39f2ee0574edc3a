"""Let all ranks of an engine use one GPU, where a machine has no more: a plugin of vLLM, for values alone.

NCCL refuses two ranks on one device, so gloo carries the collectives through the host's memory. Weights, kernels,
processes and shared memory are those of real tensor parallelism; speed is not.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

RANKS_ENV = "CTL_BENCH_RANKS"
ENGINE = {"disable_custom_all_reduce": True}
"""Engine arguments: the custom all-reduce would ask one device for its peers."""


def environment(folder: Path, ranks: int) -> dict[str, str]:
    """Return what an engine's environment needs for `ranks` ranks on one GPU; the entry point is made in `folder`."""
    metadata = folder / "ctl_bench-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ctl-bench\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\none_gpu = one_gpu:share\n")
    paths = (str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    return {RANKS_ENV: str(ranks), "VLLM_DISABLE_PYNCCL": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def share() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.platforms import current_platform

    ranks, platform = int(os.environ[RANKS_ENV]), type(current_platform)
    platform.dist_backend = "gloo"
    platform.device_count = classmethod(lambda cls: ranks)
    platform.logical_device_id_to_visible_device_id = classmethod(lambda cls, device_id: 0)
    torch.accelerator.device_count = lambda: ranks

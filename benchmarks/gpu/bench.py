"""What the parts share: where files lie, child processes with a time limit, GPU baselines, results as JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = Path(os.environ.get("BENCH_ROOT", "/tmp/ctl-gpu"))  # noqa: S108 - a machine of one's own is asked for
OUT = Path(os.environ.get("OUT", str(ROOT / "out")))
MODELS = ROOT / "models"
DATA = ROOT / "data"
MEMORY = Path(os.environ.get("BENCH_MEMORY", "/dev/shm/ctl-gpu"))  # noqa: S108 - outputs not slowed by a disk

QUERY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0

HOST_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # NVLink multicast of one tenant can take a shared server's GPUs out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    # Prompts are only prefilled, so FlashInfer's sampling kernels need not be compiled.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Environment of every engine, ours and others'."""

NO_FUSED_ALLREDUCE = {"cudagraph_mode": "NONE", "pass_config": {"fuse_allreduce_rms": False}}
"""vLLM's compilation_config for every engine here; the fused all-reduce would use multicast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended; `code` is None if its time was up."""

    code: int | None
    seconds: float
    log: Path


def run_child(
    argv: Sequence[str], *, name: str, limit_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """Run a program in a session of its own, its output in OUT/logs/NAME.log, and end all of it at the limit."""
    log = OUT / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as stream:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd,
            env={**os.environ, **HOST_ENV, **(env or {})},
        )  # fmt: skip
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(child.pid)
            child.wait(STOP_TIMEOUT_S)
    return Ended(code=code, seconds=round(time.monotonic() - started, 1), log=log)


def end_group(leader: int) -> None:
    """Kill what is left of a process group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def gpu_state() -> dict[str, Any]:
    """Return memory used by each GPU in MiB, the compute processes, and the names in /dev/shm.

    Only GPUs that CUDA_VISIBLE_DEVICES names, if it is set: others may be at work for another part.
    """
    memory = _smi("--query-gpu=memory.used")
    processes = _smi("--query-compute-apps=pid,used_memory")
    return {
        "memory_mib": [int(value) for value in memory],
        "processes": len(processes),
        "shm": sorted(set(os.listdir("/dev/shm")) - {MEMORY.name}),  # noqa: S108 - only listed
    }


def gpu_mib_below(ancestor: int) -> int:
    """Return the GPU memory in MiB that a process and its descendants use."""
    total = 0
    for line in _smi("--query-compute-apps=pid,used_memory"):
        pid, used = line.split(",")
        if ancestor in _ancestry(int(pid)):
            total += int(used)
    return total


def _ancestry(pid: int) -> list[int]:
    found = []
    while pid > 1:
        found.append(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            break  # it ended in between
    return found


def _smi(query: str) -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    done = subprocess.run(
        ["nvidia-smi", *(["-i", chosen] if chosen else []), query, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True,
    )  # fmt: skip
    return done.stdout.split("\n")[:-1]


def keep_smi(name: str, prefix: Sequence[str] = ()) -> None:
    """Keep `nvidia-smi -q -x` and the two queries of the probe as OUT/smi/NAME.{xml,gpus.csv,apps.csv}."""
    folder = OUT / "smi"
    folder.mkdir(parents=True, exist_ok=True)
    fields = (
        "index,uuid,name,memory.used,memory.total,driver_version,utilization.gpu,temperature.gpu,"
        "ecc.errors.uncorrected.volatile.total,mig.mode.current,power.draw,compute_cap"
    )
    csv = "--format=csv,noheader,nounits"
    for suffix, arguments in (
        ("xml", ["-q", "-x"]),
        ("gpus.csv", [f"--query-gpu={fields}", csv]),
        ("apps.csv", ["--query-compute-apps=pid,gpu_uuid,used_memory,process_name", csv]),
    ):
        done = subprocess.run(
            [*prefix, "nvidia-smi", *arguments], capture_output=True, timeout=QUERY_TIMEOUT_S, check=False
        )
        (folder / f"{name}.{suffix}").write_bytes(done.stdout + done.stderr)


def gpu_count() -> int:
    """Return how many GPUs this machine has, visible to us or not."""
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    return len(done.stdout.splitlines())


def versions() -> dict[str, str]:
    """Return the versions that the figures depend on, without importing torch."""
    from importlib.metadata import distributions

    wanted = ("vllm", "torch", "transformers", "safetensors", "flashinfer-python", "triton")
    packages = {d.name: d.version for d in distributions() if d.name in wanted}
    gpus = _smi("--query-gpu=name,driver_version")
    return {**packages, "python": sys.version.split()[0], "gpus": f"{len(gpus)} x {gpus[0]}"}


def write_result(part: str, document: Mapping[str, Any]) -> None:
    """Write OUT/PART.json; called after each step, so that a part cut short leaves what it has."""
    OUT.mkdir(parents=True, exist_ok=True)
    record = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), **document}
    (OUT / f"{part}.json").write_text(json.dumps(record, indent=1) + "\n")


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys as a Markdown table."""
    print(f"\n### {title}\n", flush=True)
    if not rows:
        return
    keys = list(rows[0])
    print("| " + " | ".join(keys) + " |")
    print("|" + "---|" * len(keys))
    for row in rows:
        print("| " + " | ".join(str(row.get(key, "")) for key in keys) + " |", flush=True)

"""Run folders, plans and real engines for the tests of the extraction job."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote_payload.host.files import read_lines
from remote_payload.host.protocol import WIRE

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_ID = "20260102-030405-abcdef"
ENGINE_TIMEOUT_S = 280.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder and what the driver left in it."""

    folder: Path
    output: Path
    code: int | None = None
    log: str = ""

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events of all writers by time, or those of one type."""
        found = [r for path in (self.folder / "events").glob("*.jsonl") for r in read_lines(str(path))]
        found.sort(key=lambda record: record["t"])
        return [record for record in found if kind in (None, record["type"])]

    def ledger(self, writer: str = "rank-*") -> list[dict[str, Any]]:
        return [r for path in (self.folder / "ledger").glob(f"{writer}.jsonl") for r in read_lines(str(path))]

    def path(self, index: int) -> Path:
        return self.output / f"hs_{index}.safetensors"


def header_of(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))


def make_run(folder: Path, **extract: Any) -> Run:
    """Create a run folder with the plan of an extraction; keyword arguments replace fields of ExtractSpec.

    `stale` and `accelerator` go to the output and the host.
    """
    stale, accelerator = extract.pop("stale", "fail"), extract.pop("accelerator", "cpu")
    run, output = folder / "run", folder / "out"
    run.mkdir(parents=True, exist_ok=True)
    spec = {
        "model": "model", "revision": None, "trust_remote_code": False, "dtype": "float32", "data": "data.jsonl",
        "data_kind": "auto", "max_samples": None, "max_seq_len": 512, "over_long": "truncate", "shard": [1, 1],
        "boundaries": "eagle3", "final_norm": False,
        "store_dtype": "auto", "output": str(output), "format": "speculators", "capture": "auto", "engine": {},
        "buffer_bytes": 4 << 30, "rehearse": "never",
        # Two canaries take some 10 s on a busy machine: only runs that show something about them have them.
        "canary": False, **extract,
    }  # fmt: skip
    host = {"name": "here", "accelerator": accelerator, "gpus": 0}
    job = {
        "kind": "extract", "name": "t", "steps": [], "cwd": "/", "env": {}, "secret_env": [], "success": {},
        "outputs": [{"path": str(output), "root": str(folder), "stale": stale, "adopt": False}], "limits": {},
    }  # fmt: skip
    plan = {"wire": WIRE, "run_id": RUN_ID, "host": host, "payload": "0" * 64, "job": job, "timings": {}}
    (run / "plan.json").write_text(json.dumps({**plan, "extract": spec}))
    return Run(folder=run, output=output)


def environment(run: Run, **extra: str) -> dict[str, str]:
    """The environment that the supervisor gives to the job."""
    return {
        **os.environ, "CTL_RUN_DIR": str(run.folder), "CTL_RUN_ID": RUN_ID, "CTL_HOST": "here", "SPT_NOENV": "1",
        "VLLM_PROCESS_NAME_PREFIX": f"ctl-{RUN_ID}",
        "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Tiny models gain nothing from threads, and lose much where others use the cores.
        "OMP_NUM_THREADS": "1", **extra,
    }  # fmt: skip


def execute(run: Run, module: str, **env: str) -> Run:
    """Run a module of the job in its own process, as the supervisor does, and return how it ended."""
    return execute_module(run, f"remote_payload.extract.{module}", **env)


def execute_module(run: Run, module: str, **env: str) -> Run:
    """The same for any module."""
    ended = subprocess.run(
        [sys.executable, "-m", module],
        env=environment(run, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=ENGINE_TIMEOUT_S,
        check=False,
    )
    return Run(folder=run.folder, output=run.output, code=ended.returncode, log=ended.stdout.decode(errors="replace"))


def write_lines(path: Path, records: list[Any]) -> Path:
    """Write a JSONL file; strings are written as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines))
    return path

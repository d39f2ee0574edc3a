"""The product on real GPUs: `ctl` over SSH on loopback, from preflight to the summary, and every way to end a run.

    python product.py [--gpus N]      N: GPUs used by each run, of all that this host has

Steps, each with the GPUs' memory and processes and /dev/shm before and after:

| step            | what is done | what must hold |
|---|---|---|
| extract         | a whole extraction, rehearsed, compiled | exit 0, summary finished, GPUs clean |
| extract again   | the same once more: what a second run saves | the same |
| busy            | a process holds a GPU | preflight refuses, nothing starts |
| dirty           | memory in use by a process that nvidia-smi cannot see | kept as test data |
| stop in load    | `ctl stop` while the engine loads | killed, back to the baseline |
| stop in run     | `ctl stop` while samples are written | killed, back to the baseline |
| engine killed   | SIGKILL of the engine's process in mid-run | the run fails with a reason, back to the baseline |
| rank killed     | SIGKILL of the last tensor-parallel rank (N > 1) | the same |
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import (
    DATA,
    HOST_ENV,
    MODELS,
    OUT,
    ROOT,
    gpu_count,
    gpu_state,
    keep_smi,
    print_table,
    run_child,
    write_result,
)  # fmt: skip

from tools.sshd import SshServer

HOST = ROOT / "host"
CLIENT = ROOT / "client"
CARRIED = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME")
"""Variables that a container image sets for its own processes only, and sshd would drop."""

EXTRACT_LIMIT_S = 330.0
COMMAND_LIMIT_S = 60.0
REACH_LIMIT_S = 240.0
SETTLE_S = 25.0
TOLERANCE_MIB = 64
SAMPLES = 200
HOLDER = "import torch, time; x = torch.empty(2 << 30, dtype=torch.uint8, device='cuda'); print('held', flush=True); time.sleep(120)"  # noqa: E501


class Product:
    """A workstation and a host on one machine."""

    def __init__(self, gpus: int, model: str) -> None:
        self.gpus, self.model = gpus, model
        self.steps: list[dict[str, Any]] = []
        self.part = f"product-{gpus}gpu"
        for folder in (HOST / "output", CLIENT / "home", CLIENT / "playbooks"):
            folder.mkdir(parents=True, exist_ok=True)
        words = " ".join(f'{name}="{os.environ[name]}"' for name in CARRIED if os.environ.get(name))
        shutil.rmtree(CLIENT / "ssh", ignore_errors=True)
        self.sshd = SshServer(CLIENT / "ssh", alias="gpu-host", extra=[f"SetEnv SHLVL=2 {words}"])
        self._write_hosts()
        for name, eager in (("compiled", False), ("eager", True)):
            self._write_playbook(name, eager)

    def _write_hosts(self) -> None:
        chosen = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        env = "\n".join(f"{name} = {json.dumps(value)}" for name, value in {**HOST_ENV, **chosen}.items())
        (CLIENT / "hosts.toml").write_text(
            f"""schema = 1
[hosts.gpu]
address = "gpu-host"
ssh_config = {json.dumps(str(self.sshd.ssh_config))}
python = {json.dumps(sys.executable)}
bootstrap_python = {json.dumps(sys.executable)}
workdir = {json.dumps(str(HOST))}
output_roots = ["output"]
lease_dir = "lease"
gpus = {gpu_count()}
gpu_name = "NVIDIA H200"

[hosts.gpu.env]
{env}
"""
        )

    def _write_playbook(self, name: str, eager: bool) -> None:
        (CLIENT / "playbooks" / f"{name}.toml").write_text(
            f"""schema = 1
kind = "extract"
description = "{self.model}, dummy weights, {name}"
[model]
path = {json.dumps(str(MODELS / self.model))}
dtype = "bfloat16"
[data]
path = {json.dumps(str(DATA / "prompts.jsonl"))}
max_seq_len = 4095
max_samples = {SAMPLES if name == "compiled" else 2000}
[capture]
boundaries = "eagle3"
[output]
path = "output/{name}"
stale = "clear"
[rehearse]
mode = "{"always" if name == "compiled" else "never"}"
[engine]
tensor_parallel_size = {self.gpus}
load_format = "dummy"
enforce_eager = {str(eager).lower()}
max_num_batched_tokens = 16384
max_num_seqs = 256
gpu_memory_utilization = 0.8
compilation_config = {{ pass_config = {{ fuse_allreduce_rms = false }} }}
[limits]
load_timeout = "5m"
silence_timeout = "4m"
stop_grace = "10s"
"""
        )

    # ---------------------------------------------------------------------------------------- ctl

    def ctl(self, step: str, *words: str, limit_s: float = COMMAND_LIMIT_S) -> tuple[int | None, str]:
        """Run a command of ctl as a user does; return its exit code and what it printed."""
        home = {"HOME": str(CLIENT / "home"), "XDG_STATE_HOME": str(CLIENT / "home" / "state")}
        ended = run_child(
            [sys.executable, "-m", "controller", *words], name=f"{self.part}-{step}", limit_s=limit_s, cwd=CLIENT,
            env={**home, "CTL_CONFIG": str(CLIENT / "hosts.toml"), "PYTHONPATH": os.environ["CTL_PYTHONPATH"]},
        )  # fmt: skip
        return ended.code, ended.log.read_text(errors="replace")

    def launch(self, step: str, playbook: str) -> Path:
        """Start a detached run; return its folder on the host."""
        before = set(self.run_folders())
        code, text = self.ctl(
            step, "extract", "--host", "gpu", "--playbook", str(CLIENT / "playbooks" / f"{playbook}.toml"),
            "--yes", "--detach", "--progress", "plain",
        )  # fmt: skip
        new = [folder for folder in self.run_folders() if folder not in before]
        if not new:
            raise RuntimeError(f"nothing was launched (exit {code}): {text[-1500:]}")
        return new[-1]

    def summary(self, step: str, run: Path) -> dict[str, Any]:
        _, text = self.ctl(f"{step}-summary", "summary", run.name, "--host", "gpu", "--json")
        found = text.find("{")
        return json.loads(text[found:]) if found >= 0 else {"text": text[-500:]}

    def stop_all(self) -> None:
        """Stop every run of ours that has not ended."""
        for run in self.run_folders():
            if not _ended(run):
                self.ctl("stop-all", "stop", run.name, "--host", "gpu", "--grace", "5")

    @staticmethod
    def run_folders() -> list[Path]:
        return sorted(HOST.glob("runs/*-*"))

    # -------------------------------------------------------------------------------------- steps

    def step(self, name: str, body: Callable[[], dict[str, Any]]) -> None:
        """Run one step between two measurements of the GPUs; a failed step is a row as well."""
        before, started = gpu_state(), time.monotonic()
        try:
            found = body()
        except Exception as error:  # noqa: BLE001 - reported in the row, and the next steps still tell something
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[-1500:]}
        settled = time.monotonic()
        after = gpu_state()
        while not _clean(before, after) and time.monotonic() - settled < SETTLE_S:
            time.sleep(0.5)
            after = gpu_state()
        clean = _clean(before, after)
        row = {
            "step": name, "ok": bool(found.pop("ok", True)) and clean, "seconds": round(settled - started, 1),
            "before_mib": before["memory_mib"], "after_mib": after["memory_mib"],
            "processes": after["processes"], "shm_left": sorted(set(after["shm"]) - set(before["shm"])), **found,
        }  # fmt: skip
        self.steps.append(row)
        print(json.dumps(row), flush=True)
        write_result(self.part, {"command": " ".join(sys.argv), "gpus": self.gpus, "steps": self.steps})

    def extract(self, step: str = "extract") -> dict[str, Any]:
        code, text = self.ctl(
            step, "extract", "--host", "gpu", "--playbook", str(CLIENT / "playbooks" / "compiled.toml"), "--yes",
            "--progress", "plain", "--json", limit_s=EXTRACT_LIMIT_S,
        )  # fmt: skip
        run = self.run_folders()[-1]
        summary = self.summary(step, run)
        keys = ("end_reason", "gpus_clean", "samples", "tokens", "bytes", "timings", "tokens_per_s", "bytes_per_s",
                "problems", "shape")  # fmt: skip
        found = {key: summary.get(key) for key in keys}
        found["ok"] = code == 0 and summary.get("gpus_clean") is True
        return {**found, "exit": code, **({} if code == 0 else {"text": text[-1500:]})}

    def busy(self) -> dict[str, Any]:
        holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        try:
            holder.stdout.readline()
            keep_smi(f"{self.part}-busy")
            # A PID namespace of its own hides the holder, as between two containers that share a GPU.
            keep_smi(f"{self.part}-dirty", ("unshare", "--pid", "--fork", "--mount-proc"))
            code, text = self.ctl(
                "busy", "preflight", "--host", "gpu", "--playbook", str(CLIENT / "playbooks" / "eager.toml"), "--json"
            )
        finally:
            holder.kill()
            holder.wait()
        return {"ok": code not in (0, None) and "gpu-process" in text, "exit": code}

    def stop_in_load(self) -> dict[str, Any]:
        run = self.launch("stop-load", "compiled")
        idle = gpu_state()["memory_mib"]
        _reach(lambda: max(gpu_state()["memory_mib"]) > max(idle) + 4096 or _ended(run), "the model is loading")
        return self._stop("stop-load", run)

    def stop_in_run(self) -> dict[str, Any]:
        run = self.launch("stop-run", "eager")
        _reach(lambda: _written(run) >= 20 or _ended(run), "20 samples")
        keep_smi(f"{self.part}-running")
        return self._stop("stop-run", run)

    def _stop(self, step: str, run: Path) -> dict[str, Any]:
        written, started = _written(run), time.monotonic()
        code, text = self.ctl(step + "-ctl", "stop", run.name, "--host", "gpu", "--json", "--grace", "10", limit_s=90)
        seconds = round(time.monotonic() - started, 1)
        found = json.loads(text[text.find("{") :]) if "{" in text else {"text": text[-800:]}
        keys = ("state", "end_reason", "gpus_clean", "leftovers", "message")
        return {
            "ok": code == 0 and found.get("gpus_clean") is True and found.get("end_reason") == "stopped",
            "exit": code, "samples_then": written,
            "stop_s": seconds, **{key: found.get(key) for key in keys}, "killed": len(found.get("killed") or []),
        }  # fmt: skip

    def kill(self, step: str, process: str) -> dict[str, Any]:
        run = self.launch(step, "eager")
        _reach(lambda: _written(run) >= 20 or _ended(run), "20 samples")
        victims = _processes(run.name, process)
        if not victims:
            raise RuntimeError(f"no process {process} among {_processes(run.name, '')}")
        os.kill(victims[-1][0], signal.SIGKILL)
        killed = time.monotonic()
        _reach(lambda: _ended(run), "the run's end")
        seconds = round(time.monotonic() - killed, 1)
        summary = self.summary(step, run)
        problems = [f"{p.get('code')}: {p.get('what')}" for p in summary.get("problems") or []]
        return {
            "ok": summary.get("end_reason") == "job-failed" and summary.get("gpus_clean") is True,
            "victim": victims[-1][1], "end_s": seconds, "end_reason": summary.get("end_reason"),
            "gpus_clean": summary.get("gpus_clean"), "problems": problems[:4],
        }  # fmt: skip


def _clean(before: dict[str, Any], after: dict[str, Any]) -> bool:
    memory = zip(before["memory_mib"], after["memory_mib"], strict=True)
    return (
        all(now <= then + TOLERANCE_MIB for then, now in memory)
        and after["processes"] <= before["processes"]
        and not set(after["shm"]) - set(before["shm"])
    )


def _reach(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + REACH_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not reached in {REACH_LIMIT_S:.0f} s")
        time.sleep(0.25)


def _written(run: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in run.glob("ledger/rank-*.jsonl"))


def _ended(run: Path) -> bool:
    return (run / "result.json").exists()


def _processes(run_id: str, name: str) -> list[tuple[int, str]]:
    """Return (pid, title) of the run's vLLM processes whose title holds `name`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in between
        if title.startswith(f"ctl-{run_id}") and name in title:
            found.append((int(path.parent.name), title))
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--steps", default="extract,again,busy,stop-load,stop-run,engine,rank")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    product = Product(arguments.gpus, arguments.model)
    bodies: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "extract": ("extract", product.extract),
        "again": ("extract again", lambda: product.extract("again")),
        "busy": ("busy", product.busy),
        "stop-load": ("stop in load", product.stop_in_load),
        "stop-run": ("stop in run", product.stop_in_run),
        "engine": ("engine killed", lambda: product.kill("kill-engine", "EngineCore")),
        "rank": ("rank killed", lambda: product.kill("kill-rank", f"Worker_TP{arguments.gpus - 1}")),
    }
    with product.sshd:
        keep_smi(f"{product.part}-clean")
        try:
            for name in arguments.steps.split(","):
                if name != "rank" or arguments.gpus > 1:
                    product.step(*bodies[name])
        finally:  # at the time limit, too: a run outlives us by design and would hold the GPUs of the next part
            product.stop_all()
    columns = (
        "step",
        "ok",
        "seconds",
        "before_mib",
        "after_mib",
        "processes",
        "shm_left",
        "end_reason",
        "gpus_clean",
    )
    print_table(
        f"Product, {arguments.gpus} GPU", [{key: row.get(key, "") for key in columns} for row in product.steps]
    )
    logs = OUT / "runs"
    for run in product.run_folders():  # all but the log's FIFO
        shutil.copytree(run, logs / run.name, ignore=shutil.ignore_patterns("pipe"), dirs_exist_ok=True)
    return 0 if all(row["ok"] for row in product.steps) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How fast states become files: the product's store alone, one process a rank, against fio on the same path.

    python writing.py [--ranks 4] [--hidden 7168] [--targets /dev/shm/ctl-gpu,/tmp/ctl-gpu]

Each rank fills steps of 16,384 tokens of 4 states on a GPU (ranks share GPUs where there are fewer) and hands them to
its store as the worker does: copied to pinned memory, measured, hashed, written, synced, in the ledger. fio writes
files of the same size, one thread for each writer of ours, and syncs each (FIO names the program).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import MEMORY, ROOT, print_table, write_result

STATES, SAMPLE_TOKENS, STEP_TOKENS = 4, 1024, 16384
STEPS = 8
LIMIT_S = 240.0
FIO_LIMIT_S = 60


def rank(arguments: argparse.Namespace, number: int, target: Path) -> int:
    """Write STEPS steps; print when the first was handed over and when the last file was on disk."""
    import torch

    from remote_payload.extract.formats import format_named
    from remote_payload.extract.store import SampleStore
    from remote_payload.host.journal import Journal

    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = SampleStore(
        output=str(target), form=format_named("speculators"), boundaries=list(range(1, STATES + 1)),
        hidden=arguments.hidden, dtype=torch.float8_e4m3fn if arguments.fp8 else torch.bfloat16, device=device,
        ledgers=[Journal(str(target / f"ledger-{number}.jsonl"))], metadata=lambda *_: {},
    )  # fmt: skip
    states = [torch.randn(STEP_TOKENS, arguments.hidden, device=device, dtype=torch.bfloat16) for _ in range(STATES)]
    ids, samples = list(range(SAMPLE_TOKENS)), STEP_TOKENS // SAMPLE_TOKENS

    def step(first: int) -> None:
        buffers = [store.open((first + place) * arguments.ranks + number, ids, None) for place in range(samples)]
        if None in buffers:
            raise RuntimeError("the pool gave no room although writers were at work")
        block = store.block(states, [(0, STEP_TOKENS)])
        store.copy(block, [(buffer, 0, SAMPLE_TOKENS) for buffer in buffers])
        for buffer in buffers:
            store.finish(buffer)

    step(0)  # the pool's memory is pinned at its first use
    store.drain()
    print("READY", flush=True)
    sys.stdin.readline()
    started = time.time()
    for turn in range(STEPS):
        step(turn * samples)
    store.drain()
    print("RESULT", json.dumps([started, time.time()]), flush=True)
    return 0


def ours(arguments: argparse.Namespace, target: Path) -> dict[str, Any]:
    """Return bytes and GB/s of all ranks together."""
    argv = [sys.executable, __file__, *sys.argv[1:], "--target", str(target), "--rank"]
    ranks = [
        subprocess.Popen([*argv, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(arguments.ranks)
    ]
    try:
        for child in ranks:
            _line(child, "READY")
        for child in ranks:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        times = [json.loads(_line(child, "RESULT")) for child in ranks]
    finally:
        for child in ranks:
            child.kill()
            child.wait()
    size = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
    seconds = max(end for _, end in times) - min(start for start, _ in times)
    return {"gb": round(size / 1e9, 2), "seconds": round(seconds, 2), "gb_per_s": round(size / 1e9 / seconds, 2)}


def _line(child: subprocess.Popen[str], word: str) -> str:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise RuntimeError(f"a rank ended with {child.wait()} before {word}")


def fio(arguments: argparse.Namespace, target: Path, file_bytes: int, files: int) -> float:
    """Return fio's GB/s for as many files of the same size."""
    from remote_payload.extract.store import WRITERS

    jobs = arguments.ranks * WRITERS
    shape = {
        "name": "write", "directory": target, "rw": "write", "ioengine": "sync", "bs": "4M", "numjobs": jobs,
        "nrfiles": max(1, files // jobs), "filesize": file_bytes, "file_service_type": "sequential",
        "fallocate": "none", "create_on_open": 1, "fsync_on_close": 1, "output-format": "json",
    }  # fmt: skip
    argv = [os.environ["FIO"], "--group_reporting", *(f"--{key}={value}" for key, value in shape.items())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=FIO_LIMIT_S, check=True)
    write = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write"]
    return round(write["io_bytes"] / 1e6 / write["runtime"], 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--targets", default=f"{MEMORY},{ROOT}")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--target", type=Path)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return rank(arguments, arguments.rank, arguments.target)
    rows = []
    for name in arguments.targets.split(","):
        target = Path(name) / "writing"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        row: dict[str, Any] = {"path": name, "ranks": arguments.ranks, **ours(arguments, target)}
        sizes = [file.stat().st_size for file in target.rglob("*.safetensors")]
        shutil.rmtree(target)
        if "FIO" in os.environ:
            target.mkdir()
            row["fio_gb_per_s"] = fio(arguments, target, max(sizes), len(sizes))
            row["of_fio"] = round(row["gb_per_s"] / row["fio_gb_per_s"], 2)
            shutil.rmtree(target)
        rows.append(row)
        part = f"writing-{arguments.ranks}{'-fp8' if arguments.fp8 else ''}"
        write_result(part, {"command": " ".join(sys.argv), "rows": rows})
    print_table(f"Writing, {arguments.ranks} ranks, {'fp8' if arguments.fp8 else 'bf16'}", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

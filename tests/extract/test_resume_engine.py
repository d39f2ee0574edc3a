"""A real engine with hardly any KV cache: killed, resumed, preempting, and its disk filled by somebody else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.disk import fill, small_disk
from support.extraction import Run, environment, execute, make_run, write_lines
from support.reference import relative_error
from support.stubengine import fates, prompts

SAMPLES, TOKENS = 20, 300
DISK_BYTES = 24 << 20
"""The samples take 12 MB."""

ENGINE = {
    # Four prompts get rows in one step, and the cache holds fewer than three: the others are preempted.
    "max_num_batched_tokens": 128, "long_prefill_token_threshold": 32, "max_num_seqs": 8, "block_size": 32,
    "num_gpu_blocks_override": 28, "scheduler_reserve_full_isl": False, "enforce_eager": True,
    # The executor that has a time-out.
    "distributed_executor_backend": "mp",
}  # fmt: skip
TIMEOUT_S = 6
START_S = 120.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as folder:
        yield folder


@contextmanager
def started(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job; whatever happens, no engine is left behind."""
    process = start(run)
    try:
        yield process
    finally:
        kill_all(run, process)


def start(run: Run) -> subprocess.Popen[bytes]:
    env = environment(run, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=str(TIMEOUT_S))
    with (run.folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "remote_payload.extract.engine"], env=env, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def kill_all(run: Run, process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the job with all its workers, as a power cut would."""
    marker = f"CTL_RUN_DIR={run.folder}".encode()
    mine = [process.pid]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and marker in (entry / "environ").read_bytes().split(b"\0"):
                mine.append(int(entry.name))
        except OSError:
            continue
    for pid in mine:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(30)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], run: Run) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None, (run.folder / "log.txt").read_text()[-4000:]
        assert time.monotonic() < deadline, (run.folder / "log.txt").read_text()[-4000:]
        time.sleep(0.01)


@pytest.mark.engine
def test_killed_preempted_and_without_room_it_ends_with_every_sample(
    disk: Path, tmp_path: Path, model: Any, expected: Any
) -> None:
    generator = random.Random(11)
    records = [{"input_ids": [generator.randrange(10, 1000) for _ in range(TOKENS)]} for _ in range(SAMPLES)]
    data = write_lines(tmp_path / "data.jsonl", records)
    fields = {
        "model": str(model("qwen3-tiny")), "data": str(data), "max_seq_len": TOKENS, "output": str(disk / "out"),
        "capture": "hooks", "engine": ENGINE,
    }  # fmt: skip
    first = make_run(tmp_path / "first", **fields)
    first = Run(folder=first.folder, output=disk / "out")
    with started(first) as process:
        wait_for(lambda: len(first.ledger()) >= 3, process, first)
    left = len(first.ledger())
    assert left < SAMPLES

    second = make_run(tmp_path / "second", stale="resume", **fields)
    second = Run(folder=second.folder, output=disk / "out")
    with started(second) as process:
        written = len(list(second.output.glob("hs_*")))
        wait_for(lambda: len(list(second.output.glob("hs_*"))) > written, process, second)
        filler = fill(disk, 0)
        until = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < until:
            fill(disk, 0)
            assert process.poll() is None, (second.folder / "log.txt").read_text()[-4000:]
            time.sleep(0.2)
        filler.unlink()
        assert process.wait(START_S) == 0, (second.folder / "log.txt").read_text()[-4000:]

    codes = Counter(event["code"] for event in second.events("notice"))
    assert codes["preempted"] == 1
    assert codes["disk-freed"] >= 1
    assert codes["disk-full"] + codes["disk-low"] == codes["disk-freed"]
    assert len([record for record in second.ledger("driver") if record.get("kept")]) >= 3
    assert fates(second) == Counter(dict.fromkeys(range(SAMPLES), 1))
    for index, ids in prompts(data).items():
        found = load_file(second.path(index))
        states, _ = expected("qwen3-tiny", ids)
        assert found["token_ids"].tolist() == ids
        for place, boundary in enumerate((2, 4, 5, 8)):
            assert relative_error(found["hidden_states"][:, place], states[boundary]) <= 1e-5
    assert bool(torch.isfinite(found["hidden_states"]).all())
    assert execute(second, "summarize").code == 0

"""A worker that raises or dies, in any phase, ends the run in seconds: on real engines, where vLLM would wait."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support import faults
from support.extraction import Run, execute

SOON_S = 45.0
"""From the fault to the end of the process. vLLM's own shutdown takes up to 15 s of it on a busy machine."""

ENGINE = {"enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
TWO = {**ENGINE, "tensor_parallel_size": 2}


def fail(start: Any, place: str, how: str, *, rank: int = 0, times: int = 1, ranks: int = 1, **fields: Any) -> Run:
    """Run a job with the fault, and check that it ended soon, says why, and left no process."""
    env = {
        "CTL_FAULT": f"{place} {how} {rank} {times}",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks > 1 else "nobind",
    }
    engine = TWO if ranks > 1 else ENGINE
    run: Run = start("qwen3-tiny", env=env, fault=faults.FAIL_AT, engine=engine, **fields)
    ended = time.time()
    assert run.code == 1, run.log[-4000:]
    seconds = ended - float((run.folder.parent / "fault" / "when").read_text())
    print(f"{place} {how}, rank {rank} of {ranks}: ended after {seconds:.1f} s")
    assert seconds < SOON_S
    assert _alive(run) == []
    if how == "raises":
        first = run.events("exception")[0]
        assert (first["rank"], first["exc_type"]) == (rank, "RuntimeError")
        assert first["traceback"].startswith("Traceback (most recent call last):\n")
        assert first["traceback"].endswith(f"RuntimeError: seeded fault: {place}\n")
    assert run.events("exception")[-1]["writer"] == "driver"
    failed = [record for record in run.ledger("driver") if "failed" in record]
    written = {record["index"] for record in run.ledger()}
    assert len(failed) + len(written) == 20
    words = f"rank {rank} raised RuntimeError: seeded fault: {place}" if how == "raises" else "gone"
    if (place, how) != ("load", "kills"):  # vLLM's own words: no pid is known yet
        assert {record["why"].partition(words)[1] for record in failed} <= {words}
    assert execute(run, "summarize").code == (0 if place == "drain" and len(written) == 20 else 1)
    return run


def _alive(run: Run) -> list[str]:
    """What still runs with the run's folder in its environment."""
    mark, found = f"CTL_RUN_DIR={run.folder}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(Path("/proc", name, "comm").read_text().strip())
        except OSError:
            continue
    return found


@pytest.mark.engine
def test_a_worker_that_raises_while_a_call_waits_ends_the_run(start: Any) -> None:
    """The core dies in the second step; the driver waits for the answer to a question, which nobody will give."""
    run = fail(start, "capture", "raises", times=2)
    document = json.loads((run.folder / "verify.json").read_text())
    assert document["samples"]["missing"] > 0
    assert [problem["code"] for problem in document["problems"]] == ["missing-samples"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "how", "times"),
    [
        ("load", "raises", 1), ("load", "kills", 1), ("probe", "raises", 1), ("probe", "kills", 1),
        ("canary", "raises", 3), ("canary", "kills", 3), ("judge", "raises", 1), ("capture", "kills", 2),
        ("write", "raises", 1), ("drain", "raises", 1), ("drain", "kills", 1),
    ],
)  # fmt: skip
def test_one_rank(start: Any, place: str, how: str, times: int) -> None:
    fail(start, place, how, times=times, canary=place in ("canary", "judge"))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "how", "rank", "times"),
    [
        ("load", "raises", 1, 1), ("load", "kills", 1, 1), ("forward", "raises", 1, 1), ("canary", "raises", 1, 3),
        ("judge", "raises", 1, 1), ("capture", "raises", 0, 2), ("capture", "raises", 1, 2),
        ("capture", "kills", 1, 2), ("capture", "kills-core", 0, 2), ("write", "raises", 1, 1),
        ("drain", "raises", 1, 1), ("drain", "kills-core", 1, 1),
    ],
)  # fmt: skip
def test_two_ranks(start: Any, place: str, how: str, rank: int, times: int) -> None:
    """Of the second rank's errors vLLM's core learns nothing, and the first may wait for it in a collective."""
    fields = {"capture": "hooks"} if place == "forward" else {}
    fail(start, place, how, rank=rank, times=times, ranks=2, canary=place in ("canary", "judge"), **fields)

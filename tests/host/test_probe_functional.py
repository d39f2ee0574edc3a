"""The trial of the ranks: with gloo for real, and with ranks that fail and hang."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.probing import quiet

from remote_payload.host.probe_functional import STDERR_KEPT, STEPS, probe_functional
from remote_payload.host.trial_gpus import job_gpus, why_not_tried


def test_two_ranks_compute_and_talk() -> None:
    found = probe_functional(quiet, sys.executable, [], 2, {}, 200.0)
    assert [rank["at"] for rank in found["ranks"]] == [None, None], found
    for rank in found["ranks"]:
        assert tuple(rank["steps"]) == STEPS
        assert rank["torch"]
        assert (rank["hung"], rank["error"]) == (False, None)


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    """A `python` that runs shell text for each rank; $RANK is its number."""

    def make(script: str) -> str:
        path = tmp_path / "python"
        text = f"""#!/bin/sh
RANK=$(echo "$CTL_EXERCISE" | sed 's/.*"rank": \\([0-9]*\\).*/\\1/')
{script}
"""
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    return make


def said(*steps: str, then: str = "") -> str:
    lines = [f'echo \'{{"step": "{step}"}}\'; echo \'{{"done": "{step}", "seconds": 1.5}}\'' for step in steps]
    return "; ".join([*lines, then] if then else lines)


def test_a_rank_that_hangs_in_the_exchange_is_killed_and_named(fake: Any, tmp_path: Path) -> None:
    hang = said(*STEPS[:4], then='echo "{\\"step\\": \\"all-reduce\\"}"; echo $$ > "$0.$RANK"; exec sleep 600')
    started = time.monotonic()
    found = probe_functional(quiet, fake(hang), ["GPU-a", "GPU-b"], 2, {}, 2.0)
    assert time.monotonic() - started < 30
    assert found["device"] == "cuda"
    assert [(rank["uuid"], rank["at"], rank["hung"]) for rank in found["ranks"]] == [
        ("GPU-a", "all-reduce", True), ("GPU-b", "all-reduce", True),
    ]  # fmt: skip
    assert found["ranks"][0]["steps"]["group"] == 1.5
    for number in (0, 1):
        pid = (tmp_path / f"python.{number}").read_text().strip()
        assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()


def test_one_ranks_error_ends_the_wait_of_the_others(fake: Any) -> None:
    script = (
        'if [ "$RANK" = 1 ]; then echo "{\\"step\\": \\"context\\"}"; '
        'echo "{\\"error\\": \\"RuntimeError: no kernel image\\"}"; echo why >&2; exit 1; fi; '
        'echo "{\\"step\\": \\"group\\"}"; exec sleep 600'
    )
    started = time.monotonic()
    first, second = probe_functional(quiet, fake(script), [], 2, {}, 100.0)["ranks"]
    assert time.monotonic() - started < 50
    assert (second["at"], second["error"], second["stderr"]) == ("context", "RuntimeError: no kernel image", "why")
    assert (first["at"], first["hung"]) == ("group", True)


def test_the_end_of_a_long_stderr_is_reported_and_the_rest_never_read(fake: Any) -> None:
    # 8 GB of which nothing is stored: read as a whole they would be.
    flood = "truncate -s 8G /proc/self/fd/2; exec 2>>/proc/self/fd/2; seq 5000 >&2; echo 'ä the end' >&2; exit 1"
    (failed,) = probe_functional(quiet, fake(flood), [], 1, {}, 60.0)["ranks"]
    assert len(failed["stderr"]) <= STDERR_KEPT
    assert failed["stderr"].endswith("5000\nä the end")


def test_a_rank_that_is_killed_or_dies_without_a_word(fake: Any) -> None:
    (killed,) = probe_functional(quiet, fake(said("import", then="kill -9 $$")), [], 1, {}, 60.0)["ranks"]
    assert (killed["at"], killed["error"]) == ("context", "killed by signal 9")
    (silent,) = probe_functional(quiet, fake("echo chatter; exit 3"), [], 1, {}, 60.0)["ranks"]
    assert (silent["at"], silent["error"]) == ("import", "exit code 3")


GPUS: list[dict[str, Any]] = [
    {"uuid": f"GPU-{number}", "index": number, "memory_used": 0, "mig": "Disabled"} for number in range(4)
]
FREE: dict[str, Any] = {"compute": [], "vllm": []}
TORCH = {"packages": {"torch": "2.10.0"}}


def test_the_jobs_own_gpus_in_the_order_of_its_environment() -> None:
    assert [gpu["index"] for gpu in job_gpus({"gpus": GPUS}, None, 2)] == [0, 1]
    assert [gpu["index"] for gpu in job_gpus({"gpus": GPUS}, "3, GPU-1", 2)] == [3, 1]
    assert job_gpus(None, None, 2) == []


@pytest.mark.parametrize(
    ("processes", "leases", "environment", "gpus", "says"),
    [
        (FREE, [], TORCH, GPUS[:2], None),
        (FREE, [], {"packages": {}}, GPUS[:2], "no torch"),
        (FREE, None, TORCH, GPUS[:2], "not known whether another run"),
        (None, [], TORCH, GPUS[:2], "not known whether somebody"),
        ({"compute": [{"pid": 7, "gpu_uuid": "GPU-1"}]}, [], TORCH, GPUS[:2], "process 7 computes"),
        ({"compute": [{"pid": 7, "gpu_uuid": "GPU-3"}]}, [], TORCH, GPUS[:2], None),
        (FREE, [{"resource": "GPU-0", "state": "held", "alive": "alive", "run_id": "r"}], TORCH, GPUS[:2], "run r"),
        (FREE, [{"resource": "GPU-0", "state": "held", "alive": "dead", "run_id": "r"}], TORCH, GPUS[:2], None),
        (FREE, [], TORCH, GPUS[:1], "2 ranks need more GPUs"),
        (FREE, [], TORCH, [GPUS[0], {**GPUS[1], "memory_used": 2 << 30}], "memory of GPU 1"),
        (FREE, [], TORCH, [GPUS[0], {**GPUS[1], "mig": "Enabled"}], "split by MIG"),
    ],
)
def test_only_free_gpus_are_touched(processes: Any, leases: Any, environment: Any, gpus: Any, says: Any) -> None:
    why = why_not_tried(True, 2, gpus, processes, None if leases is None else {"leases": leases}, environment)
    assert (why is None) if says is None else (says in str(why))

"""A lost engine ends the driver's wait in seconds, wherever it waits. Processes and signals are real, vLLM is not."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.extraction import REPOSITORY

from remote_payload.extract import watch
from remote_payload.extract.canary import Finding
from remote_payload.extract.canary_run import CanaryError
from remote_payload.extract.errors import ExceptionReporter
from remote_payload.extract.progress import LedgerTail
from remote_payload.extract.watch import EngineLostError, EngineWatch
from remote_payload.host.journal import EventWriter

GRACE_S = 0.3
SOON_S = 5.0
"""Far above the grace, far below what any test would wait for by itself."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.05)
    monkeypatch.setattr(watch, "GRACE_S", GRACE_S)
    monkeypatch.setattr(watch, "END_S", GRACE_S)


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def raises(tmp_path: Path) -> Callable[[], None]:
    """What a rank's worker does when it fails."""

    return lambda: fail_rank(tmp_path)


def fail_rank(folder: Path) -> None:
    events = EventWriter(str(folder), "rank-1", "20260102-030405-abcdef", "here")
    try:
        raise ValueError("the layer is wrong")
    except ValueError as error:
        ExceptionReporter(events, 1).report(error, "execute_model")


def watching(folder: Path) -> EngineWatch:
    return EngineWatch(str(folder), lambda error: None)


def watched(guard: EngineWatch, *steps: Callable[[], Any]) -> None:
    with guard:
        for step in steps:
            step()


def see_above() -> None:
    raise RuntimeError("see above")


# What vLLM's client blocks in: the next outputs, the answer to a call, the end of a process that does not end.
WAITS: dict[str, Callable[[], Any]] = {
    "outputs": lambda: queue.Queue[int]().get(),
    "a call": lambda: Future[int]().result(),
    "sleep": lambda: time.sleep(60),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_that_raises_ends_the_wait_with_its_words(
    tmp_path: Path, raises: Callable[[], None], wait: str
) -> None:
    started = time.monotonic()
    with pytest.raises(EngineLostError, match=r"rank 1 raised ValueError: the layer is wrong \(in execute_model\)"):
        watched(watching(tmp_path), raises, WAITS[wait])
    assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_process_ends_the_wait(tmp_path: Path, worker: subprocess.Popen[bytes], wait: str) -> None:
    started, guard = time.monotonic(), watching(tmp_path)
    with pytest.raises(EngineLostError, match=rf"the process of rank 0 \(pid {worker.pid}\) is gone"):
        watched(guard, lambda: guard.ranks([worker.pid]), worker.kill, WAITS[wait])
    assert time.monotonic() - started < SOON_S


def test_events_that_cannot_be_read_leave_the_processes_to_watch(
    tmp_path: Path,
    worker: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    guard = watching(tmp_path)

    def read(self: LedgerTail) -> Iterator[dict[str, Any]]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LedgerTail, "read", read)
    with pytest.raises(EngineLostError, match="the process of rank 0"):
        watched(guard, lambda: guard.ranks([worker.pid]), worker.kill, WAITS["sleep"])
    assert capsys.readouterr().err.count("Input/output error") == 1


def test_the_core_between_a_rank_and_the_driver_is_watched_too(tmp_path: Path) -> None:
    source = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()']); print(p.pid, flush=1)"
    core = subprocess.Popen(
        [sys.executable, "-c", f"{source}; p.wait()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert core.stdout is not None
    rank, guard = int(core.stdout.readline()), watching(tmp_path)
    with pytest.raises(EngineLostError, match=rf"the engine core \(pid {core.pid}\)"):
        watched(guard, lambda: guard.ranks([rank]), core.kill, WAITS["a call"])
    assert _alive(rank)  # nobody told the orphan
    guard.kill_left()
    core.wait()
    deadline = time.monotonic() + SOON_S
    while _alive(rank):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_not_below_the_driver_is_neither_watched_nor_killed(tmp_path: Path) -> None:
    started = subprocess.run(["sh", "-c", "sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, check=True, timeout=60)
    orphan, guard = int(started.stdout), watching(tmp_path)
    try:
        watched(guard, lambda: guard.ranks([orphan, os.getppid(), os.getpid()]), lambda: time.sleep(3 * GRACE_S))
        guard.kill_left()
        assert _alive(orphan)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_an_error_of_vllm_itself_is_kept_where_a_worker_says_why(tmp_path: Path, raises: Callable[[], None]) -> None:
    guard = watching(tmp_path)
    with pytest.raises(RuntimeError, match="see above"):
        watched(guard, raises, see_above)
    assert guard.found == "rank 1 raised ValueError: the layer is wrong (in execute_model)"


def test_an_error_of_vllm_after_a_death_says_who_died(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    guard = watching(tmp_path)
    with pytest.raises(EngineLostError, match="rank 0") as caught:
        watched(guard, lambda: guard.ranks([worker.pid]), worker.kill, worker.wait, see_above)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_canary_of_a_rank_that_raised_says_what_it_raised(tmp_path: Path, raises: Callable[[], None]) -> None:
    """vLLM answers with the first rank's tokens; rows that the second lacks would be taken for another fault."""
    guard = watching(tmp_path)
    with pytest.raises(EngineLostError, match="rank 1 raised ValueError: the layer is wrong"):
        watched(guard, raises, guard.check, lambda: pytest.fail("the canary goes on"))

    def judged() -> None:
        raise CanaryError([Finding(check="positions", what="prompt 2 has 0 rows")], "start")

    (tmp_path / "late").mkdir()
    with pytest.raises(EngineLostError, match="rank 1 raised"):
        watched(EngineWatch(str(tmp_path / "late"), lambda error: None), lambda: fail_rank(tmp_path / "late"), judged)
    with pytest.raises(CanaryError):
        watched(watching(tmp_path), judged)


def test_who_is_told_to_end_ends_though_the_engine_did_so_first(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    def told() -> None:
        while guard.found is None:
            time.sleep(0.01)
        raise KeyboardInterrupt

    guard = watching(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        watched(guard, lambda: guard.ranks([worker.pid]), worker.kill, told)


def test_a_sound_engine_is_left_alone(tmp_path: Path, raises: Callable[[], None]) -> None:
    raises()  # by an earlier process of the run
    before = signal.getsignal(watch.SIGNAL)
    with watching(tmp_path) as guard:
        guard.ranks([os.getpid()])  # an engine within this process
        time.sleep(3 * GRACE_S)
    assert guard.found is None
    assert signal.getsignal(watch.SIGNAL) == before


@pytest.mark.parametrize("then", ["", "    time.sleep(600)  # as on a disk that is dead\n"])
def test_a_driver_that_swallows_the_error_is_ended(tmp_path: Path, then: str) -> None:
    source = f"""
import contextlib, threading, time
from remote_payload.extract import watch
from remote_payload.host.journal import EventWriter
watch.LOOK_S, watch.GRACE_S, watch.LAST_S = 0.05, 0.1, 0.5
def give_up(error):
    print("recorded:", error, flush=True)
{then}with watch.EngineWatch({str(tmp_path)!r}, give_up):
    events = EventWriter({str(tmp_path)!r}, "rank-0", "20260102-030405-abcdef", "here")
    events.emit("exception", rank=0, exc_type="OSError", message="gone", traceback="", where="load_model")
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)
"""
    ended = subprocess.run(
        [sys.executable, "-c", source], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == "recorded: rank 0 raised OSError: gone (in load_model)\n"
    assert "its threads:" in ended.stderr
    assert "time.sleep" in ended.stderr or "in <module>" in ended.stderr


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False

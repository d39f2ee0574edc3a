"""Judgements on process identities, on a /proc of the test's own and on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from remote_payload.host.liveness import (
    Liveness,
    Readings,
    identity,
    judge,
    read_readings,
    read_stat,
    send_signal,
)
from remote_payload.host.protocol import ProcessIdentity

STAT = "{pid} ({comm}) {state} 7 42 42 0 -1 4194304 1 0 0 0 1 0 0 0 20 0 1 0 {ticks} 13320192 2454"

PROCESS = ProcessIdentity(machine="m", boot="b", pidns=1, pid=42, start_ticks=900)


def readings(
    tmp_path: Path, comm: str = "python", state: str = "S", ticks: int = 900, hidden: bool = False
) -> Readings:
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "stat").write_text(STAT.format(pid=42, comm=comm, state=state, ticks=ticks))
    return Readings(machine="m", boot="b", pidns=1, proc=str(tmp_path), exists=lambda pid: hidden)


@pytest.mark.parametrize("comm", ["python", "a) S 1 (b", "((", "x y z)", "naïve ☃"])
def test_stat_is_parsed_after_the_last_parenthesis(tmp_path: Path, comm: str) -> None:
    stat = read_stat(42, readings(tmp_path, comm=comm).proc)
    assert stat is not None
    assert (stat.comm, stat.state, stat.ppid, stat.start_ticks) == (comm, "S", 7, 900)


def test_the_same_process_is_alive(tmp_path: Path) -> None:
    verdict, evidence = judge(PROCESS, readings(tmp_path))
    assert verdict is Liveness.ALIVE
    assert "42 (python)" in evidence


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_zombie_is_dead(tmp_path: Path, state: str) -> None:
    assert judge(PROCESS, readings(tmp_path, state=state))[0] is Liveness.DEAD


def test_a_reused_pid_is_dead(tmp_path: Path) -> None:
    verdict, evidence = judge(PROCESS, readings(tmp_path, ticks=901, comm="bash"))
    assert verdict is Liveness.DEAD
    assert "later process (bash)" in evidence


def test_another_boot_of_this_machine_is_dead_even_with_equal_pid_and_ticks(tmp_path: Path) -> None:
    verdict, evidence = judge(PROCESS, readings(tmp_path)._replace(boot="other", pidns=2))
    assert verdict is Liveness.DEAD
    assert "rebooted" in evidence


@pytest.mark.parametrize("change", [{"machine": "other"}, {"pidns": 2}])
def test_what_is_not_visible_from_here_is_unknown(tmp_path: Path, change: dict[str, object]) -> None:
    assert judge(PROCESS, readings(tmp_path)._replace(**change))[0] is Liveness.UNKNOWN  # type: ignore[arg-type]


@pytest.mark.parametrize(("hidden", "verdict"), [(True, Liveness.UNKNOWN), (False, Liveness.DEAD)])
def test_a_pid_missing_from_proc_may_only_be_hidden(tmp_path: Path, hidden: bool, verdict: Liveness) -> None:
    here = readings(tmp_path, hidden=hidden)
    assert judge({**PROCESS, "pid": 43}, here)[0] is verdict


def test_a_real_process_from_birth_to_death() -> None:
    process = subprocess.Popen(["sleep", "60"])
    known = identity(process.pid)
    assert known["machine"] == read_readings().machine
    assert judge(known)[0] is Liveness.ALIVE
    assert not send_signal(process.pid, known["start_ticks"] + 1, signal.SIGKILL), "another process is not signalled"
    assert judge(known)[0] is Liveness.ALIVE
    assert send_signal(process.pid, known["start_ticks"], signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert judge(known)[0] is Liveness.DEAD, "a zombie"
    process.wait()
    assert judge(known)[0] is Liveness.DEAD
    assert not send_signal(process.pid, known["start_ticks"], signal.SIGKILL)


def test_identity_of_nobody_is_an_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ProcessLookupError):
        identity(process.pid)

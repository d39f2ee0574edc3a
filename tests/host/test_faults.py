"""What a host does to a run: a reboot, a clock set back, full disks, stopped and dead members."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun, wait_until

from remote_payload.host import watchdog
from remote_payload.host.framing import FrameReader
from remote_payload.host.layout import RunPaths
from remote_payload.host.leftovers import sweep_shm
from remote_payload.host.liveness import Stat, read_readings
from remote_payload.host.members import snapshot
from remote_payload.host.protocol import RunState
from remote_payload.host.ps import judge_run
from remote_payload.host.watchdog import Watchdog

RANKS = """
import json, os, sys, time
folder = os.environ['CTL_RUN_DIR'] + '/events/'
def rank(number):
    seq = 0
    while True:
        seq += 1
        with open(folder + 'rank-%d.jsonl' % number, 'a') as file:
            file.write(json.dumps({'seq': seq}) + chr(10))
        if number == 1:
            open('rank1', 'w').write(str(os.getpid()))
        # As in a collective: nobody goes on before the other has come as far.
        other = folder + 'rank-%d.jsonl' % (1 - number)
        while not os.path.exists(other) or open(other).read().count(chr(10)) < seq:
            time.sleep(0.01)
        time.sleep(0.05)
if os.fork() == 0:
    rank(1)
rank(0)
"""


def test_a_stopped_worker_is_named_by_rank_and_by_process(host: HostRun) -> None:
    plan = host.plan(host.python(RANKS), job={"limits": {"silence_timeout_s": 8.0, "stop_grace_s": 0.5}})
    paths = host.launch(plan)
    worker = int(host.wait_file("rank1"))
    wait_until(lambda: Path(paths.events, "rank-0.jsonl").exists(), "both ranks write")
    os.kill(worker, signal.SIGSTOP)
    result = host.result(paths)
    assert result["end_reason"] == "limit-exceeded"
    message = result["message"]
    assert "silence_timeout: no line of log and no event for" in message
    assert "rank-1 has been silent for" in message
    assert "rank-0 has been silent for" in message
    assert message.index("rank-1") < message.index("rank-0")  # the one that has been silent longest comes first
    assert f"process {worker} " in message
    assert "does not run: stopped by a signal" in message
    assert worker not in snapshot()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "boot_seconds", lambda: clock.now)
    return clock


def make_watchdog(folder: Path, find: Any = list, **limits: float) -> Watchdog:
    paths = RunPaths(str(folder))
    for name in (paths.events, paths.ledger, paths.log):
        os.makedirs(name, exist_ok=True)
    return Watchdog(paths, limits, 1000.0, find)  # type: ignore[arg-type]


def test_ages_of_ranks_are_told_and_what_waits_in_the_kernel(tmp_path: Path, clock: Clock) -> None:
    stuck = Stat(pid=77, comm="VLLM::Worker_TP3", state="D", ppid=1, start_ticks=5)
    dog = make_watchdog(tmp_path, lambda: [stuck], silence_timeout_s=60)
    (tmp_path / "events" / "rank-3.jsonl").write_text("{}\n")
    assert dog.check() is None
    clock.now += 40
    (tmp_path / "ledger" / "rank-0.jsonl").write_text("{}\n")
    assert dog.check() is None
    clock.now += 61
    assert dog.check() == (
        "silence_timeout: no line of log and no event for 61 s (limit 60 s); rank-3 has been silent for 101 s; "
        "rank-0 has been silent for 61 s; process 77 (VLLM::Worker_TP3) does not run: waits inside the kernel"
    )


def test_a_clock_set_back_or_forth_moves_no_limit(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = make_watchdog(tmp_path, silence_timeout_s=60, time_limit_s=600, load_timeout_s=300)
    for wall in (time.time() - 86_400 * 365, time.time() + 86_400 * 365):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        clock.now += 20
        assert dog.check() is None
    clock.now += 61
    assert str(dog.check()).startswith("silence_timeout: no line of log and no event for 101 s")


def test_our_own_events_are_no_sign_of_life(tmp_path: Path, clock: Clock) -> None:
    dog = make_watchdog(tmp_path, silence_timeout_s=60)
    clock.now += 61
    for writer in ("supervisor", "pump"):
        (tmp_path / "events" / f"{writer}.jsonl").write_text("{}\n")
    assert dog.check() is not None


WAITS = (
    "(EngineCore pid=17915) INFO 11-30 14:03:28 [shm_broadcast.py:871] No available shared memory broadcast block "
    "found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work.\n"
)


def test_an_engine_core_that_says_that_it_waits_is_silent(tmp_path: Path, clock: Clock) -> None:
    dog = make_watchdog(tmp_path, silence_timeout_s=90)
    log = tmp_path / "log" / "000001.log"
    log.write_text("INFO captured\n")
    assert dog.check() is None
    for _ in range(2):
        clock.now += 46
        with log.open("a") as stream:
            stream.write(WAITS)
        found = dog.check()
    assert str(found).startswith("silence_timeout: no line of log and no event for 92 s"), found
    with log.open("a") as stream:
        stream.write(WAITS + "INFO captured\n")
    assert dog.check() is None


def phase(name: str) -> str:
    return f'{{"wire":1,"type":"phase","name":"{name}","status":"started","text":""}}\n'


def test_how_many_samples_there_are_is_no_progress_of_the_load(tmp_path: Path, clock: Clock) -> None:
    dog = make_watchdog(tmp_path, load_timeout_s=300)
    driver = tmp_path / "events" / "driver.jsonl"
    told = '{"wire":1,"type":"progress","done":0,"total":200}\n'
    driver.write_text(phase("data") + told + phase("load"))
    clock.now += 301
    assert str(dog.check()).startswith("load_timeout: no sample was finished within 301 s (limit 300 s)")
    with driver.open("a") as stream:
        stream.write(phase("capture") + told)
    assert dog.check() is None


def test_a_clock_set_back_during_the_run_does_not_keep_its_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "psm_ours").touch()
    started = time.time() + 3600  # what the wall clock said before it was set back by an hour
    assert sweep_shm([], started, str(tmp_path)) == []
    assert os.listdir(tmp_path) == []


def test_other_peoples_shared_memory_is_named_and_left(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make another user's file")
    (tmp_path / "psm_theirs").touch()
    os.chown(tmp_path / "psm_theirs", 65534, 65534)
    (tmp_path / "document").touch()  # no name of a job's libraries: not worth a word
    [kept] = sweep_shm([], time.time() - 60, str(tmp_path))
    assert kept["path"].endswith("psm_theirs")
    assert kept["reason"] == "belongs to user nobody; left untouched"
    assert sorted(os.listdir(tmp_path)) == ["document", "psm_theirs"]


def test_another_boot_means_lost_whatever_pids_say(host: HostRun) -> None:
    paths = host.launch(host.plan(host.python("import time; time.sleep(60)")))
    host.job(paths)
    here = read_readings()
    assert judge_run(paths, here).state in (RunState.LAUNCHING, RunState.RUNNING)
    rebooted = judge_run(paths, here._replace(boot="another-boot"))
    assert rebooted.state is RunState.LOST
    assert "rebooted" in rebooted.evidence
    elsewhere = judge_run(paths, here._replace(machine="another-machine"))
    assert elsewhere.state is RunState.RUNNING
    assert "not to be judged from here" in elsewhere.evidence


def test_an_orphaned_job_that_ends_by_itself_is_lost_with_its_whole_log(host: HostRun) -> None:
    code = (
        "import os, time\nprint('before', flush=True)\nopen('up', 'w').write('1')\n"
        "while not os.path.exists('go'):\n    time.sleep(0.02)\nprint('the last words')"
    )
    plan = host.plan(host.python(code))
    paths = host.launch(plan)
    host.wait_file("up")
    host.kill_supervisor(paths)
    assert host.state(plan)["state"] == "orphaned"
    (host.folder / "go").touch()
    wait_until(lambda: host.state(plan)["state"] == "lost", "the orphan is seen to have ended")
    assert "no process of the job lives" in host.state(plan)["evidence"]
    code, stdout = host.call("tail", {"run_id": plan["run_id"], "cursor": {}, "documents": {}, "follow": True})
    frames = list(FrameReader().feed(stdout))
    assert (code, frames[-1][0]["state"]) == (0, "lost")
    assert host.log(paths) == b"before\nthe last words\n"
    # Its lease was never given back; the next run takes it because nothing of that run lives.
    assert host.run(host.plan(host.python("print(1)")))["end_reason"] == "succeeded"
    # And a stop of the lost run still cleans up; how it ended it cannot say.
    answer = host.ask("stop", {"run_id": plan["run_id"], "grace_s": 1, "force": False})
    assert (answer["state"], answer["end_reason"], answer["killed"]) == ("lost", None, [])


@pytest.fixture
def small_disk(host: HostRun) -> Iterator[Path]:
    """The host's workdir on a file system of 6 MiB, 1 of which is the run's reserve."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a small file system")
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(host.workdir)]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"mount: {mount.stderr}")
    yield host.workdir
    host.close()
    subprocess.run(["umount", "-l", str(host.workdir)], check=True)


def test_a_disk_too_full_for_the_log_stalls_the_job_and_loses_nothing(host: HostRun, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (3 << 20))
    code = "for number in range(40_000):\n    print('%07d ' % number + 'x' * 91)"
    paths = host.launch(host.plan(host.python(code)))
    wait_until(lambda: len(host.log(paths)) > 1_000_000, "the disk is full")
    time.sleep(2)  # pumps die and are started again
    assert not Path(paths.result).exists()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    result = host.result(paths)
    assert result["end_reason"] == "succeeded"
    assert host.log(paths) == b"".join(b"%07d " % number + b"x" * 91 + b"\n" for number in range(40_000))


def test_a_disk_too_full_for_the_run_folder_is_refused_before_anything_is_used(
    host: HostRun, small_disk: Path
) -> None:
    with open(small_disk / "ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, (6 << 20) - (700 << 10))  # less is left than a run reserves
    request, body = host.start_request(host.plan(host.python("open('started', 'w')")))
    _, stdout = host.call("start", request, body)
    assert b"No space left" in stdout
    assert not (host.folder / "started").exists()


def test_members_in_other_sessions_die_with_their_supervisors_word(host: HostRun) -> None:
    """SIGKILL of a worker or of the engine core ends the job, not the supervision."""
    code = (
        "import os, subprocess, sys, time\n"
        "core = subprocess.Popen(['sleep', '120'], start_new_session=True)\n"
        "open('core.new', 'w').write(str(core.pid)); os.rename('core.new', 'core')\n"
        "sys.exit(3 if core.wait() == -9 else 4)\n"
    )
    paths = host.launch(host.plan(host.python(code)))
    os.kill(int(host.wait_file("core")), signal.SIGKILL)
    result = host.result(paths)
    assert (result["end_reason"], result["exit_code"]) == ("job-failed", 3)
    assert result["gpus_clean"] is True

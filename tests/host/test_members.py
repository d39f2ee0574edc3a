"""Who is a member, and that ending the members ends nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostrun import wait_until

from remote_payload.host.children import Command, CommandFailed
from remote_payload.host.liveness import read_stat
from remote_payload.host.members import (
    FOLDER_ENV,
    HELPER_ENV,
    RUN_ENV,
    Tree,
    find_descendants,
    find_members,
    is_of_run,
    read_environ,
    recorded,
    stop_members,
)

RUN = "20260101-000000-cccccc"
FOLDER = f"/srv/ctl/runs/{RUN}"


class Zoo:
    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, code: str = "import time; time.sleep(120)", **environ: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], env={**os.environ, **environ}, stdout=subprocess.PIPE
        )
        self.processes.append(process)
        return process

    def find(self) -> list[int]:
        return [member.pid for member in find_members(FOLDER, set())]

    def reap(self) -> None:
        for process in self.processes:
            process.poll()


@pytest.fixture
def zoo() -> Iterator[Zoo]:
    zoo = Zoo()
    yield zoo
    for process in zoo.processes:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def test_members_are_found_by_environment_by_descent_and_by_record(zoo: Zoo, tmp_path: Path) -> None:
    spawn = """
import subprocess, time
subprocess.Popen(['sleep', '120'], env={})
print('up', flush=True)
time.sleep(120)
"""
    marked = zoo.start(spawn, CTL_RUN_ID=RUN)
    assert marked.stdout is not None
    marked.stdout.readline()
    bare = zoo.start()
    stranger = zoo.start(CTL_RUN_ID=RUN.replace("c", "d"))
    tree = Tree(str(tmp_path / "tree.jsonl"))
    stat = read_stat(bare.pid)
    assert stat is not None
    tree.note([stat])
    tree.note([stat])

    found = find_members(FOLDER, recorded(str(tmp_path / "tree.jsonl")))
    assert {marked.pid, bare.pid} < {member.pid for member in found}
    assert [member.comm for member in found if member.ppid == marked.pid] == ["sleep"]
    assert stranger.pid not in {member.pid for member in found}
    assert len((tmp_path / "tree.jsonl").read_text().splitlines()) == 1
    reused = {(bare.pid, stat.start_ticks - 1)}
    assert bare.pid not in {member.pid for member in find_members(FOLDER, reused)}
    assert stop_members(lambda: find_members(FOLDER, tree.known), 5.0, zoo.reap).leftovers == []


def test_helpers_are_no_members_though_they_descend_from_the_supervisor(zoo: Zoo) -> None:
    helper = zoo.start(CTL_HELPER=RUN)
    job = zoo.start()
    wait_until(lambda: HELPER_ENV in (read_environ(helper.pid) or {}), "the helper was executed")
    table = {pid: stat for pid in (helper.pid, job.pid) if (stat := read_stat(pid))}
    assert list(find_descendants([os.getpid()], table, RUN)) == [job.pid]


def test_stopping_ends_forking_members_and_leaves_strangers(zoo: Zoo) -> None:
    forks = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
while True:
    if os.fork() == 0:
        os.setsid()
        time.sleep(120)
        os._exit(0)
    time.sleep(0.02)
"""
    member = zoo.start(forks, CTL_RUN_ID=RUN)
    stranger = zoo.start()
    assert member.stdout is not None
    member.stdout.readline()
    report = stop_members(lambda: find_members(FOLDER, set()), 0.3, zoo.reap)
    assert report.leftovers == []
    assert zoo.find() == []
    assert {item["signal"] for item in report.killed} == {"SIGTERM", "SIGKILL"}
    assert member.wait(timeout=30) == -signal.SIGKILL
    assert stranger.poll() is None


def test_no_grace_means_kill_at_once(zoo: Zoo) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *a: sys.exit(0)); signal.pause()"
    member = zoo.start(code, CTL_RUN_ID=RUN)
    wait_until(lambda: zoo.find() == [member.pid], "the member is seen")
    report = stop_members(lambda: find_members(FOLDER, set()), 0.0, zoo.reap)
    assert [item["signal"] for item in report.killed] == ["SIGKILL"]
    assert member.wait(timeout=30) == -signal.SIGKILL


def test_what_cannot_be_killed_is_reported_with_its_reason() -> None:
    process = subprocess.Popen(["sleep", "60"])
    stat = read_stat(process.pid)
    assert stat is not None
    stuck = stat._replace(start_ticks=stat.start_ticks + 1, state="D")  # send_signal refuses: not that process
    report = stop_members(lambda: [stuck], 0.0, kill_wait_s=0.3)
    process.kill()
    process.wait()
    assert report.killed == []
    assert report.leftovers == [
        {"pid": stat.pid, "comm": "sleep", "reason": "unkillable: it waits inside the kernel (state D)"}
    ]


def test_a_run_of_another_workdir_with_the_same_id_is_left_alone(zoo: Zoo, tmp_path: Path) -> None:
    ours, theirs = (str(tmp_path / name / "runs" / RUN) for name in ("ours", "theirs"))
    member = zoo.start(**{RUN_ENV: RUN, FOLDER_ENV: ours})
    other = zoo.start(**{RUN_ENV: RUN, FOLDER_ENV: theirs})
    for folder, process in ((ours, member), (theirs, other)):
        wait_until(lambda f=folder, p=process: [m.pid for m in find_members(f, set())] == [p.pid], "its own is found")
    assert stop_members(lambda: find_members(ours, set()), 5.0, zoo.reap).leftovers == []
    assert member.wait(timeout=30) == -signal.SIGTERM
    assert other.poll() is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({RUN_ENV: RUN, FOLDER_ENV: "work/runs/RUN"}, True),
        ({RUN_ENV: RUN, FOLDER_ENV: "work/runs/RUN/rehearsal/run"}, True),
        ({RUN_ENV: RUN, FOLDER_ENV: "link/runs/RUN"}, True),
        ({RUN_ENV: RUN}, True),
        ({RUN_ENV: RUN, FOLDER_ENV: ""}, True),
        ({RUN_ENV: RUN, FOLDER_ENV: "other/runs/RUN"}, False),
        ({RUN_ENV: RUN, FOLDER_ENV: "work/runs/RUN2"}, False),
        ({RUN_ENV: RUN + "2", FOLDER_ENV: "work/runs/RUN"}, False),
        ({FOLDER_ENV: "work/runs/RUN"}, False),
    ],
)
def test_id_and_folder_say_whose_an_environment_is(tmp_path: Path, environ: dict[str, str], expected: bool) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to("work")
    if environ.get(FOLDER_ENV):
        environ = {**environ, FOLDER_ENV: str(tmp_path / environ[FOLDER_ENV].replace("RUN", RUN))}
    assert is_of_run(environ, str(tmp_path / "work" / "runs" / RUN)) is expected


def test_a_hung_command_is_left_behind_and_not_stacked(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = tmp_path / "slow"
    script.write_text(f"#!/bin/sh\necho x >> {count}\nexec sleep 30\n")
    script.chmod(0o755)
    command = Command()
    with pytest.raises(CommandFailed, match=r"no answer within 0\.5 s"):
        command.run([str(script)], 0.5)
    wait_until(lambda: not _hangs(command), "the killed command is gone")
    with pytest.raises(CommandFailed, match="cannot be run"):
        command.run([str(tmp_path / "absent")], 10.0)
    assert count.read_text() == "x\n"


def _hangs(command: Command) -> bool:
    try:
        return command.run(["echo", "ok"], 10.0) != "ok\n"
    except CommandFailed:
        return True


def test_a_failing_command_tells_its_stderr() -> None:
    with pytest.raises(CommandFailed, match="exited 3: driver mismatch"):
        Command().run(["sh", "-c", "echo driver mismatch >&2; exit 3"], 10.0)
    assert json.loads(Command().run(["echo", "[1]"], 10.0)) == [1]

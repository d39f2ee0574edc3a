"""The job's own cgroup, on a cgroup2 that the test mounts; and the ladder below it, as an ordinary user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostrun import HostRun, wait_until

from remote_payload.host.cgroup import Cgroup, make
from remote_payload.host.members import find_members, snapshot

NOBODY = 65534

HIDDEN = """
import os, signal, time
# No descent, no environment, no record: only the cgroup still knows it.
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execve(sys.executable, [sys.executable, '-S', '-c', SLEEPER], {})
"""
SLEEPER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open('hidden.new', 'w').write(str(os.getpid()))
os.rename('hidden.new', 'hidden')
time.sleep(300)
"""
JOB = f"""
import sys
SLEEPER = {SLEEPER!r}
{HIDDEN}
while not os.path.exists('hidden'):
    time.sleep(0.01)
time.sleep(300)
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A cgroup of our own on a freshly mounted cgroup2; everything in it is killed and removed at the end."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a cgroup2")
    point = tmp_path / "cgroup2"
    point.mkdir()
    done = subprocess.run(["mount", "-t", "cgroup2", "none", str(point)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this kernel or container mounts no cgroup2: {done.stderr.strip()}")
    group = point / f"ctl-test-{os.getpid()}"
    group.mkdir()
    yield group
    Cgroup(str(group)).kill()
    wait_until(lambda: Cgroup(str(group)).remove() is None, "the test's cgroup is removed")
    subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture
def user_host() -> Iterator[HostRun]:
    """A host in a folder that another user may enter (pytest's own are closed)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    host = HostRun(folder)
    for path in (folder, host.workdir):
        os.chown(path, NOBODY, NOBODY)
    yield host
    host.close()
    shutil.rmtree(folder)


def delegate(group: Path) -> None:
    for name in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
        os.chown(group / name, NOBODY, NOBODY)


def test_every_process_of_the_job_is_killed_by_its_delegated_cgroup(mounted: Path, user_host: HostRun) -> None:
    delegate(mounted)
    host = user_host
    host.become(NOBODY, cgroup=mounted)
    plan = host.plan(host.python(JOB), job={"cwd": str(host.folder)})
    paths = host.launch(plan)
    hidden = int(host.wait_file("hidden"))
    cgroup = host.read(paths.run)["cgroup"]
    assert Path(cgroup).parent.name == mounted.name
    assert hidden in Cgroup(cgroup).pids()
    assert host.read(paths.run)["supervisor"]["pid"] not in Cgroup(cgroup).pids()

    answer = host.ask("stop", {"run_id": plan["run_id"], "grace_s": 0.5, "force": False})
    assert (answer["state"], answer["end_reason"]) == ("finished", "stopped")
    assert hidden not in snapshot()  # its zombie waits for init
    assert not Path(cgroup).exists()


def test_the_cgroup_finds_the_job_after_the_supervisors_death(mounted: Path, user_host: HostRun) -> None:
    delegate(mounted)
    host = user_host
    host.become(NOBODY, cgroup=mounted)
    plan = host.plan(host.python(JOB), job={"cwd": str(host.folder)})
    paths = host.launch(plan)
    hidden = int(host.wait_file("hidden"))
    cgroup = host.read(paths.run)["cgroup"]
    host.kill_supervisor(paths)
    os.remove(paths.tree)  # not even a record
    assert hidden in [member.pid for member in find_members(paths.folder, set(), cgroup=cgroup)]
    assert host.state(plan)["state"] == "orphaned"
    answer = host.ask("stop", {"run_id": plan["run_id"], "grace_s": 0.5, "force": False})
    assert answer["end_reason"] == "stopped"
    assert hidden not in snapshot()  # its zombie waits for init
    assert not Path(cgroup).exists()


def test_a_cgroup_that_was_not_given_to_us_is_left_alone(mounted: Path, user_host: HostRun) -> None:
    """An ordinary user's session: the ladder (subreaper, journal, environment) stops the tree all the same."""
    host = user_host
    host.become(NOBODY, cgroup=mounted)
    code = "import subprocess, sys, time, os\n" + (
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "open('child.new', 'w').write(str(child.pid)); os.rename('child.new', 'child'); time.sleep(300)"
    )
    plan = host.plan(host.python(code), job={"cwd": str(host.folder)})
    paths = host.launch(plan)
    child = int(host.wait_file("child"))
    assert host.read(paths.run)["cgroup"] is None
    assert host.read(paths.run)["user"] == "nobody"
    answer = host.ask("stop", {"run_id": plan["run_id"], "grace_s": 0.5, "force": False})
    assert answer["end_reason"] == "stopped"
    assert child not in snapshot()


def test_kill_reaches_cgroups_that_the_job_made_below(mounted: Path) -> None:
    below = mounted / "ctl-x" / "below"
    below.mkdir(parents=True)
    sleeper = subprocess.Popen(["sleep", "300"])
    (below / "cgroup.procs").write_text(str(sleeper.pid))
    group = Cgroup(str(mounted / "ctl-x"))
    assert group.pids() == [sleeper.pid]
    assert group.remove() is not None
    group.kill()
    assert sleeper.wait(20) == -signal.SIGKILL
    assert group.remove() is None
    assert group.pids() == []


def test_oom_kills_are_read_where_memory_is_accounted(tmp_path: Path) -> None:
    group = Cgroup(str(tmp_path))
    assert group.oom_kills() is None
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert group.oom_kills() == 2


@pytest.mark.parametrize(
    ("own", "mountinfo"),
    [
        ("4:memory:/x\n", "30 1 0:26 / {folder} rw - cgroup2 cgroup2 rw\n"),  # version 1 only
        ("0::/\n", "30 1 0:26 / {folder} rw - cgroup cgroup rw,memory\n"),
        ("0::/../other\n", "30 1 0:26 / {folder} rw - cgroup2 cgroup2 rw\n"),  # outside our namespace
        ("0::/gone\n", "30 1 0:26 / {folder} rw - cgroup2 cgroup2 rw\n"),
    ],
)
def test_without_a_usable_cgroup2_there_is_none(tmp_path: Path, own: str, mountinfo: str) -> None:
    (tmp_path / "own").write_text(own)
    (tmp_path / "mountinfo").write_text(mountinfo.format(folder=tmp_path))
    assert make("20260101-000000-aaaaaa", str(tmp_path / "mountinfo"), str(tmp_path / "own")) is None


def test_empty_cgroups_of_lost_runs_are_swept_and_others_left(mounted: Path, user_host: HostRun) -> None:
    delegate(mounted)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f"ctl-20260101-000000-aaaaaa-{gone.pid}", f"ctl-20260101-000000-bbbbbb-{os.getpid()}", "theirs"):
        (mounted / name).mkdir()
        os.chown(mounted / name, NOBODY, NOBODY)
    host = user_host
    host.become(NOBODY, cgroup=mounted)
    paths = host.launch(host.plan(host.python("print(1)"), job={"cwd": str(host.folder)}))
    assert host.result(paths)["end_reason"] == "succeeded"
    left = {path.name for path in mounted.iterdir() if path.is_dir()}
    assert left == {f"ctl-20260101-000000-bbbbbb-{os.getpid()}", "theirs"}


def test_a_cgroup_that_was_removed_does_not_keep_a_step_from_starting(mounted: Path) -> None:
    group = Cgroup(str(mounted / "ctl-y"))
    (mounted / "ctl-y").mkdir()
    assert group.remove() is None
    before = Path("/proc/self/cgroup").read_text()
    (mounted / "cgroup.procs").write_text(str(os.getpid()))
    try:
        with group.entered():
            child = subprocess.Popen(["sleep", "60"])
        assert child.pid in [int(line) for line in (mounted / "cgroup.procs").read_text().split()]
        child.kill()
        child.wait()
    finally:
        own = next(line for line in before.splitlines() if line.startswith("0::"))[3:].strip("/")
        (mounted.parent / own / "cgroup.procs").write_text(str(os.getpid()))

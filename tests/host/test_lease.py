"""The lease as a file: holders, unclean ends, hostile folders."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_payload.host.errors import HostError
from remote_payload.host.lease import Claim, Lease, LeaseRefused, clear_record, lease_folder, list_leases, take
from remote_payload.host.liveness import identity, read_readings

FIRST, SECOND = "20260101-000000-aaaaaa", "20260101-000000-bbbbbb"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return lease_folder(str(tmp_path / "lease"))


def claim(run_id: str, pid: int | None = None) -> Claim:
    return Claim(run_id=run_id, name="test", workdir="/w", process=identity(pid or os.getpid()))


def dead_claim(run_id: str) -> Claim:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    made = claim(run_id, process.pid)
    process.wait()
    return made


def crash(lease: Lease) -> None:
    """Let go of the lock as the kernel does when the holder is killed."""
    for descriptor in lease.descriptors:
        os.close(descriptor)


def test_the_folder_and_files_are_for_every_user_whatever_the_umask(folder: str) -> None:
    old = os.umask(0o077)
    try:
        take(folder, ["host"], claim(FIRST), lambda: None).release(clean=True)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o1777
    assert stat.S_IMODE(os.stat(f"{folder}/host.lock").st_mode) == 0o666


def test_all_or_none_is_taken(folder: str) -> None:
    held = take(folder, ["b"], claim(FIRST), lambda: None)
    with pytest.raises(LeaseRefused) as refused:
        take(folder, ["c", "a", "b"], claim(SECOND), lambda: None)
    assert refused.value.end_reason == "lease-busy"
    assert f"held by run {FIRST} of user" in str(refused.value)
    assert f"pid {os.getpid()}" in str(refused.value)
    take(folder, ["a", "c"], claim(SECOND), lambda: None).release(clean=True)
    held.release(clean=True)
    take(folder, ["a", "b", "c"], claim(SECOND), lambda: None).release(clean=True)


def test_the_lock_is_held_as_long_as_an_heir_of_the_descriptor_lives(folder: str) -> None:
    lease = take(folder, ["host"], dead_claim(FIRST), lambda: None)
    heir = subprocess.Popen(["sleep", "60"], pass_fds=lease.descriptors)
    crash(lease)
    with pytest.raises(LeaseRefused, match="held by run"):
        take(folder, ["host"], claim(SECOND), lambda: None)
    heir.kill()
    heir.wait()
    take(folder, ["host"], claim(SECOND), lambda: None).release(clean=True)


def test_after_an_unclean_end_only_proof_gives_the_lease_away(folder: str) -> None:
    crash(take(folder, ["host"], dead_claim(FIRST), lambda: None))
    with pytest.raises(LeaseRefused) as refused:
        take(folder, ["host"], claim(SECOND), lambda: "GPU-1 uses 900 MiB")
    assert refused.value.end_reason == "lease-dirty"
    assert "GPU-1 uses 900 MiB" in str(refused.value)

    environ = {**os.environ, "CTL_RUN_ID": FIRST, "CTL_RUN_DIR": f"/w/runs/{FIRST}"}
    survivor = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env=environ)
    with pytest.raises(LeaseRefused, match=f"its processes live: {survivor.pid}"):
        take(folder, ["host"], claim(SECOND), lambda: None)
    with pytest.raises(LeaseRefused, match=f"its processes live: {survivor.pid}"):
        take(folder, ["host"], claim(FIRST)._replace(workdir="/elsewhere"), lambda: None)
    survivor.kill()
    survivor.wait()
    take(folder, ["host"], claim(SECOND), lambda: None).release(clean=True)


def test_a_holder_of_another_machine_is_never_proved_dead(folder: str) -> None:
    made = dead_claim(FIRST)
    crash(take(folder, ["host"], made._replace(process={**made.process, "machine": "m"}), lambda: None))
    with pytest.raises(LeaseRefused, match="belongs to machine m"):
        take(folder, ["host"], claim(SECOND), lambda: None)


def test_a_reboot_proves_everything_dead(folder: str) -> None:
    crash(take(folder, ["host"], claim(FIRST), lambda: None))
    here = read_readings()._replace(boot="next")
    take(folder, ["host"], claim(SECOND), lambda: None, here).release(clean=True)


def test_a_dirty_release_is_listed_until_it_is_cleared(folder: str) -> None:
    lease = take(folder, ["host"], dead_claim(FIRST), lambda: None)
    (path,) = lease.paths
    lease.release(clean=False)
    (row,) = list_leases(folder)
    assert (row["resource"], row["state"], row["run_id"], row["alive"]) == ("host", "dirty", FIRST, "dead")
    assert clear_record(path, SECOND, "/w", clean=True) is None
    assert clear_record(path, FIRST, "/elsewhere", clean=True) is None
    assert list_leases(folder), "the record of another run is left alone"
    assert clear_record(path, FIRST, "/w", clean=True) is None
    assert list_leases(folder) == []


def test_a_held_lease_cannot_be_cleared(folder: str) -> None:
    lease = take(folder, ["host"], claim(FIRST), lambda: None)
    assert "held by run" in str(clear_record(lease.paths[0], FIRST, "/w", clean=True))
    lease.release(clean=True)


def test_a_link_in_place_of_the_lock_is_not_followed(folder: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    Path(folder, "host.lock").symlink_to(victim)
    with pytest.raises(HostError, match="symbolic links"):
        take(folder, ["host"], claim(FIRST), lambda: None)
    assert victim.read_text() == "untouched"


def test_a_fifo_in_place_of_the_lock_is_refused(folder: str) -> None:
    os.mkfifo(f"{folder}/host.lock")
    with pytest.raises(HostError, match="not a regular file"):
        take(folder, ["host"], claim(FIRST), lambda: None)


def test_garbage_in_the_record_does_not_lock_anybody_out(folder: str) -> None:
    Path(folder, "host.lock").write_text("not a record")
    take(folder, ["host"], claim(FIRST), lambda: None).release(clean=True)


def test_a_folder_where_anybody_may_replace_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(HostError, match="sticky"):
        lease_folder(str(tmp_path / "open"))
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="not a folder"):
        lease_folder(str(tmp_path / "file"))
    with pytest.raises(HostError, match="cannot be used"):
        lease_folder(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("folder", ["/proc/lease", "/proc/sys"])
def test_a_folder_in_which_no_lock_can_be_made_is_named_with_the_key_that_chose_it(folder: str) -> None:
    for action in (lambda: lease_folder(folder), lambda: take(folder, ["host"], claim(FIRST), lambda: None)):
        with pytest.raises(HostError, match=f"the lease folder {folder} cannot be used") as caught:
            action()
        assert (caught.value.code, "`lease_dir`" in caught.value.fix) == ("lease-folder", True)
    assert lease_folder(folder, create=False) == folder  # to read who holds what needs no right to write


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_is_told_whose_processes_stand_in_the_way_and_then_takes_over() -> None:
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders are closed to other users
        Path(parent).chmod(0o755)
        folder = lease_folder(f"{parent}/lease")
        crash(take(folder, ["host"], dead_claim(FIRST), lambda: None))
        survivor = subprocess.Popen(["sleep", "60"])  # of root, later than the run: it could be a member
        refused = as_nobody(lambda: take(folder, ["host"], claim(SECOND), lambda: None))
        survivor.kill()
        survivor.wait()
        assert "processes of user root cannot be told apart from it: " in refused
        assert f"{survivor.pid} (sleep)" in refused

        take(folder, ["host"], claim(SECOND), lambda: None).release(clean=True)
        assert as_nobody(lambda: take(folder, ["host"], claim(FIRST), lambda: None)) == "taken"


def as_nobody(action: Callable[[], object]) -> str:
    """Run `action` as another user; return "taken" or its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            action()
            os.write(writer, b"taken")
        except (LeaseRefused, HostError, OSError) as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as file:
        return file.read().decode()

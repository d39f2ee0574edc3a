"""Memory, disks, environment, compilers and login: on this machine, and on file systems that fail."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from support import fuse
from support.probing import REPO, quiet

from remote_payload.host.envfile import read_env_file
from remote_payload.host.errors import HostError
from remote_payload.host.liveness import user_name
from remote_payload.host.mounts import mount_of, mount_points_within, read_mounts
from remote_payload.host.probe_disk import probe_disk, read_quota, try_folder
from remote_payload.host.probe_login import container, kills_user_processes, probe_login
from remote_payload.host.probe_machine import PACKAGES, probe_environment, probe_memory
from remote_payload.host.probe_toolchain import probe_caches, probe_toolchain


class TestMachine:
    def test_memory(self) -> None:
        found = probe_memory(quiet)
        assert 0 < found["available"] <= found["total"]
        assert found["shm"] is None or found["shm"]["free"] <= found["shm"]["total"]

    @pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")
    def test_shared_memory_left_behind(self) -> None:
        name = f"psm_ctltest{os.getpid()}"
        path = Path("/dev/shm") / name
        path.write_bytes(bytes(100))
        try:
            left = probe_memory(quiet)["shm"]["leftovers"]
        finally:
            path.unlink()
        assert left["count"] >= 1
        assert name in [example["name"] for example in left["examples"]] or left["count"] > 20

    def test_disk_of_the_nearest_folder(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        root.mkdir()
        found = probe_disk(quiet, str(tmp_path / "not" / "yet"), [str(root), str(root), str(tmp_path / "none")])
        work, there, none = found["paths"]
        assert (work["nearest"], work["exists"], work["writable"]) == (str(tmp_path), False, True)
        assert (there["writable"], none["writable"]) == (True, None)
        assert there["free"] > 0
        assert there["device"] == os.stat(root).st_dev
        assert isinstance(there["fs_type"], str)
        assert os.listdir(tmp_path) == ["root"]
        assert os.listdir(root) == []

    def test_a_root_that_cannot_be_written(self) -> None:
        record = probe_disk(quiet, "/proc/ctl", [])["paths"][0]
        assert record["writable"] is False
        assert record["error"]

    def test_mount_table(self, tmp_path: Path) -> None:
        table = tmp_path / "mountinfo"
        table.write_bytes(
            b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
            b"30 22 0:50 / /mnt/with\\040space rw master:2 propagate_from:1 - nfs4 host:/x\\134y rw\n"
            b"31 30 8:1 /sub /mnt/with\\040space/in rw - ext4 /dev/sda1 rw\n"
            b"garbage\n"
        )
        mounts = read_mounts(str(table))
        assert [mount.point for mount in mounts] == ["/", "/mnt/with space", "/mnt/with space/in"]
        assert mounts[1].source == "host:/x\\y"
        assert mount_points_within("/mnt/with space", mounts) == ["/mnt/with space", "/mnt/with space/in"]
        assert mount_points_within("/mnt/with", mounts) == []
        for path, point in {"/mnt/with spaces": "/", "/mnt/with space/f": "/mnt/with space"}.items():
            found = mount_of(path, mounts)
            assert found is not None
            assert found.point == point

    def test_environment_of_this_python(self) -> None:
        found = probe_environment(quiet, sys.executable)
        assert found["version"] == ".".join(map(str, sys.version_info[:3]))
        assert found["prefix"] == sys.prefix
        assert found["error"] is None
        assert found["packages"].keys() <= set(PACKAGES)
        assert (found["torch_cuda"], found["torch_hip"]) == (None, None)

    def test_pythons_that_are_missing_or_broken(self, tmp_path: Path) -> None:
        assert probe_environment(quiet, str(tmp_path / "none"))["present"] is False
        assert probe_environment(quiet, "no-such-python-anywhere")["present"] is False
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\necho chatter; echo 'No module named encodings' >&2; exit 1\n")
        assert probe_environment(quiet, str(broken))["error"] == "it is not an executable file"
        broken.chmod(0o755)
        assert probe_environment(quiet, str(broken))["error"] == "exit code 1: No module named encodings"
        foreign = tmp_path / "foreign"
        foreign.write_bytes(b"\x7fELF of another machine")
        foreign.chmod(0o755)
        assert "Exec format error" in probe_environment(quiet, str(foreign))["error"]

    def test_the_cuda_that_torch_is_built_for_is_read_not_imported(self, tmp_path: Path) -> None:
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('imported')\n")
        (package / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '12.8'\nhip = None\n")
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        assert probe_environment(quiet, str(python))["torch_cuda"] == "12.8"


class TestDiskTrial:
    def test_a_good_disk(self, tmp_path: Path) -> None:
        trial = try_folder(str(tmp_path))
        assert (trial["error"], trial["at"], trial["rename"], trial["lock"]) == (None, None, True, True)
        assert trial["sync_s"] >= 0
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("operation", "number", "at"),
        [
            (fuse.WRITE, errno.EDQUOT, "write"),
            (fuse.FSYNC, errno.EIO, "sync"),
            (fuse.FLUSH, errno.EDQUOT, "close"),
            (fuse.CREATE, errno.EROFS, "open"),
        ],
    )
    def test_where_a_file_system_fails_is_told(self, tmp_path: Path, operation: int, number: int, at: str) -> None:
        point = tmp_path / "mount"
        point.mkdir()
        try:
            with fuse.mounted(point, {operation: number}):
                trial = try_folder(str(point))
        except PermissionError as error:
            pytest.skip(f"no FUSE mount here: {error}")
        assert (trial["at"], trial["errno"]) == (at, errno.errorcode[number])
        assert trial["error"] == os.strerror(number)

    def test_a_quota_in_the_kernels_words(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """No quota can be set up without a file system made for it, so the call is answered in its place."""

        class Kernel:
            def syscall(self, number: Any, descriptor: Any, command: Any, owner: Any, answer: Any) -> int:
                quota = answer._obj
                if command.value & 0xFF:  # the group has none
                    return -1
                quota.hard_blocks, quota.bytes_used, quota.valid = 1000, 1000 * 1024 - 5, 0x3F
                quota.hard_inodes, quota.inodes_used = 50, 20
                return 0

        monkeypatch.setattr("ctypes.CDLL", lambda name, use_errno: Kernel())
        assert read_quota(str(tmp_path)) == {"limit": 1_024_000, "free": 5, "inodes_free": 30}

    def test_no_quota_here(self, tmp_path: Path) -> None:
        assert read_quota(str(tmp_path)) is None
        assert read_quota(str(tmp_path / "none")) is None


class TestToolchain:
    @pytest.fixture
    def environment(self, tmp_path: Path) -> Path:
        """A Python in a folder of its own, with ninja beside it that is in nobody's PATH."""
        folder = tmp_path / "venv" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
        (folder / "ninja").write_text("#!/bin/sh\n")
        (folder / "ninja").chmod(0o755)
        return folder

    def test_what_lies_beside_the_python_is_found_first(self, environment: Path) -> None:
        found = probe_toolchain(quiet, str(environment / "python"), {}, None)
        assert found["path"].split(":")[0] == str(environment)
        assert found["tools"]["ninja"] == str(environment / "ninja")
        assert found["python_h"] is os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
        assert found["env_file"] is None

    def test_the_jobs_own_path_counts_and_cuda_home_for_nvcc(self, environment: Path, tmp_path: Path) -> None:
        cuda = tmp_path / "cuda" / "bin"
        cuda.mkdir(parents=True)
        (cuda / "nvcc").write_text("#!/bin/sh\n")
        (cuda / "nvcc").chmod(0o755)
        env_file = tmp_path / "env"
        env_file.write_text(
            f"# of the host\nexport CUDA_HOME={cuda.parent}\nHF_HOME='/nowhere'\nHF_TOKEN=hf_secret\n"
        )
        found = probe_toolchain(quiet, str(environment / "python"), {"PATH": "/nowhere"}, str(env_file))
        assert found["tools"] == {
            "nvcc": str(cuda / "nvcc"), "ninja": str(environment / "ninja"), "cc": None, "c++": None,
        }  # fmt: skip
        assert found["env_file"] == {
            "path": str(env_file), "names": ["CUDA_HOME", "HF_HOME", "HF_TOKEN"], "error": None,
        }  # fmt: skip
        assert found["variables"]["HF_HOME"] == {"value": "/nowhere", "exists": False}
        assert "hf_secret" not in json.dumps(found)

    @pytest.mark.parametrize("text", ["A=1\nno value\n", "A='open\n", "1A=2\n"])
    def test_a_bad_environment_file_is_named_by_its_line_only(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "env"
        path.write_text(text.replace("no value", "s3cret value"))
        found = probe_toolchain(quiet, sys.executable, {}, str(path))
        assert found["env_file"]["error"].startswith("line ")
        assert "s3cret" not in json.dumps(found)
        with pytest.raises(HostError):
            read_env_file(str(path))
        with pytest.raises(HostError, match="No such file"):
            read_env_file(str(tmp_path / "none"))

    def test_stale_locks_and_half_written_caches(self, tmp_path: Path) -> None:
        lock = tmp_path / "ext" / "py312_cu128" / "kernels" / "lock"
        half = tmp_path / "vllm" / "torch_compile_cache" / "abc" / "rank_0_0" / "backbone"
        whole = half.parent / "eagle"
        partial = tmp_path / "triton" / "KEY" / "tmp.pid_4711_x"
        for folder in (lock.parent, half, whole, partial):
            folder.mkdir(parents=True)
        lock.touch()
        for folder in (half, whole):
            (folder / "computation_graph.py").write_text("pass")
        (whole / "vllm_compile_cache.py").write_text("{}")
        os.utime(lock, (1000, 1000))
        environ = {
            "HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"),
            "VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        }  # fmt: skip
        found = {item["kind"]: item for item in probe_caches(environ, 5000.0)["found"]}
        assert {kind: item["path"] for kind, item in found.items()} == {
            "lock": str(lock), "half": str(half), "partial": str(partial),
        }  # fmt: skip
        assert (found["lock"]["age_s"], found["lock"]["owner"]) == (4000.0, user_name(os.getuid()))
        (half / "vllm_compile_cache.py").touch()
        assert "half" in [item["kind"] for item in probe_caches(environ, 5000.0)["found"]]


class TestLogin:
    def test_this_login(self) -> None:
        found = probe_login(quiet)
        assert found["limits"]["open_files"]["soft"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert set(found) == {"limits", "linger", "kill_user_processes", "container", "pids_hidden", "iommu"}

    def test_logind_by_its_files_the_last_word_counts(self, tmp_path: Path) -> None:
        usr, etc = tmp_path / "usr", tmp_path / "etc"
        (etc / "logind.conf.d").mkdir(parents=True)
        usr.mkdir()
        assert kills_user_processes((str(usr), str(etc)), ask=False) is None
        (usr / "logind.conf").write_text("[Login]\n#KillUserProcesses=no\nKillUserProcesses=yes\n")
        assert kills_user_processes((str(usr), str(etc)), ask=False) is True
        (etc / "logind.conf.d" / "50-keep.conf").write_text("[Login]\nKillUserProcesses = no\n")
        assert kills_user_processes((str(usr), str(etc)), ask=False) is False

    def test_containers_and_what_they_hide(self, tmp_path: Path) -> None:
        root, proc = tmp_path / "root", tmp_path / "proc"
        (root / "run").mkdir(parents=True)
        (proc / "1").mkdir(parents=True)
        (proc / "1" / "cgroup").write_text("0::/init.scope\n")
        assert container(str(proc), str(root)) is None
        (proc / "1" / "cgroup").write_text("0::/system.slice/docker/0123\n")
        assert container(str(proc), str(root)) == "container"
        (root / "run" / ".containerenv").touch()
        assert container(str(proc), str(root)) == "podman"
        (root / ".dockerenv").touch()
        assert container(str(proc), str(root)) == "docker"

    def test_a_namespace_of_its_own_hides_the_others(self, tmp_path: Path) -> None:
        done = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c",
             "from remote_payload.host.probe_login import pids_hidden; print(pids_hidden())"],
            cwd=REPO, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"no namespaces here: {done.stderr}")
        assert done.stdout == "this is a PID namespace of its own (a container)\n"

"""The probe as a whole: what it reports, and that nothing on the host can hang it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fuse
from support.probing import MAIN, request, run_probe

from remote_payload.host import probe
from remote_payload.host.errors import ProtocolError
from remote_payload.host.framing import pack_frame
from remote_payload.host.layout import OWNER_MARKER


class TestWhole:
    def test_through_the_entry_point_of_an_isolated_python(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-S", "-I", "-B", str(MAIN), "probe"],
            input=pack_frame(request(tmp_path)), capture_output=True, check=False, timeout=90,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["wire"] == 1
        assert report["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert report["uid"] == os.getuid()
        assert set(report["sections"]) == {
            "gpus", "processes", "memory", "disk", "environment", "outputs", "lease", "login",
        }  # fmt: skip
        assert [name for name, result in report["sections"].items() if not result["ok"]] == []
        assert done.stderr == b""

    @pytest.mark.parametrize(
        "change", [{"deadline_s": None}, {"outputs": [{"path": "/x"}]}, {"workdir": 1}, {"deadline_s": 0.5}]
    )
    def test_a_malformed_request_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        with pytest.raises(ProtocolError):
            run_probe(request(tmp_path, **change))

    def test_lists_the_outputs_and_changes_nothing(self, tmp_path: Path) -> None:
        asked = request(tmp_path)
        output = Path(asked["outputs"][0]["path"])
        output.mkdir()
        (output / "stale").write_text("12345")
        before = sorted(tmp_path.rglob("*"))
        listing = run_probe(asked)["sections"]["outputs"]["data"]["outputs"][0]
        assert (listing["entries"], listing["bytes"], listing["foreign"]) == (1, 5, True)
        assert listing["stale"] == "fail"
        assert set(tmp_path.rglob("*")) - set(before) <= {tmp_path / "lease"}

    def test_a_hung_driver_costs_its_own_section_only(self, tmp_path: Path, fake_smi: Any) -> None:
        fake_smi("trap '' TERM INT HUP; echo $$ > \"$0.pid\"; sleep 600 & wait; sleep 600")
        started = time.monotonic()
        sections = run_probe(request(tmp_path, accelerator="cuda", deadline_s=4.0))["sections"]
        assert time.monotonic() - started < 30
        assert sections["gpus"]["ok"] is False
        assert "timed out after" in sections["gpus"]["error"]
        assert "nvidia-smi --query-gpu" in sections["gpus"]["error"]
        assert sections["processes"]["data"]["compute"] is None
        assert sections["outputs"]["ok"]
        pid = int((tmp_path / "bin" / "nvidia-smi.pid").read_text())
        assert not Path(f"/proc/{pid}").exists() or "Z (zombie)" in Path(f"/proc/{pid}/status").read_text()

    def test_a_lease_folder_that_cannot_be_used_is_told_and_no_error_of_the_probe(self, tmp_path: Path) -> None:
        section = run_probe(request(tmp_path, lease_dir="/proc/lease"))["sections"]["lease"]
        assert section["ok"]
        assert (section["data"]["error"]["code"], section["data"]["leases"]) == ("lease-folder", [])

    def test_reports_who_holds_the_lease(self, tmp_path: Path) -> None:
        lease = tmp_path / "lease"
        lease.mkdir(mode=0o700)
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = Path("/etc/machine-id")
        record = {
            "run_id": "20261129-120000-abcdef", "name": "n", "user": "alice", "uid": 1, "workdir": "/w", "since": "t",
            "state": "held",
            "process": {
                "machine": (machine.read_text().strip() if machine.exists() else "") or boot, "boot": boot,
                "pidns": os.stat("/proc/self/ns/pid").st_ino, "pid": os.getpid(), "start_ticks": int(stat[19]),
            },
        }  # fmt: skip
        (lease / "host.lock").write_text(json.dumps(record).ljust(4096))
        found = run_probe(request(tmp_path))["sections"]["lease"]["data"]["leases"]
        assert [(item["resource"], item["user"], item["alive"]) for item in found] == [("host", "alice", "alive")]


class TestDeadline:
    @pytest.fixture
    def dead(self, tmp_path: Path) -> Any:
        """A folder on a mount whose server has stopped answering, as that of a dead NFS server."""
        point = tmp_path / "data" / "out"
        point.mkdir(parents=True)
        mount = fuse.mounted(point, None)
        try:
            mount.__enter__()
        except OSError as error:
            pytest.skip(f"no FUSE mount here: {error}")
        yield point
        mount.__exit__(None, None, None)

    def test_a_dead_mount_costs_the_sections_that_touch_it(self, tmp_path: Path, dead: Path) -> None:
        outputs = [{"path": str(dead / "run"), "root": str(dead), "stale": "fail", "adopt": False}]
        started = time.monotonic()
        sections = run_probe(request(tmp_path, outputs=outputs, model=str(dead / "model"), deadline_s=6.0))[
            "sections"
        ]
        assert time.monotonic() - started < 40
        for name in ("outputs", "disk", "model"):
            assert "timed out after" in sections[name]["error"], name
            assert str(dead) in sections[name]["error"], name
        for name in ("gpus", "processes", "memory", "environment", "lease", "login"):
            assert sections[name]["ok"], sections[name]

    @pytest.fixture
    def memory(self) -> Iterator[Path]:
        """A folder on a disk of memory, where many files are made in a second."""
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no shared memory here")
        with tempfile.TemporaryDirectory(prefix="ctl-test-", dir="/dev/shm") as folder:
            yield Path(folder)

    def test_a_hanging_driver_a_dead_mount_and_a_full_folder_at_once(
        self, tmp_path: Path, dead: Path, fake_smi: Any, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = memory / "out"
        full.mkdir()
        for number in range(300_000):
            os.mknod(full / f"hs_{number}.safetensors")
        fake_smi("sleep 600")
        monkeypatch.setitem(probe.DEADLINES_S, "gpus", 3.0)
        monkeypatch.setitem(probe.DEADLINES_S, "model", 3.0)
        outputs = [{"path": str(full), "root": str(memory), "stale": "fail", "adopt": False}]
        asked = request(tmp_path, outputs=outputs, accelerator="cuda", model=str(dead), deadline_s=40.0)
        started = time.monotonic()
        sections = run_probe(asked)["sections"]
        assert time.monotonic() - started < 60
        (listing,) = sections["outputs"]["data"]["outputs"]
        assert (listing["entries"], listing["foreign"]) == (300_000, True)
        assert "nvidia-smi" in sections["gpus"]["error"]
        assert str(dead) in sections["model"]["error"]
        assert sections["health"]["data"] is None


@pytest.mark.skipif(not shutil.which("python3.9"), reason="needs Python 3.9")
def test_runs_under_the_oldest_python(tmp_path: Path) -> None:
    done = subprocess.run(
        ["python3.9", "-S", "-I", "-B", str(MAIN), "probe"],
        input=pack_frame(request(tmp_path)), capture_output=True, check=False, timeout=90,
        env={**os.environ, "PYENV_VERSION": "3.9.18"},
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["python"]["version"].startswith("3.9")
    assert report["sections"]["outputs"]["ok"]
    assert OWNER_MARKER not in os.listdir(tmp_path / "data")

"""The proof that a run's GPUs are free, and the sweep of its shared memory, on the test's own figures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fake_smi import UUIDS, FakeSmi

from remote_payload.host.children import CommandFailed
from remote_payload.host.gpus import HostMeter, list_gpus, select_gpus
from remote_payload.host.leftovers import (
    Baseline,
    busy_gpus,
    count_oom_kills,
    delete_shm,
    measure,
    prove_clean,
    sweep_shm,
)

OURS = 4_000_000
"""A pid that no process has here."""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    smi = FakeSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", smi.env["PATH"])
    return smi


def prove(baseline: Baseline | None, survivors: int = 0) -> tuple[bool | str, str]:
    return prove_clean(baseline, {OURS}, survivors, settle_s=0.2)


def test_memory_back_at_its_level_is_clean_and_above_it_is_not(smi: FakeSmi) -> None:
    before = measure([], list(UUIDS))
    smi.set_memory(60, 4)
    assert prove(before)[0] is True
    smi.set_memory(4, 900)
    clean, evidence = prove(before)
    assert clean is False
    assert f"{UUIDS[1]} uses 900 MiB, before the run it was 4 MiB" in evidence


def test_it_waits_for_the_driver_to_free_the_memory(smi: FakeSmi) -> None:
    before = measure([], list(UUIDS))
    smi.set_memory(4, 900)
    free = f"sleep 0.4; sed -i s/900/4/ {smi.file('memory')}"
    with subprocess.Popen(["sh", "-c", free]):
        assert prove_clean(before, set(), 0, settle_s=30.0)[0] is True


def test_processes_on_the_gpus_are_ours_or_unknown(smi: FakeSmi) -> None:
    before = measure([], list(UUIDS))
    smi.set_apps(f"{UUIDS[0]}, {OURS}, worker")
    assert prove(before) == (False, f"still on the GPUs: {OURS} (worker)")
    smi.set_apps(f"{UUIDS[0]}, {os.getpid()}, stranger")
    assert prove(before)[0] == "unknown"
    smi.set_apps("GPU-cccccccc-0000-0000-0000-000000000000, 5, elsewhere")
    assert prove(before)[0] is True


def test_survivors_are_never_clean_and_a_mute_driver_is_unknown(smi: FakeSmi) -> None:
    before = measure([], list(UUIDS))
    assert prove(before, survivors=1)[0] is False
    assert prove(measure([], []))[0] is True
    assert prove(measure([], []), survivors=1)[0] is False
    assert prove(None)[0] == "unknown"
    smi.set_memory("[N/A]", 4)
    assert prove(before)[0] == "unknown"
    smi.path.write_text("#!/bin/sh\necho 'No devices were found' >&2; exit 6\n")
    assert prove(before) == ("unknown", "nvidia-smi exited 6: No devices were found")
    assert measure([], list(UUIDS)).gpu_memory == dict.fromkeys(UUIDS)


def test_gpus_are_busy_with_processes_or_memory(smi: FakeSmi) -> None:
    assert busy_gpus(list(UUIDS), 1 << 30) is None
    smi.set_memory(4, 1025)
    assert busy_gpus(list(UUIDS), 1 << 30) == f"memory in use: {UUIDS[1]} 1025 MiB"
    assert busy_gpus([UUIDS[0]], 1 << 30) is None
    smi.set_apps(f"{UUIDS[0]}, 77, python, with a comma")
    assert busy_gpus([UUIDS[0]], 1 << 30) == "compute processes on them: 77 (python, with a comma)"


def test_gpus_are_chosen_by_count_index_or_uuid(smi: FakeSmi) -> None:
    gpus = list_gpus()
    assert [gpu.uuid for gpu in gpus] == list(UUIDS)
    assert gpus[0].name == "NVIDIA RTX PRO 6000"
    assert select_gpus(gpus, 1, None) == gpus[:1]
    assert select_gpus(gpus, 0, None) == gpus
    assert select_gpus(gpus, 2, "1") == gpus[1:]
    assert select_gpus(gpus, 2, f"1,{UUIDS[0][:12]}") == gpus[::-1]
    with pytest.raises(CommandFailed, match="needs 3 GPUs, nvidia-smi lists 2"):
        select_gpus(gpus, 3, None)
    with pytest.raises(CommandFailed, match="names '2'"):
        select_gpus(gpus, 2, "0,2")


def test_only_fresh_unused_library_segments_of_ours_are_swept(tmp_path: Path) -> None:
    since = time.time() - 5
    for name in ("psm_old", "psm_gone", "psm_open", "psm_mapped", "notes.txt", "nccl-abc"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    code = (
        "import mmap, sys; keep = open(sys.argv[1]); file = open(sys.argv[2], 'r+b')\n"
        "area = mmap.mmap(file.fileno(), 4096); file.close(); print('up', flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "psm_open"), str(tmp_path / "psm_mapped")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        user.stdout.readline()
        kept = sweep_shm(["psm_old"], since, str(tmp_path))
        assert {(Path(item["path"]).name, item["reason"]) for item in kept} == {
            ("psm_open", f"in use by process {user.pid}"),
            ("psm_mapped", f"in use by process {user.pid}"),
        }
        assert [item["ours"] for item in kept] == [False, False], "no process of the run lives: it is somebody else's"
        alive = sweep_shm(["psm_old"], since, str(tmp_path), survivors=[user.pid])
        assert [item["ours"] for item in alive] == [True, True]
        user.communicate()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "psm_mapped", "psm_old", "psm_open"]
    assert sweep_shm([], time.time(), str(tmp_path)) == []
    assert (tmp_path / "psm_old").exists(), "older than the run"
    assert sweep_shm([], since, str(tmp_path / "absent")) == []


def test_a_file_of_ours_that_cannot_be_deleted_is_ours_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "psm_kept"
    path.touch()

    def refuse(path: str) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "unlink", refuse)
    said = {"path": str(path), "reason": f"[Errno 1] Operation not permitted: '{path}'", "ours": True}
    assert sweep_shm([], 0, str(tmp_path)) == [said]
    assert delete_shm([str(path)], str(tmp_path)) == [said]


def test_the_host_is_measured(tmp_path: Path) -> None:
    reading = HostMeter().read()
    assert 0 < reading["memory_used"] < reading["memory_total"]
    assert count_oom_kills(str(tmp_path)) is None

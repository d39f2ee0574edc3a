"""The room on the output's file system, as samples carry it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host import gpus
from remote_payload.host.children import CommandFailed
from remote_payload.host.gpus import Sampler, disk_room


def test_a_folder_that_does_not_exist_yet_stands_for_the_one_above(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    for folder in (tmp_path, tmp_path / "not" / "there"):
        room = disk_room(str(folder))
        assert room["disk_total"] == status.f_blocks * status.f_frsize
        assert 0 < (room["disk_free"] or 0) <= (room["disk_total"] or 0)


def test_without_an_output_there_is_nothing_to_tell() -> None:
    assert disk_room(None) == {"disk_free": None, "disk_total": None}
    assert disk_room("") == {"disk_free": None, "disk_total": None}


def test_samples_carry_it(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    came = threading.Event()

    def emit(kind: str, **fields: Any) -> None:
        told.append({"type": kind, **fields})
        came.set()

    sampler = Sampler(emit, cuda=False, output=str(tmp_path / "later"))
    sampler.start()
    try:
        assert came.wait(timeout=60)
    finally:
        sampler.stop()
    assert told[0]["type"] == "sample"
    assert told[0]["disk_free"] > 0


def test_a_failing_nvidia_smi_is_told_once_and_so_is_its_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    five = threading.Event()
    answers = iter([[], CommandFailed("no answer"), CommandFailed("no answer"), [], []])

    def query() -> Any:
        answer = next(answers, [])
        if isinstance(answer, CommandFailed):
            raise answer
        return answer

    def emit(kind: str, **fields: Any) -> None:
        told.append(fields.get("code", kind))
        if told.count("sample") == 5:
            five.set()

    monkeypatch.setattr(gpus, "FAST_SAMPLE_S", 0.01)
    monkeypatch.setattr(gpus, "sample_gpus", query)
    sampler = Sampler(emit, cuda=True)
    sampler.start()
    try:
        assert five.wait(timeout=60)
    finally:
        sampler.stop()
    assert told[:7] == ["sample", "gpu-query-failed", "sample", "sample", "gpu-query-works", "sample", "sample"]

"""A data set of the workstation to the host: whole or absent, content addressed, told as it goes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from support.local_transport import LocalTransport

from controller.core.command import UploadSection
from controller.core.errors import ConfigError, RefusedError
from controller.core.model import Host
from controller.localdata import LocalData, local_data
from controller.localfiles import local_files
from controller.payload import load_payload
from controller.stages import data, push, uploads
from controller.stages.base import Context
from controller.stages.sending import Meter
from controller.transport.base import Process

BYTES = 5 << 20


@pytest.fixture
def told() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def ctx(tmp_path: Path, told: list[dict[str, Any]]) -> Context:
    """A host on this machine with the payload pushed."""
    host = Host(
        name="h", address="h", python=sys.executable, bootstrap_python=sys.executable, accelerator="cpu",
        workdir=str(tmp_path / "work"), output_roots=("out",),
    )  # fmt: skip

    def emit(event_type: str, /, **fields: object) -> None:
        told.append({"type": event_type, **fields})

    transport = LocalTransport()
    payload = load_payload()
    push.run(transport, host.record(), emit=emit, payload=payload)
    told.clear()
    return Context(transport=transport, host=host.record(), payload=payload.digest, emit=emit)


def make(folder: Path, path: str = "local:d.jsonl") -> LocalData:
    found = local_data(path, folder)
    assert found is not None
    return found


def test_a_file_arrives_and_is_not_sent_again(tmp_path: Path, ctx: Context, told: list[dict[str, Any]]) -> None:
    content = bytes(range(256)) * (BYTES // 256)
    (tmp_path / "d.jsonl").write_bytes(content)
    sent = make(tmp_path)
    path = Path(data.run(ctx, sent))
    assert path == tmp_path / "work" / "data" / sent.digest / "d.jsonl"
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o077 == 0
    texts = [event["text"] for event in told]
    assert [event["status"] for event in told] == ["started"] * (len(told) - 1) + ["done"]
    assert "d.jsonl: 40% of 5.0 MiB" in texts
    assert texts[-1] == "d.jsonl: 5.0 MiB sent"
    told.clear()
    assert data.run(ctx, make(tmp_path)) == str(path)
    assert told[-1]["text"] == "d.jsonl: already there"


def test_a_push_over_a_slow_line_is_told_by_the_clock_too(ctx: Context, told: list[dict[str, Any]]) -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 7.5, 9.0, 9.1])
    meter = Meter(ctx, "data", "d.jsonl", 1000, clock=lambda: next(times))
    for count in (40, 20, 10, 5, 900, 25):
        meter.add(count)
    assert [(event["done"], event["total"]) for event in told] == [(60, 1000), (75, 1000), (975, 1000)]
    assert told[0]["text"] == "d.jsonl: 6% of 1000 B"
    assert meter.sent == 1000


def test_a_folder_arrives_with_its_names(tmp_path: Path, ctx: Context) -> None:
    for name, text in (("state.json", "{}"), ("data-0.arrow", "x" * 3000), ("empty", ""), ("cache-1.arrow", "no")):
        (tmp_path / "prepared").mkdir(exist_ok=True)
        (tmp_path / "prepared" / name).write_text(text)
    (tmp_path / "prepared" / "deep").mkdir()
    (tmp_path / "prepared" / "deep" / "part").write_text("y")
    path = Path(data.run(ctx, make(tmp_path, "local:prepared")))
    found = {file.relative_to(path).as_posix(): file.read_text() for file in path.rglob("*") if file.is_file()}
    assert found == {"state.json": "{}", "data-0.arrow": "x" * 3000, "empty": "", "deep/part": "y"}


def test_the_plan_and_the_push_agree_where_it_lies(tmp_path: Path, ctx: Context) -> None:
    (tmp_path / "d.jsonl").write_text("{}")
    host = Host(name="h", address="h", python="/p", workdir=ctx.host["workdir"], output_roots=("out",), gpus=1)
    assert data.run(ctx, make(tmp_path)) == make(tmp_path).path_on(host)


def test_a_file_that_changes_meanwhile_is_refused_and_leaves_nothing(tmp_path: Path, ctx: Context) -> None:
    (tmp_path / "d.jsonl").write_text("a" * 100)
    found = make(tmp_path)
    (tmp_path / "d.jsonl").write_text("b" * 100)
    with pytest.raises(RefusedError) as caught:
        data.run(ctx, found)
    assert caught.value.code == "data-damaged"
    assert list((tmp_path / "work" / "data" / found.digest).iterdir()) == []


def test_names_that_lead_out_are_refused(tmp_path: Path, ctx: Context) -> None:
    (tmp_path / "d.jsonl").write_text("{}")
    entry = {"path": "../../evil", "size": 2, "sha256": "0" * 64}
    found = LocalData(path=tmp_path / "d.jsonl", files=(entry,), digest="0" * 64)
    with pytest.raises(RefusedError) as caught:
        data.run(ctx, found)
    assert caught.value.code == "data-damaged"


def test_what_is_not_there_is_an_error_before_connecting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the data set"):
        local_data("local:absent.jsonl", tmp_path)
    assert local_data("data/on-the-host.jsonl", tmp_path) is None


def test_what_a_killed_push_left_is_swept_after_a_day(tmp_path: Path, ctx: Context) -> None:
    def left(path: Path, days: float, *, inside: str = "") -> Path:
        file = path / inside if inside else path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("half")
        for each in (file, path):
            os.utime(each, (time.time() - days * 86400,) * 2)
        return path

    store, blobs = tmp_path / "work" / "data", tmp_path / "work" / "files" / "blobs" / "ab"
    old = [
        left(store / ("a" * 64) / ".incoming-old", 2, inside="d/x"),
        left(blobs / ("ab" * 32 + ".01234567"), 2),
    ]
    busy = left(store / ("a" * 64) / ".incoming-busy", 2, inside="d/x")
    (busy / "d" / "x").write_text("still being written")
    kept = [
        busy, left(store / ("a" * 64) / "d.jsonl", 2), left(store / ("b" * 64) / ".incoming-x", 0.5, inside="x"),
        left(blobs / ("ab" * 32), 2), left(blobs / ("ab" * 32 + ".76543210"), 0.5),
    ]  # fmt: skip
    (tmp_path / "d.jsonl").write_text("{}")
    data.run(ctx, make(tmp_path))
    uploads.run(ctx, local_files([UploadSection(path="d.jsonl")], tmp_path, "job.toml"))
    assert [path for path in old if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []


def test_two_answers_in_one_piece_are_two() -> None:
    """As they come from a loaded host that misses nothing, and so waits for nothing in between."""

    class Told:
        pieces: ClassVar[list[bytes]] = [b'{"missing": [', b']}\n{"path": "/x"}\n']

        def read(self, *, timeout: float) -> bytes:
            return self.pieces.pop(0)

    answers = data.Answers(cast("Process", Told()), "uploads")
    assert [answers.take(), answers.take()] == [{"missing": []}, {"path": "/x"}]

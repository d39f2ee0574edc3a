"""A host's disk that becomes full while data or uploads are received is told as that."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.disk import fill, small_disk

from controller.core.errors import RemoteFailed
from controller.core.model import Host
from controller.localdata import local_data
from controller.payload import load_payload
from controller.stages import data, push
from controller.stages.base import Context
from controller.transport.base import Transport
from remote_payload.host import uploads
from remote_payload.host.data import SPARE_BYTES
from remote_payload.host.errors import HostError

DATA_BYTES = 16 << 20


@pytest.mark.sshd
def test_a_disk_that_becomes_full_is_no_lost_connection(shared: Transport, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(bytes(range(256)) * (DATA_BYTES // 256))
    found = local_data("local:d.jsonl", tmp_path)
    assert found is not None
    with small_disk(tmp_path / "disk", SPARE_BYTES + 2 * DATA_BYTES) as disk:
        others = [lambda: fill(disk, 0)]

        def emit(event_type: str, /, **fields: Any) -> None:
            if "5%" in str(fields.get("text")) and others:
                others.pop()()

        host = Host(
            name="h", address="h", python=sys.executable, bootstrap_python=sys.executable, accelerator="cpu",
            workdir=str(disk / "work"), output_roots=("out",),
        )  # fmt: skip
        payload = load_payload()
        push.run(shared, host.record(), emit=emit, payload=payload)
        ctx = Context(transport=shared, host=host.record(), payload=payload.digest, emit=emit)
        with pytest.raises(RemoteFailed) as caught:
            data.run(ctx, found)
        assert caught.value.code == "data-disk-full"
        assert "No space left on device" in str(caught.value.why)
        store = disk / "work" / "data" / found.digest
        assert list(store.iterdir()) == []  # nothing half is left
        (disk / "filler").unlink()
        assert Path(data.run(ctx, found)).stat().st_size == DATA_BYTES


def test_a_disk_that_becomes_full_is_told_of_uploads_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(uploads, "store_file", full)
    file = {"path": "a", "size": 1, "sha256": hashlib.sha256(b"a").hexdigest(), "exec": False}
    with pytest.raises(HostError) as caught:
        uploads.receive({"workdir": str(tmp_path)}, json.dumps({"files": [file]}).encode(), io.BytesIO())
    assert caught.value.code == "upload-disk-full"

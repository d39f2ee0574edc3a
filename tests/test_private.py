"""What is ours on the workstation is for its owner alone, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.private import private, write_private
from controller.runfolder import Recorder, RunFolder
from controller.transport.knownhosts import append_line

RUN_ID = "20260101-000000-abcdef"


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, str]:
    paths = [root, *root.rglob("*")]
    return {path.name: oct(stat.S_IMODE(path.lstat().st_mode)) for path in paths}


def test_a_run_folder_and_all_in_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "ctl-runs", RUN_ID)
    folder.write_plan({"a": 1})
    folder.write_local(status="planned")
    Recorder(folder, "host", lambda _event: None)("notice", text="hello")
    folder.mirror.append("log/000001.log", 0, b"text")
    folder.mirror.append("events/rank-0.jsonl", 0, b"{}\n")
    folder.mirror.replace("result.json", b"{}")
    with folder.watching():
        found = modes(tmp_path / "ctl-runs")
    assert {name: mode for name, mode in found.items() if mode not in ("0o700", "0o600")} == {}
    assert found["ctl-runs"] == found[RUN_ID] == found["log"] == found["events"] == "0o700"
    assert found["000001.log"] == found["controller.jsonl"] == found["local.json"] == found[".watch.lock"] == "0o600"


def test_known_hosts_and_its_folder(tmp_path: Path) -> None:
    append_line(str(tmp_path / "dot-ssh" / "known_hosts"), "host ssh-ed25519 AAAA")
    assert modes(tmp_path / "dot-ssh") == {"dot-ssh": "0o700", "known_hosts": "0o600"}


def test_a_file_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    """A person who opens a log to their group has meant it."""
    path = tmp_path / "log"
    write_private(path, b"one\n")
    path.chmod(0o640)
    with open(path, "ab", opener=private) as stream:
        stream.write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    assert modes(path) == {"log": "0o640"}

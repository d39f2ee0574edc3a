"""The receiver of the payload, as a module and as the program that is sent as text."""

from __future__ import annotations

import ast
import errno
import hashlib
import io
import json
import os
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_payload.host import framing, receive
from remote_payload.host.framing import pack_frame

FILES = {"remote_payload/__init__.py": b"", "remote_payload/host/main.py": b"print('hello')\n"}
MANIFEST = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
DIGEST = framing.manifest_digest(MANIFEST)


@pytest.fixture(autouse=True)
def umask_of_a_program() -> Iterator[None]:
    """`receive` sets the umask of its process, which here is that of the tests."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def archive(files: dict[str, bytes] = FILES, change: Callable[[tarfile.TarFile], None] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        if change is not None:
            change(tar)
    return buffer.getvalue()


ANNOUNCED = pack_frame({"manifest": MANIFEST})


def pieces(data: bytes, size: int = 100) -> bytes:
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(pack_frame({"last": part is parts[-1]}, part) for part in parts)


def converse(workdir: Path, stdin: bytes = b"") -> list[dict[str, Any]]:
    out = io.BytesIO()
    receive.receive(str(workdir), DIGEST, io.BytesIO(ANNOUNCED + stdin), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def target(workdir: Path) -> Path:
    return workdir / "payload" / DIGEST


def leftovers(workdir: Path) -> list[str]:
    return [name for name in os.listdir(workdir / "payload") if name != DIGEST]


def test_a_payload_arrives_whole_and_private(tmp_path: Path) -> None:
    workdir = tmp_path / "a" / "b"
    answers = converse(workdir, pieces(archive()))
    assert answers == [{"have": False}, {"have": True, "path": str(target(workdir)), "files": 2}]
    for name, data in FILES.items():
        assert (target(workdir) / name).read_bytes() == data
    assert stat.S_IMODE(workdir.stat().st_mode) == 0o700
    for path in target(workdir).rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert leftovers(workdir) == []


def test_a_payload_that_is_there_is_not_asked_for(tmp_path: Path) -> None:
    converse(tmp_path / "w", pieces(archive()))
    assert converse(tmp_path / "w") == [{"have": True, "path": str(target(tmp_path / "w"))}]


@pytest.mark.parametrize("harm", ["change", "remove", "mark", "other mark"])
def test_a_payload_that_was_damaged_is_repaired_in_place(tmp_path: Path, harm: str) -> None:
    converse(tmp_path, pieces(archive()))
    place = target(tmp_path)
    inode = place.stat().st_ino
    victim = place / "remote_payload/host/main.py"
    if harm == "change":
        victim.write_text("tampered")
    elif harm == "remove":
        victim.unlink()
        victim.parent.rmdir()
    elif harm == "other mark":
        (place / ".complete").write_bytes(b"\xff not the list of this payload")
    else:
        (place / ".complete").unlink()
    assert converse(tmp_path, pieces(archive()))[-1]["have"] is True
    assert victim.read_bytes() == FILES["remote_payload/host/main.py"]
    assert place.stat().st_ino == inode  # a running job keeps its path
    assert receive.is_complete(str(place), DIGEST)
    assert leftovers(tmp_path) == []


def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[[tarfile.TarFile], None]:
    def change(tar: tarfile.TarFile) -> None:
        entry = tarfile.TarInfo(name)
        entry.type = kind
        entry.linkname = link
        tar.addfile(entry, io.BytesIO())

    return change


@pytest.mark.parametrize(
    "change",
    [
        add("/etc/evil"),
        add("../evil"),
        add("remote_payload/../../evil"),
        add("remote_payload/extra.py"),
        add("remote_payload/link.py", tarfile.SYMTYPE, "/etc/passwd"),
        add("remote_payload/host/main.py", tarfile.LNKTYPE, "/etc/passwd"),
        add("remote_payload/host/main.py", tarfile.SYMTYPE, "/etc/passwd"),
        add("remote_payload/fifo", tarfile.FIFOTYPE),
        add("remote_payload/dir", tarfile.DIRTYPE),
    ],
)
def test_what_does_not_belong_to_the_payload_is_refused(
    tmp_path: Path, change: Callable[[tarfile.TarFile], None]
) -> None:
    with pytest.raises(receive.ReceiveError) as failure:
        converse(tmp_path / "w", pieces(archive(change=change)))
    assert failure.value.record["code"] == "push-damaged"
    assert not target(tmp_path / "w").exists()
    assert leftovers(tmp_path / "w") == []
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "stream",
    [
        pieces(archive({**FILES, "remote_payload/__init__.py": b"other"})),
        pieces(archive({"remote_payload/__init__.py": b""})),
        pieces(archive()[:-40]),
        pieces(b"not an archive"),
        pieces(archive())[:-7],
        b"",
        b"\xff" * 64,
    ],
)
def test_a_payload_that_is_not_what_was_announced_is_refused(tmp_path: Path, stream: bytes) -> None:
    with pytest.raises(receive.ReceiveError) as failure:
        converse(tmp_path, stream)
    assert failure.value.record["code"] == "push-damaged"
    assert not target(tmp_path).exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "", "a\nb"])
def test_a_manifest_must_stay_below_the_folder(name: str) -> None:
    manifest = {name: "0" * 64}
    with pytest.raises(receive.ReceiveError, match="did not arrive"):
        receive.check_manifest(manifest, framing.manifest_digest(manifest))


@pytest.mark.parametrize("digest", ["", "..", "../../x", "A" * 64, DIGEST + "0"])
def test_what_is_no_hash_names_no_folder(tmp_path: Path, digest: str) -> None:
    with pytest.raises(receive.ReceiveError, match="did not arrive"):
        receive.receive(str(tmp_path / "w"), digest, io.BytesIO(), io.BytesIO())
    assert not (tmp_path / "w").exists()


def test_a_name_may_hold_what_else_ends_a_line(tmp_path: Path) -> None:
    files = {"form\x0cfeed\x85and\u2028more\r": b"x"}
    manifest = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    digest = framing.manifest_digest(manifest)
    receive.check_manifest(manifest, digest)
    staging, folder = tmp_path / "staging", tmp_path / digest
    staging.mkdir()
    receive.unpack(archive(files), str(staging), manifest)
    receive.install(str(staging), str(folder), manifest)
    assert receive.is_complete(str(folder), digest)
    (folder / next(iter(files))).write_bytes(b"y")
    assert not receive.is_complete(str(folder), digest)


def test_a_manifest_must_have_its_hash() -> None:
    receive.check_manifest(MANIFEST, DIGEST)
    with pytest.raises(receive.ReceiveError):
        receive.check_manifest(MANIFEST, "0" * 64)


def test_pushes_at_the_same_time_are_both_fine(tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []
    barrier = threading.Barrier(6)

    def push() -> None:
        barrier.wait(30)
        answers.append(converse(tmp_path, pieces(archive()))[-1])

    threads = [threading.Thread(target=push) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answer["path"] for answer in answers] == [str(target(tmp_path))] * 6
    assert receive.is_complete(str(target(tmp_path)), DIGEST)
    assert leftovers(tmp_path) == []


def test_a_work_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    workdir.mkdir()
    workdir.chmod(0o777)
    with pytest.raises(receive.ReceiveError) as failure:
        receive.prepare_workdir(str(workdir))
    assert failure.value.record["code"] == "workdir-unsafe"


def test_a_work_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(receive.ReceiveError) as failure:
        receive.prepare_workdir(str(tmp_path / "file" / "w"))
    assert failure.value.record["code"] == "workdir-unusable"


def test_a_full_disk_is_not_called_a_wrong_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(receive.os, "makedirs", full)
    with pytest.raises(OSError, match="No space left"):
        receive.prepare_workdir(str(tmp_path / "w"))


def test_a_tilde_is_the_home_of_the_user_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert receive.prepare_workdir("~/ctl") == str(tmp_path / "ctl" / "payload")


def test_old_staging_folders_are_swept_and_young_ones_left(tmp_path: Path) -> None:
    payloads = Path(receive.prepare_workdir(str(tmp_path)))
    old, young = payloads / ".incoming-old", payloads / ".incoming-young"
    for folder in (old, young):
        folder.mkdir()
    long_ago = time.time() - 2 * 86400
    os.utime(old, (long_ago, long_ago))
    receive.sweep(str(payloads))
    assert os.listdir(payloads) == [young.name]


def test_it_agrees_with_the_framing() -> None:
    """It cannot import framing.py, which arrives with it, so it has its own copy of two functions."""
    assert receive.manifest_digest(MANIFEST) == framing.manifest_digest(MANIFEST)
    stream = io.BytesIO(pack_frame({"a": "ü"}, b"body") + b"rest")
    assert receive.read_frame(stream) == ({"a": "ü"}, b"body")
    assert stream.read() == b"rest"
    assert (receive._MAX_HEADER, receive._MAX_BODY) == (framing.MAX_HEADER, framing.MAX_BODY)


@given(st.text(st.characters(exclude_categories=()), max_size=200))
def test_a_path_is_answered_as_json(path: str) -> None:
    """By hand, because the answer "it is there" does not wait for the json module."""
    line = receive.quoted(path)
    assert json.loads(line) == path
    assert line.isascii()


def test_what_is_there_is_answered_without_loading_more(tmp_path: Path) -> None:
    """Every verb waits for this answer; json, re and typing take longer to load than the files take to hash."""
    assert as_program(tmp_path, ANNOUNCED + pieces(archive())).returncode == 0
    source = (
        Path(receive.__file__)
        .read_text()
        .replace(
            "sys.exit(main())",
            "main(); print(sorted({'json', 're', 'typing', 'tarfile', 'shutil'} & set(sys.modules)))",
        )
    )
    words = [sys.executable, "-I", "-S", "-c", source, str(tmp_path), DIGEST]
    answer, loaded = subprocess.run(words, capture_output=True, timeout=60, check=True).stdout.splitlines()
    assert (json.loads(answer), loaded) == ({"have": True, "path": str(target(tmp_path))}, b"[]")


def as_program(workdir: Path, stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    source = Path(receive.__file__).read_text()
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", source, str(workdir), DIGEST],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_python_of_2016_can_read_the_word_about_its_age() -> None:
    source = Path(receive.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "__future__" not in modules  # its `annotations` are a syntax error before 3.7


def test_the_program_sent_as_text_receives(tmp_path: Path) -> None:
    done = as_program(tmp_path, ANNOUNCED + pieces(archive()))
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.splitlines()[-1])["path"] == str(target(tmp_path))


def test_the_program_reports_errors_as_json(tmp_path: Path) -> None:
    done = as_program(tmp_path, ANNOUNCED[:-3])
    assert done.returncode == 70
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["code"] == "push-damaged"
    assert all(error[key] for key in ("what", "why", "fix"))


@pytest.mark.parametrize(
    ("announced", "why"),
    [
        (struct.pack(">II", 5, 0) + b"{not}", "no JSON"),
        (struct.pack(">II", 4, 0) + b"\xff\xfe\xfd\xfc", "no JSON"),
        (struct.pack(">II", 2, 0) + b"[]", "not an object"),
        (pack_frame({"other": 1}), "no manifest"),
        (pack_frame({"manifest": ["a"]}), "no manifest"),
        (pack_frame({"manifest": {"a": 1}}), "no manifest"),
        (ANNOUNCED + struct.pack(">II", 3, 0) + b"???", "no JSON"),
    ],
)
def test_a_header_that_is_not_ours_is_a_damaged_push(tmp_path: Path, announced: bytes, why: str) -> None:
    done = as_program(tmp_path, announced)
    assert (done.returncode, done.stderr) == (70, b"")
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["code"] == "push-damaged"
    assert why in error["why"]


def test_a_push_that_ends_while_another_sweeps_disturbs_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: [".incoming-installed-since"])
    receive.sweep(str(tmp_path))

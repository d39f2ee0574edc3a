from __future__ import annotations

import base64
import os
import stat
import subprocess
from pathlib import Path

import pytest

from controller.core.errors import HostKeyError
from controller.transport.knownhosts import (
    Standing,
    append_line,
    entry_name,
    fingerprint,
    format_line,
    judge,
    known_types,
    read_known_hosts,
)
from tools.sshd import make_key

KEY = base64.b64encode(b"\0\0\0\x0bssh-ed25519" + b"k" * 36).decode()
OTHER = base64.b64encode(b"\0\0\0\x0bssh-ed25519" + b"o" * 36).decode()
BLOB = base64.b64decode(KEY)


def standing(tmp_path: Path, text: str, host: str = "gpu1", port: int = 22) -> Standing:
    path = tmp_path / "known_hosts"
    path.write_text(text)
    return judge(read_known_hosts([str(path)]), entry_name(host, port), host, BLOB)[0]


@pytest.mark.parametrize(
    ("text", "host", "port", "expected"),
    [
        ("", "gpu1", 22, Standing.UNKNOWN),
        (f"gpu1 ssh-ed25519 {KEY}", "gpu1", 22, Standing.KNOWN),
        (f"GPU1 ssh-ed25519 {KEY} comment", "gpu1", 22, Standing.KNOWN),
        (f"gpu2,gpu1,10.0.0.1 ssh-ed25519 {KEY}", "gpu1", 22, Standing.KNOWN),
        (f"gpu? ssh-ed25519 {KEY}", "gpu1", 22, Standing.KNOWN),
        (f"gpu*,!gpu1 ssh-ed25519 {KEY}", "gpu1", 22, Standing.UNKNOWN),
        (f"gpu1 ssh-ed25519 {OTHER}", "gpu1", 22, Standing.CHANGED),
        (f"gpu1 ssh-ed25519 {OTHER}\ngpu1 ssh-ed25519 {KEY}", "gpu1", 22, Standing.KNOWN),
        (f"[gpu1]:2222 ssh-ed25519 {KEY}", "gpu1", 2222, Standing.KNOWN),
        (f"[gpu1]:2222 ssh-ed25519 {KEY}", "gpu1", 2223, Standing.UNKNOWN),
        (f"[gpu1]:2222 ssh-ed25519 {OTHER}", "gpu1", 2222, Standing.CHANGED),
        # A line without a port vouches for any port of the host, yet says nothing against it.
        (f"gpu1 ssh-ed25519 {KEY}", "gpu1", 2222, Standing.KNOWN),
        (f"gpu1 ssh-ed25519 {OTHER}", "gpu1", 2222, Standing.UNKNOWN),
        (f"@revoked * ssh-ed25519 {KEY}\ngpu1 ssh-ed25519 {KEY}", "gpu1", 22, Standing.REVOKED),
        (f"gpu1 ssh-ed25519 {KEY}\n@revoked gpu1 ssh-ed25519 {KEY}", "gpu1", 2222, Standing.REVOKED),
        (f"@revoked gpu2 ssh-ed25519 {KEY}\ngpu1 ssh-ed25519 {KEY}", "gpu1", 22, Standing.KNOWN),
        (f"@cert-authority * ssh-ed25519 {KEY}", "gpu1", 22, Standing.UNKNOWN),
        (f"# comment\n\nnonsense\ngpu1 ssh-ed25519 !!!\n\t gpu1\tssh-ed25519 {KEY}", "gpu1", 22, Standing.KNOWN),
    ],
)
def test_judge(tmp_path: Path, text: str, host: str, port: int, expected: Standing) -> None:
    assert standing(tmp_path, text, host, port) is expected


def test_the_deciding_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"# one\ngpu1 ssh-ed25519 {OTHER}\n")
    _, line = judge(read_known_hosts([str(path)]), "gpu1", "gpu1", BLOB)
    assert line is not None
    assert line.where == f"{path}:2"


def test_bytes_that_are_no_text_do_not_hide_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_bytes(b"\xff\xfe\0 junk\n" + f"gpu1 ssh-ed25519 {KEY}\n".encode())
    assert judge(read_known_hosts([str(path)]), "gpu1", "gpu1", BLOB)[0] is Standing.KNOWN


def test_names_hashed_by_openssh_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"[gpu1]:2222 ssh-ed25519 {make_key(tmp_path / 'key').split()[1]}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(path)], check=True, timeout=30, capture_output=True)
    assert "gpu1" not in path.read_text()
    (key,) = read_known_hosts([str(path)])
    assert key.matches("[gpu1]:2222")
    assert not key.matches("gpu1")


def test_openssh_understands_names_hashed_here(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    append_line(str(path), format_line("[gpu1]:2222", "ssh-ed25519", BLOB, hashed=True))
    found = subprocess.run(
        ["ssh-keygen", "-F", "[gpu1]:2222", "-f", str(path)], timeout=30, capture_output=True, check=False
    )
    assert b"found" in found.stdout
    assert "gpu1" not in path.read_text()


def test_the_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    line = make_key(tmp_path / "key")
    listed = subprocess.run(
        ["ssh-keygen", "-lf", str(tmp_path / "key.pub")], timeout=30, capture_output=True, check=True
    )
    assert fingerprint(base64.b64decode(line.split()[1])) in listed.stdout.decode()


def test_appending_creates_private_files_and_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "ssh" / "known_hosts"
    append_line(str(path), "first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_text("@cert-authority * odd\nunfinished")
    append_line(str(path), "second")
    assert path.read_text() == "@cert-authority * odd\nunfinished\nsecond\n"


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HostKeyError) as failure:
        append_line(str(tmp_path), "line")  # a folder
    assert failure.value.code == "known-hosts-unwritable"
    assert "line" in failure.value.fix


def test_a_file_that_cannot_be_read_is_reported_and_an_absent_one_is_not(tmp_path: Path) -> None:
    assert read_known_hosts([str(tmp_path / "absent"), os.devnull]) == []
    with pytest.raises(HostKeyError) as failure:
        read_known_hosts([str(tmp_path)])
    assert failure.value.code == "known-hosts-unreadable"


def test_known_types_are_those_of_the_host(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"gpu1 ssh-rsa {KEY}\ngpu1 ssh-ed25519 {KEY}\ngpu2 ecdsa-sha2-nistp256 {KEY}\n")
    assert known_types(read_known_hosts([str(path)]), "gpu1", "gpu1") == ["ssh-rsa", "ssh-ed25519"]

"""Ordinary accounts of this machine, made for one test and removed after it. Needs root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.sshd import SshServer

_TIMEOUT_S = 60


@dataclass(frozen=True)
class Account:
    name: str
    uid: int
    home: Path

    def let_in(self, public_key: Path) -> None:
        """Let the owner of a key log in; sshd reads the file as this user."""
        folder = self.home / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "authorized_keys").write_bytes(public_key.read_bytes())
        for path in (folder, folder / "authorized_keys"):
            os.chown(path, self.uid, -1)


AUTHORIZED_KEYS = "AuthorizedKeysFile .ssh/authorized_keys"
"""For sshd_config: where `let_in` puts the key."""


@contextmanager
def temporary_account(*, shell: str = "/bin/sh", password: str | None = None) -> Iterator[Account]:
    """Make a user without sudo and with a home of its own; end its processes and remove both afterwards.

    Skips the test where that needs a root that we are not.
    """
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("making an account needs root and useradd")
    name = f"ctl-t-{os.getpid()}-{time.monotonic_ns() % 10**8}"
    command = ["useradd", "--create-home", "--shell", shell, name]
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
    entry = pwd.getpwnam(name)
    try:
        # "*" is no password that matches, but unlike "!" the account is not locked for sshd.
        if password is None:
            subprocess.run(["usermod", "-p", "*", name], check=True, timeout=_TIMEOUT_S)
        else:
            subprocess.run(["chpasswd"], input=f"{name}:{password}".encode(), check=True, timeout=_TIMEOUT_S)
        yield Account(name=name, uid=entry.pw_uid, home=Path(entry.pw_dir))
    finally:
        _end_processes(entry.pw_uid)
        subprocess.run(["userdel", name], check=True, capture_output=True, timeout=_TIMEOUT_S)
        shutil.rmtree(entry.pw_dir)


@contextmanager
def account_on(
    start_server: Callable[..., SshServer], *, shell: str = "/bin/sh", extra: tuple[str, ...] = ()
) -> Iterator[tuple[SshServer, Account]]:
    """Make an account on an sshd of its own; `extra` are lines of its configuration."""
    with temporary_account(shell=shell) as account:
        # SHLVL as a real sshd leaves it, so that bash reads ~/.bashrc.
        server = start_server(account.name, user=account.name, extra=[*extra, AUTHORIZED_KEYS, "SetEnv CTL_TEST=1"])
        account.let_in(server.user_key.with_suffix(".pub"))
        yield server, account


@contextmanager
def temporary_folder(account: Account) -> Iterator[Path]:
    """Make a folder of the account's own outside its home."""
    folder = Path(f"/var/tmp/{account.name}")
    folder.mkdir(mode=0o700)
    os.chown(folder, account.uid, -1)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _end_processes(uid: int) -> None:
    """End what runs as this user, which exists for the test alone."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = False
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    if os.stat(entry.path).st_uid == uid and not _is_zombie(entry.name):
                        found = True
                        os.kill(int(entry.name), signal.SIGKILL)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it ended by itself
        if not found:
            return
        time.sleep(0.05)


def _is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

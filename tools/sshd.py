"""A real OpenSSH server on loopback, with its own keys and configuration in a folder of its own.

Needs no pytest: `with SshServer(folder) as server: ...`. Raises SshdUnavailable where there is no sshd.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0


class SshdUnavailable(Exception):
    """There is no OpenSSH server, client or user for privilege separation on this machine."""


def find_sshd() -> str:
    """Return the path of sshd, which insists on an absolute one."""
    path = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if path is None or shutil.which("ssh-keygen") is None:
        raise SshdUnavailable("no OpenSSH server (sshd, ssh-keygen) is installed")
    return path


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_key(path: Path, key_type: str = "ed25519", passphrase: str = "") -> str:
    """Create a key pair and return the public line."""
    command = ["ssh-keygen", "-q", "-t", key_type, "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
    return path.with_name(f"{path.name}.pub").read_text().strip()


class SshServer:
    """Files in `folder`: host_key, user_key, authorized_keys, known_hosts, ssh_config, sshd_config, sshd.log.

    `ssh_config` has a host `alias` with port, user, key and known_hosts file, for `ssh -F`. `extra` are further
    lines of sshd_config, in place of ours; `environment` is added to sshd's own; `user` is the account in
    `ssh_config`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        alias: str = "testhost",
        extra: Sequence[str] = (),
        host_key_types: Sequence[str] = ("ed25519",),
        environment: dict[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        self.folder = folder
        self.alias = alias
        self.user = user or getpass.getuser()
        self.address = "127.0.0.1"
        self.port = free_port()
        self.user_key = folder / "user_key"
        self.authorized_keys = folder / "authorized_keys"
        self.known_hosts = folder / "known_hosts"
        self.ssh_config = folder / "ssh_config"
        self.log = folder / "sshd.log"
        self.host_keys = [folder / f"host_key_{key_type}" for key_type in host_key_types]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._sshd = find_sshd()
        folder.mkdir(parents=True, exist_ok=True)
        for path, key_type in zip(self.host_keys, host_key_types, strict=True):
            make_key(path, key_type)
        self.authorized_keys.write_text(make_key(self.user_key) + "\n")
        self.trust(self.known_hosts)
        self.ssh_config.write_text(self.config_block())
        self._config = folder / "sshd_config"
        # For most options the first line counts, for MaxStartups the last.
        given = {line.split()[0] for line in extra}
        own = [line for line in self._config_lines() if line.split()[0] not in given]
        self._config.write_text("\n".join([*extra, *own, ""]))

    def host_key_line(self, index: int = 0) -> str:
        """Return `TYPE BASE64` of a host key."""
        return " ".join(self.host_keys[index].with_name(f"{self.host_keys[index].name}.pub").read_text().split()[:2])

    def trust(self, known_hosts: Path, *, port: int | None = None) -> None:
        """Append the host's keys to a known_hosts file, for its own port or that of a proxy before it."""
        with known_hosts.open("a") as stream:
            for index in range(len(self.host_keys)):
                stream.write(f"[{self.address}]:{port or self.port} {self.host_key_line(index)}\n")

    def config_block(self, *, alias: str | None = None, port: int | None = None, extra: Sequence[str] = ()) -> str:
        """Return a Host block for this server, as `ssh_config` has it."""
        lines = [
            f"Host {alias or self.alias}",
            f"HostName {self.address}",
            f"Port {port or self.port}",
            f"User {self.user}",
            f"IdentityFile {self.user_key}",
            "IdentitiesOnly yes",
            "IdentityAgent none",
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile none",
            *extra,
        ]
        return "\n    ".join(lines) + "\n"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start sshd and wait until it listens. Raises SshdUnavailable with its log if it does not."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it separates privileges
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._sshd, "-D", "-e", "-f", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
            )
        end = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise SshdUnavailable(f"sshd ended at once: {self.log.read_text()[-500:]}")
            with socket.socket() as probe:
                if probe.connect_ex((self.address, self.port)) == 0:
                    return
            time.sleep(0.02)
        self.stop()
        raise SshdUnavailable(f"sshd does not listen: {self.log.read_text()[-500:]}")

    def stop(self) -> None:
        """Stop the listener and the connections that it forked."""
        process, self._process = self._process, None
        if process is None:
            return
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        connections = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        process.terminate()
        for pid in connections:
            try:
                os.kill(pid, 15)
            except ProcessLookupError:
                continue  # it ended in between
        process.wait(_STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _config_lines(self) -> list[str]:
        return [
            f"ListenAddress {self.address}",
            f"Port {self.port}",
            *(f"HostKey {path}" for path in self.host_keys),
            f"AuthorizedKeysFile {self.authorized_keys}",
            f"PidFile {self.folder / 'sshd.pid'}",
            "StrictModes no",  # the folder may lie below a world-writable one
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "PrintMotd no",
            "MaxStartups 50",
            "LogLevel VERBOSE",
            # bash reads ~/.bashrc for sshd's commands unless it believes to be a nested shell: the account that
            # runs the tests may print things there, or take 100 ms.
            "SetEnv SHLVL=2",
        ]

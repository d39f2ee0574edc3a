"""The connection that OpenSSH shares between commands: one control master for a target and its configuration.

The master stays for PERSIST_S after its last command, so that the next `ctl` needs no second authentication.
Its socket lies in a folder of ours (0700) under a hash: ssh allows about a hundred bytes for the whole path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from controller.core.errors import ConfigError, ConnectionFailed
from controller.transport.deadline import Deadline
from controller.transport.pipes import NO_MASTER
from controller.transport.sshconfig import SshSettings, target_arguments

PERSIST_S = 60

CONTROL_TIMEOUT_S = 5.0
"""For a question to the master over its socket: a living one answers at once."""

INTERACTIVE_TIMEOUT_S = 300.0
"""For a person to find the phone with the code; sshd itself allows 120 s (LoginGraceTime) for each attempt."""

MAX_SOCKET_BYTES = 103
"""sun_path of macOS holds 104 bytes with its NUL, Linux 108."""

_TEMPORARY_SUFFIX_BYTES = 17  # ssh binds PATH.RANDOM first and renames it

_LOCK_POLL_S = 0.1

# Strict for every hop: an unknown key is introduced by `hostkeys`, in the one way that both transports share.
# UpdateHostKeys rewrites known_hosts, which is only ever appended to.
_FIXED_OPTIONS = {
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "Tunnel": "no",
}


# A jump runs on its own connection: sharing it would tie its life to somebody else's.
_NOT_SHARED = ("-o", "ControlMaster=no", "-o", "ControlPath=none")


def hop_command(
    binary: str, chain: Sequence[SshSettings], options: Sequence[str], *, timeout_s: float, messages: str
) -> list[str]:
    """Return the command line of an `ssh` to the last hop of `chain` through the others, ending with its options.

    `options` hold for every hop; the caller adds what is for the last one, then `target_arguments`. OpenSSH's own
    ProxyJump would run the jumps without our options, so each jump is the ProxyCommand of the next. What the jumps
    have to say is appended to the file `messages`: ssh itself discards it where a connection may be shared.
    """
    hop = chain[-1]
    fixed = {
        **_FIXED_OPTIONS,
        "HostName": hop.address.replace("%", "%%"),  # of an IPv6 scope
        "ConnectTimeout": str(max(1, round(timeout_s))),
    }
    command = [binary, "-T", "-a", "-x", *_as_options(fixed), *options]
    if len(chain) > 1:
        jump = hop_command(binary, chain[:-1], options, timeout_s=timeout_s, messages=messages)
        address = f"[{hop.address}]" if ":" in hop.address else hop.address
        jump += [*_NOT_SHARED, "-W", f"{address}:{hop.port}", *target_arguments(chain[-2].target)]
        # ssh expands % in the value, once for each jump that it stands inside of.
        # In sh, whichever shell of the user's ssh itself takes: csh reads `2>>` otherwise.
        through = shlex.join(["sh", "-c", f"exec {shlex.join(jump)} 2>>{shlex.quote(messages)}"])
        command += ["-o", "ProxyCommand=" + through.replace("%", "%%")]
    return command


def _as_options(pairs: Mapping[str, object]) -> list[str]:
    return [word for name, value in pairs.items() for word in ("-o", f"{name}={value}")]


class Master:
    """The master for one chain of hops. Several processes may use it; `starting` lets one of them start it."""

    def __init__(self, binary: str, chain: Sequence[SshSettings], *, keepalive_s: float, dead_after_s: float) -> None:
        self._binary = binary
        self._chain = chain
        interval = max(1, round(keepalive_s))
        self._alive_options = _as_options(
            {"ServerAliveInterval": interval, "ServerAliveCountMax": max(1, round(dead_after_s / interval))}
        )
        self.socket = os.path.join(control_folder(), _identity(chain, self._alive_options))

    @property
    def has_socket(self) -> bool:
        """Tell, at no cost, whether a master may be there; `check` asks it."""
        return os.path.exists(self.socket)

    def check(self) -> bool:
        """Tell whether a master answers on the socket; remove the socket of one that does not."""
        if not self.has_socket:
            return False
        command = [self._binary, "-F", os.devnull, "-S", self.socket, "-O", "check", "ctl"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONTROL_TIMEOUT_S, check=False
            )
            alive = done.returncode == 0
        except subprocess.TimeoutExpired:
            alive = False
        if not alive:
            self._remove_socket()
        return alive

    @contextmanager
    def starting(self, deadline: Deadline) -> Iterator[None]:
        """Hold the right to start this master. Raises ConnectionFailed at the deadline."""
        descriptor = os.open(f"{self.socket}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.expired:
                        raise ConnectionFailed(
                            f"another ctl is still connecting to {self._chain[-1].label}",
                            why=f"it holds {self.socket}.lock",
                            fix="answer its question, or end it",
                            code="connect-busy",
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def start(self, *, interactive: bool, timeout_s: float) -> tuple[int | None, str]:
        """Connect and authenticate; return ssh's exit status (0: the master runs; None: it took too long) and stderr.

        `interactive` leaves the terminal to ssh, which then asks there itself; its messages go there too.
        """
        manner = "no" if interactive else "yes"

        def command(messages: str) -> list[str]:
            options = [*self._alive_options, "-o", f"BatchMode={manner}", "-o", "LogLevel=INFO"]
            ssh = hop_command(self._binary, self._chain, options, timeout_s=timeout_s, messages=messages)
            ssh += ["-M", "-N", "-S", self.socket, "-o", f"ControlPersist={PERSIST_S}"]
            return ssh + target_arguments(self._chain[-1].target)

        if interactive:
            return run_ssh_on_terminal(command("/dev/tty")), ""
        return run_ssh(command, timeout_s=timeout_s)

    def client(self, line: str) -> list[str]:
        """Return the command line of a client that runs `line` through the master, and never without it."""
        # The inner shell keeps the outer one's stdout, at whose end ssh gives up, open until the word is written.
        instead = f"ProxyCommand=sh -c 'echo {NO_MASTER} >&2'"
        command = [self._binary, "-F", os.devnull, "-S", self.socket, "-T", "-a", "-x", "-o", "BatchMode=yes"]
        return [*command, "-o", "LogLevel=ERROR", "-o", instead, "--", "ctl", line]

    def _remove_socket(self) -> None:
        try:
            os.unlink(self.socket)
        except FileNotFoundError:
            return  # its master removed it at its end


def run_ssh(command: Callable[[str], Sequence[str]], *, timeout_s: float) -> tuple[int | None, str]:
    """Run an ssh that connects and asks nothing; return its exit status, None after `timeout_s`, and its messages.

    `command` makes the command line from the name of a file for messages.
    """
    # A file, not a pipe: the master that ssh leaves behind may keep it open.
    with tempfile.NamedTemporaryFile(prefix="ctl-messages-", dir=control_folder()) as messages:
        # Several programs write to it, the jumps from a shell of their own.
        fcntl.fcntl(messages, fcntl.F_SETFL, os.O_APPEND)
        process = subprocess.Popen(
            command(messages.name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            # Without a terminal nothing down to the last jump's ssh can ask a question.
            start_new_session=True,
            env={**os.environ, "SSH_ASKPASS_REQUIRE": "never"},
        )
        status = _wait(process, timeout_s)
        messages.seek(0)
        return status, messages.read().decode(errors="replace").strip()


def run_ssh_on_terminal(command: Sequence[str]) -> int | None:
    """Run an ssh that may ask a person on the terminal; return its exit status, None if nobody answered in time."""
    return _wait(subprocess.Popen(command, stdout=subprocess.DEVNULL), INTERACTIVE_TIMEOUT_S)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(CONTROL_TIMEOUT_S)


def control_folder() -> str:
    """Return the folder for control sockets, made (0700) where needed.

    Raises ConfigError if it is not ours alone: who can write there could hand us their own connection.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    longest = MAX_SOCKET_BYTES - _TEMPORARY_SUFFIX_BYTES - len("/") - _HASH_DIGITS
    folder = os.path.join(runtime, "ctl")
    if not runtime.startswith("/") or not os.path.isdir(runtime) or len(os.fsencode(folder)) > longest:
        folder = f"/tmp/ctl-{os.geteuid()}"  # noqa: S108 - TMPDIR may be too long; who owns it is checked
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass  # checked like one that was just made
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {folder} for control sockets",
            why=str(error),
            fix="set XDG_RUNTIME_DIR to a folder that you may write",
        ) from error
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise ConfigError(
            f"{folder} is not a folder of yours alone",
            why=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}; connections are shared through it",
            fix=f"remove it, or make it yours: chmod 700 {folder}",
            code="control-folder-unsafe",
        )
    return folder


_HASH_DIGITS = 24


def _identity(chain: Sequence[SshSettings], options: Sequence[str]) -> str:
    """Name what the connection depends on: a changed configuration must not find the old connection."""
    described = [(hop.target, sorted((key, tuple(value)) for key, value in hop.options.items())) for hop in chain]
    text = repr((described, tuple(options), os.environ.get("SSH_AUTH_SOCK")))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_HASH_DIGITS]

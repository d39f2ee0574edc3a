"""The one seam to a host: argv in, bytes out, an exit status that can be trusted.

Stages know only this module. `ssh.py` implements it over fabric and paramiko, `openssh.py` over the ssh program;
`auto.py` picks between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A remote command that ended and whose trailer arrived. `stderr` holds at most its last 64 KiB."""

    code: int
    stdout: bytes
    stderr: bytes


class Process(Protocol):
    """A remote command under way."""

    def write(self, data: bytes, *, timeout: float) -> None:
        """Send bytes to its stdin. Raises ConnectionLost after `timeout` seconds without room."""

    def close_stdin(self) -> None:
        """Send end-of-file."""

    def read(self, *, timeout: float) -> bytes:
        """Return some bytes of its stdout, b"" at its end.

        Chatter before the command (a banner, an echoing shell profile) and the trailer are not part of it.
        Raises TimeoutError after `timeout` seconds of silence (the process goes on; call again), ConnectionLost
        if the connection broke, RemoteFailed (`shell-unusable`) if it is whole and the login shell never ran the
        command.
        """

    def wait(self, *, timeout: float) -> int:
        """Drain, and return its exit code from the framed trailer.

        Raises ConnectionLost if no trailer arrived: then nobody knows how it ended.
        """

    def close(self) -> None:
        """Close the channel now; the remote command is not killed by us."""

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB of its stderr so far."""


class Transport(Protocol):
    """A connection to one host, reused for every command."""

    @property
    def note(self) -> str:
        """A sentence for the user about the way chosen to the host; empty where there is nothing to say."""

    def connect(self) -> None:
        """Connect and authenticate within the host's deadline.

        Raises HostKeyError, AuthenticationError, ConnectionFailed.
        """

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Process:
        """Start a remote command. `argv` is quoted here and nowhere else; `env` is added to its environment.

        Connects again first if the connection is known to be gone; never repeats a command. Raises
        ConnectionFailed, ConnectionLost.
        """

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout: float
    ) -> Completed:
        """Run a command to its end within `timeout` seconds.

        Raises ConnectionLost if it cannot be known how it ended; an exit code other than 0 is returned, not raised.
        """

    def close(self) -> None:
        """Close the connection. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...

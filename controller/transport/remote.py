"""What every remote command has in common, whatever carries it: reading up to the trailer, and no further."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod

from controller.core.errors import ConnectionLost, CtlError, RemoteFailed
from controller.transport.base import Completed
from controller.transport.bootstrap import OutputScanner

SESSION_GRACE_S = 2.0
"""How long a refusal of another session is tried again: with `MaxSessions 1` the last command's session must end
first, and that takes the host a moment after we closed it."""

SESSION_RETRY_S = 0.1

OPEN_TIMEOUT_S = 20.0
"""For the server's answer to opening a channel and to starting a command: it only forks a shell."""

STDERR_KEPT_BYTES = 65536

READ_BYTES = 1 << 20

END_GRACE_S = 1.0
"""After the trailer or the end of the stream: for the last of stderr, and for the exit status."""


class RemoteProcess(ABC):
    """The half of `base.Process` that depends on the trailer alone; `_receive` and `_broken` know the carrier."""

    def __init__(self, scanner: OutputScanner, *, host: str) -> None:
        self._scanner = scanner
        self._host = host
        self._stderr = bytearray()
        self._stderr_lock = threading.Lock()
        self._drainer: threading.Thread | None = None

    @abstractmethod
    def _receive(self, seconds: float) -> bytes | None:
        """Return some raw bytes, b"" at the end of the stream, None after at most `seconds` of silence."""

    @abstractmethod
    def _broken(self) -> CtlError:
        """Return the error for a stream that ended without the trailer."""

    @abstractmethod
    def write(self, data: bytes, *, timeout: float) -> None: ...

    @abstractmethod
    def close_stdin(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def read(self, *, timeout: float) -> bytes:
        """Return some bytes of its stdout, b"" at its end; see `base.Process.read`.

        Raises RemoteFailed (`shell-unusable`) if the connection is whole and the login shell never ran the command.
        """
        end = time.monotonic() + timeout
        while self._scanner.code is None:
            data = self._receive(max(0.0, end - time.monotonic()))
            if data == b"":
                raise self._broken()
            if data:
                output = self._scanner.feed(data)
                if output:
                    return output
            elif time.monotonic() >= end:
                raise TimeoutError(f"no output from {self._host} for {timeout:g} s")
        return b""

    def wait(self, *, timeout: float) -> int:
        """Drain, and return its exit code from the trailer; see `base.Process.wait`.

        Does not wait for the end of the stream: a detached child may hold it open.
        """
        end = time.monotonic() + timeout
        try:
            while self.read(timeout=max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise TimeoutError
        except TimeoutError:
            raise self.overdue(timeout) from None
        assert self._scanner.code is not None
        self._join_drainer()
        return self._scanner.code

    def overdue(self, timeout: float) -> ConnectionLost:
        """Return the error for a command that did not end within `timeout` seconds."""
        return ConnectionLost(
            f"the command on {self._host} did not end within {timeout:g} s",
            why=self._tail() or "it printed nothing that says why",
            fix="check the host's load and disks, then run the same command again",
        )

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB of its stderr so far."""
        with self._stderr_lock:
            return bytes(self._stderr)

    @property
    def chatter(self) -> bytes:
        """What the login shell printed around the command, at most 64 KiB."""
        return self._scanner.chatter

    def _keep_stderr(self, data: bytes) -> None:
        with self._stderr_lock:
            self._stderr += data
            del self._stderr[:-STDERR_KEPT_BYTES]

    def _join_drainer(self) -> None:
        if self._drainer is not None:
            self._drainer.join(END_GRACE_S)

    def _tail(self) -> str:
        return (self.stderr or self.chatter)[-1000:].decode(errors="replace").strip()

    def _shell_unusable(self, status: int) -> RemoteFailed:
        return RemoteFailed(
            f"the login shell on {self._host} did not run the command",
            why=self._tail() or f"it ended with exit status {status} and no message",
            fix="the account needs a shell that can run `sh` and `base64`; try `ssh HOST true`, with `-F FILE` where "
            "hosts.toml sets `ssh_config`",
            code="shell-unusable",
        )

    def _lost(self, why: str) -> ConnectionLost:
        return ConnectionLost(
            f"lost the command on {self._host}", why=why, fix="check the network, then run the same command again"
        )

    def _no_room(self, timeout: float, sent: int, total: int) -> ConnectionLost:
        return ConnectionLost(
            f"{self._host} took no input for {timeout:g} s",
            why=f"{sent} of {total} bytes were sent",
            fix="check the host and the network, then run the same command again",
        )


def complete(process: RemoteProcess, stdin: bytes, timeout: float) -> Completed:
    """Feed a started command, read it to its end and close it; see `base.Transport.run`."""
    end = time.monotonic() + timeout
    if stdin:
        # Written from a thread: a command that answers while it is still being told would otherwise block us both.
        writer = threading.Thread(target=_feed, args=(process, stdin, timeout), name="ctl-stdin", daemon=True)
        writer.start()
    else:
        _feed(process, b"", timeout)
    stdout = bytearray()
    try:
        while data := process.read(timeout=max(0.0, end - time.monotonic())):
            stdout += data
            if time.monotonic() >= end:
                raise process.overdue(timeout)
        code = process.wait(timeout=max(0.0, end - time.monotonic()))
    except TimeoutError:
        raise process.overdue(timeout) from None
    finally:
        process.close()
    return Completed(code=code, stdout=bytes(stdout), stderr=process.stderr)


def _feed(process: RemoteProcess, data: bytes, timeout: float) -> None:
    # A failure needs no report of its own: the same broken connection ends the reader with an error.
    with contextlib.suppress(ConnectionLost):
        process.write(data, timeout=timeout)
        process.close_stdin()

"""A remote command over a raw channel.

Not `fabric.Connection.run`: it joins its whole capture buffer at every read, which is quadratic in the output.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from controller.core.errors import ConnectionLost, CtlError, RemoteFailed
from controller.transport.bootstrap import OutputScanner
from controller.transport.heartbeat import Heartbeat

STDERR_KEPT_BYTES = 65536

_SLICE_S = 0.2
"""A channel has one timeout for reading and writing, which two threads may do at once. So it is fixed and short,
and every deadline is counted here."""

_READ_BYTES = 1 << 20
_WRITE_BYTES = 1 << 15  # one SSH packet

_END_GRACE_S = 1.0
"""After the trailer or the end of the stream: for the last of stderr, and for the exit status."""


class SshProcess:
    """Implements `controller.transport.base.Process` on a paramiko channel on which the command was started."""

    def __init__(self, channel: Any, scanner: OutputScanner, heartbeat: Heartbeat, *, host: str) -> None:
        channel.settimeout(_SLICE_S)
        self._channel = channel
        self._scanner = scanner
        self._heartbeat = heartbeat
        self._host = host
        self._stderr = bytearray()
        self._stderr_lock = threading.Lock()
        # stdout and stderr share one window: undrained stderr would stop stdout.
        self._drainer = threading.Thread(target=self._drain_stderr, name="ctl-stderr", daemon=True)
        self._drainer.start()

    def write(self, data: bytes, *, timeout: float) -> None:
        """Send bytes to its stdin. Raises ConnectionLost after `timeout` seconds without room.

        Bytes that the command no longer reads, because it ended, are dropped: `wait` tells how it ended.
        """
        last_room = time.monotonic()
        sent = 0
        while sent < len(data):
            try:
                sent += self._channel.send(data[sent : sent + _WRITE_BYTES])
                last_room = time.monotonic()
            except TimeoutError:
                if time.monotonic() - last_room >= timeout:
                    raise ConnectionLost(
                        f"{self._host} took no input for {timeout:g} s",
                        why=f"{sent} of {len(data)} bytes were sent",
                        fix="check the host and the network, then run the same command again",
                    ) from None
            except OSError as error:
                if not self._channel.get_transport().is_active():
                    raise self._broken() from error
                return

    def close_stdin(self) -> None:
        """Send end-of-file."""
        try:
            self._channel.shutdown_write()
        except (OSError, EOFError) as error:
            raise self._broken() from error

    def read(self, *, timeout: float) -> bytes:
        """Return some bytes of its stdout, b"" at its end; see `base.Process.read`.

        Raises RemoteFailed (`shell-unusable`) if the connection is whole and the login shell never ran the command.
        """
        end = time.monotonic() + timeout
        while self._scanner.code is None:
            try:
                data = self._channel.recv(_READ_BYTES)
            except TimeoutError:
                data = None
            if data == b"":
                raise self._broken()
            if data:
                self._heartbeat.heard()
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
        self._drainer.join(_END_GRACE_S)
        return self._scanner.code

    def overdue(self, timeout: float) -> ConnectionLost:
        """Return the error for a command that did not end within `timeout` seconds."""
        return ConnectionLost(
            f"the command on {self._host} did not end within {timeout:g} s",
            why=self._tail() or "it printed nothing that says why",
            fix="check the host's load and disks, then run the same command again",
        )

    def close(self) -> None:
        """Close the channel now; the remote command is not killed by us."""
        self._channel.close()

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB of its stderr so far."""
        with self._stderr_lock:
            return bytes(self._stderr)

    @property
    def chatter(self) -> bytes:
        """What the login shell printed around the command, at most 64 KiB."""
        return self._scanner.chatter

    def _drain_stderr(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(_READ_BYTES)
            except TimeoutError:
                continue
            if not data:
                return
            self._heartbeat.heard()
            with self._stderr_lock:
                self._stderr += data
                del self._stderr[:-STDERR_KEPT_BYTES]

    def _tail(self) -> str:
        return (self.stderr or self.chatter)[-1000:].decode(errors="replace").strip()

    def _broken(self) -> CtlError:
        """Return the error for a stream that ended without the trailer."""
        self._drainer.join(_END_GRACE_S)
        whole = self._channel.get_transport().is_active()
        if whole and not self._scanner.begun and self._channel.status_event.wait(_END_GRACE_S):
            status = self._channel.recv_exit_status()
            if status >= 0:
                return RemoteFailed(
                    f"the login shell on {self._host} did not run the command",
                    why=self._tail() or f"it ended with exit status {status} and no message",
                    fix="the account needs a shell that can run `sh`, `tr` and `base64`; try `ssh HOST true`",
                    code="shell-unusable",
                )
        if self._heartbeat.problem:
            why = self._heartbeat.problem
        elif whole:
            why = "the connection is whole, but the command's shell was killed before it could report an exit code"
        else:
            why = "the connection ended before the command did, so nobody knows how it ended"
        return ConnectionLost(
            f"lost the command on {self._host}",
            why=why,
            fix="check the network, then run the same command again",
        )

"""A remote command over a raw channel of paramiko.

Not `fabric.Connection.run`: it joins its whole capture buffer at every read, which is quadratic in the output.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from controller.core.errors import CtlError
from controller.transport.bootstrap import OutputScanner
from controller.transport.heartbeat import Heartbeat
from controller.transport.remote import END_GRACE_S, READ_BYTES, RemoteProcess

_SLICE_S = 0.2
"""A channel has one timeout for reading and writing, which two threads may do at once. So it is fixed and short,
and every deadline is counted here."""

_WRITE_BYTES = 1 << 15  # one SSH packet


class SshProcess(RemoteProcess):
    """Implements `controller.transport.base.Process` on a paramiko channel on which the command was started."""

    def __init__(self, channel: Any, scanner: OutputScanner, heartbeat: Heartbeat, *, host: str) -> None:
        super().__init__(scanner, host=host)
        channel.settimeout(_SLICE_S)
        self._channel = channel
        self._heartbeat = heartbeat
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
                    raise self._no_room(timeout, sent, len(data)) from None
            except (OSError, EOFError) as error:  # paramiko tells of a broken pipe by either
                if not self._channel.get_transport().is_active():
                    raise self._broken() from error
                return

    def close_stdin(self) -> None:
        """Send end-of-file."""
        try:
            self._channel.shutdown_write()
        except (OSError, EOFError) as error:
            raise self._broken() from error

    def close(self) -> None:
        """Close the channel now; the remote command is not killed by us."""
        # Of a connection that broke there is nothing left to close, and who reads or writes learns that it did.
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    def _receive(self, seconds: float) -> bytes | None:
        try:
            data = bytes(self._channel.recv(READ_BYTES))
        except TimeoutError:
            return None
        if data:
            self._heartbeat.heard()
        return data

    def _drain_stderr(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(READ_BYTES)
            except TimeoutError:
                continue
            if not data:
                return
            self._heartbeat.heard()
            self._keep_stderr(data)

    def _broken(self) -> CtlError:
        self._join_drainer()
        whole = self._channel.get_transport().is_active()
        if whole and not self._scanner.begun and self._channel.status_event.wait(END_GRACE_S):
            status = self._channel.recv_exit_status()
            if status >= 0:
                return self._shell_unusable(status)
        if self._heartbeat.problem:
            return self._lost(self._heartbeat.problem)
        if whole:
            return self._lost(
                "the connection is whole, but the command's shell was killed before it could report an exit code"
            )
        return self._lost("the connection ended before the command did, so nobody knows how it ended")

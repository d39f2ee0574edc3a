"""A remote command behind the pipes of an `ssh` process that goes through a control master."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from controller.core.errors import ConnectionFailed, CtlError
from controller.transport.bootstrap import OutputScanner
from controller.transport.remote import END_GRACE_S, READ_BYTES, RemoteProcess

_WRITE_BYTES = 1 << 16  # the usual capacity of a pipe

SSH_FAILED = 255
"""ssh's exit status for its own failures, and for a remote shell that a signal killed."""

NO_MASTER = "ctl-no-control-master"
"""Printed in place of a second connection: the client found no master, or the master would not take the command."""

_SESSION_REFUSED = b"Session open refused"
_MUX_ERROR = b"mux_client"


class PipeProcess(RemoteProcess):
    """Implements `controller.transport.base.Process` on an ssh client process; `argv` is its whole command line."""

    def __init__(
        self,
        argv: Sequence[str],
        scanner: OutputScanner,
        *,
        host: str,
        is_master_alive: Callable[[], bool],
        dead_after_s: float,
    ) -> None:
        super().__init__(scanner, host=host)
        self._is_master_alive = is_master_alive
        self._dead_after_s = dead_after_s
        self._pending = b""
        self._ended = False
        self._closed = False
        # A session of its own: a Ctrl-C in the terminal is for ctl, and nothing can be asked on the terminal.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._messages = self._process.stdin, self._process.stdout, self._process.stderr
        os.set_blocking(self._stdin.fileno(), False)
        self._drainer = threading.Thread(target=self._drain_stderr, name="ctl-stderr", daemon=True)
        self._drainer.start()

    def settle(self, timeout: float) -> bool:
        """Wait until the host runs our script; False if it is certain that the command was never sent.

        Returns True after `timeout` seconds too, and for every end that `read` explains. Raises ConnectionFailed
        (`session-refused`) if the host opens no session for it, ConnectionLost if nobody can say whether it was sent.
        """
        end = time.monotonic() + timeout
        while not self._scanner.begun and time.monotonic() < end:
            data = self._receive(end - time.monotonic())
            if data == b"":
                return self._explain_start()
            if data:
                self._pending += self._scanner.feed(data)
        return True

    def read(self, *, timeout: float) -> bytes:
        if self._pending:
            data, self._pending = self._pending, b""
            return data
        return super().read(timeout=timeout)

    def write(self, data: bytes, *, timeout: float) -> None:
        """Send bytes to its stdin. Raises ConnectionLost after `timeout` seconds without room.

        Bytes that the command no longer reads, because it ended, are dropped: `wait` tells how it ended.
        """
        view = memoryview(data)
        sent = 0
        last_room = time.monotonic()
        while sent < len(data):
            try:
                sent += os.write(self._stdin.fileno(), view[sent : sent + _WRITE_BYTES])
                last_room = time.monotonic()
            except BlockingIOError:
                left = last_room + timeout - time.monotonic()
                if left <= 0:
                    raise self._no_room(timeout, sent, len(data)) from None
                select.select([], [self._stdin], [], left)
            except (BrokenPipeError, ValueError) as error:  # ValueError: another thread closed it
                if self._status() == SSH_FAILED and self._scanner.code is None:
                    raise self._broken() from error
                return

    def close_stdin(self) -> None:
        """Send end-of-file."""
        self._stdin.close()

    def close(self) -> None:
        """Close the channel now; the remote command is not killed by us."""
        if self._closed:
            return
        self._closed = True
        self._stdin.close()
        # The master closes the session's channel when its client goes.
        self._process.terminate()
        try:
            self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_GRACE_S)
        self._join_drainer()
        self._stdout.close()

    def _receive(self, seconds: float) -> bytes | None:
        if self._ended:
            return b""
        try:
            readable, _, _ = select.select([self._stdout], [], [], seconds)
            if not readable:
                return None
            data = os.read(self._stdout.fileno(), READ_BYTES)
        except (OSError, ValueError):  # closed by another thread, as a detach does
            data = b""
        self._ended = not data
        return data

    def _drain_stderr(self) -> None:
        with self._messages as stream:
            while data := os.read(stream.fileno(), READ_BYTES):
                self._keep_stderr(data)

    def _explain_start(self) -> bool:
        self._join_drainer()
        if self._status() != SSH_FAILED or NO_MASTER.encode() not in self.stderr:
            return True
        if _SESSION_REFUSED in self.stderr:
            raise ConnectionFailed(
                f"{self._host} opens no session for another command",
                why="Session open refused by peer",
                fix="end other uses of this connection, or raise MaxSessions in the host's sshd_config",
                code="session-refused",
            )
        if _MUX_ERROR in self.stderr:
            # The master ended while it took the command, which may have been sent or not.
            raise self._lost(self._connection_ended())
        return False

    def _status(self) -> int | None:
        try:
            return self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            return None

    def _broken(self) -> CtlError:
        self._join_drainer()
        status = self._status()
        if status is not None and status != SSH_FAILED and status >= 0 and not self._scanner.begun:
            return self._shell_unusable(status)
        if not self._is_master_alive():
            return self._lost(self._connection_ended())
        if not self._scanner.begun:
            return self._shell_unusable(SSH_FAILED)
        return self._lost(
            "the connection is whole, but the command's shell was killed before it could report an exit code"
        )

    def _connection_ended(self) -> str:
        return (
            f"the connection broke, or there was no sign of life from the host for {self._dead_after_s:g} s; "
            "nobody knows how the command ended"
        )

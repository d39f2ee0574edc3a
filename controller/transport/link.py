"""One authenticated connection, and the commands started over it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

import paramiko

from controller.core.errors import ConnectionFailed, ConnectionLost
from controller.transport.channelbuffer import ChannelBuffer
from controller.transport.deadline import Deadline, guard
from controller.transport.heartbeat import Heartbeat
from controller.transport.remote import OPEN_TIMEOUT_S, SESSION_GRACE_S, SESSION_RETRY_S
from controller.transport.spare import SpareSession

WINDOW_BYTES = 16 << 20
"""Receive window of a channel: 100 MB/s at 100 ms round trip need 10 MB in flight."""

FRESH_S = 2.0
"""A spare session is used this soon after a sign of life. A path may die in silence, and a command sent into it is
lost, where asking for a session first shows it in time to connect again. In a row of commands, which is where the
round trip counts, the last one has just been answered."""


class Link:
    """A connection through all its hops, watched by a heartbeat. `hops` are fabric connections, the target last."""

    def __init__(self, hops: Sequence[Any], sock: socket.socket, heartbeat: Heartbeat, *, host: str) -> None:
        self._hops = hops
        self._sock = sock
        self._host = host
        self._transport = hops[-1].transport
        self.heartbeat = heartbeat
        self._spare = SpareSession(self._opened)

    @property
    def alive(self) -> bool:
        return bool(self._transport.is_active())

    def open_session(self) -> Any:
        """Return a session channel without a command, or None if the connection turns out to be gone.

        Raises ConnectionFailed if the host refuses another session for SESSION_GRACE_S.
        """
        if self.heartbeat.silent_s < FRESH_S and (spare := self._spare.take()) is not None:
            return spare
        end = time.monotonic() + SESSION_GRACE_S
        while True:
            asked = time.monotonic()
            try:
                return self._opened()
            except (OSError, EOFError, paramiko.SSHException) as error:
                if not self.alive:
                    return None
                # Of two refusals at once paramiko tells the second one as a mere SSHException, which is also what it
                # tells of no answer at all: on such a path the spare's command would be lost.
                if isinstance(error, paramiko.SSHException) and time.monotonic() - asked < OPEN_TIMEOUT_S:
                    # The spare may hold the last place there is; and the host has just answered.
                    if (spare := self._spare.take()) is not None:
                        return spare
                    if time.monotonic() < end:
                        time.sleep(SESSION_RETRY_S)
                        continue
                raise self._refused(error) from error

    def _opened(self) -> Any:
        channel = self._transport.open_session(window_size=WINDOW_BYTES, timeout=OPEN_TIMEOUT_S)
        # Nothing arrives on a session before its command was asked for, so nothing is lost here.
        channel.in_buffer, channel.in_stderr_buffer = ChannelBuffer(), ChannelBuffer()
        self.heartbeat.heard()
        return channel

    def _refused(self, error: Exception) -> ConnectionFailed:
        return ConnectionFailed(
            f"{self._host} opens no session for another command",
            why=str(error),
            fix="end other uses of this connection, or raise MaxSessions in the host's sshd_config",
            code="session-refused",
        )

    def execute(self, channel: Any, line: str) -> None:
        """Start the command line on `channel`.

        Raises ConnectionLost if the server did not confirm it: it may or may not have run.
        """
        self._spare.prepare()  # its round trip passes within that of the command
        try:
            # Paramiko waits for the confirmation without a limit.
            with guard(Deadline(OPEN_TIMEOUT_S), channel.close):
                channel.exec_command(line)
        except (OSError, EOFError, paramiko.SSHException) as error:
            with contextlib.suppress(OSError, EOFError):
                channel.close()
            raise ConnectionLost(
                f"{self._host} did not confirm that the command was started",
                why=self.heartbeat.problem or str(error),
                fix="check the network, then run the same command again",
            ) from error
        self.heartbeat.heard()

    def close(self) -> None:
        self._spare.close()
        self.heartbeat.stop()
        close_hops(self._hops, self._sock)


def shut_down(sock: socket.socket) -> None:
    """End every wait on `sock`, in whatever thread."""
    with contextlib.suppress(OSError):  # it may have ended by itself
        sock.shutdown(socket.SHUT_RDWR)


def close_hops(hops: Sequence[Any], sock: socket.socket) -> None:
    """Close every hop, the target first, then the socket below them all."""
    for connection in reversed(hops):
        # Not Connection.close, which leaves a half-open client as it is.
        connection.client.close()
    shut_down(sock)
    sock.close()

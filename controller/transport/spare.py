"""A session opened ahead, so that the next command costs one round trip instead of two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import paramiko


class SpareSession:
    """Keeps at most one session channel of a connection on which nothing was asked for yet. Safe for threads.

    Opening one is the host's answer to a question, running a command on it another: the first is asked while an
    earlier command is under way. No command is ever sent ahead, so nothing runs that nobody asked for.

    A host may allow few sessions, or one (`MaxSessions`), and the spare takes the place of one. So it is taken by
    whoever needs a session next; who needs one while it is being opened waits for it rather than asking for
    another; and a host that refuses it is not asked for one again.
    """

    def __init__(self, open_channel: Callable[[], Any]) -> None:
        """`open_channel` asks the host for a session; it raises OSError, EOFError or SSHException in bounded time."""
        self._open_channel = open_channel
        self._changed = threading.Condition()
        self._channel: Any = None
        self._opening = False
        self._wanted = True

    def prepare(self) -> None:
        """Begin to open one, unless there is one or the host refused it earlier. Returns at once."""
        with self._changed:
            if self._opening or self._channel is not None or not self._wanted:
                return
            self._opening = True
        try:
            threading.Thread(target=self._fill, name="ctl-spare", daemon=True).start()
        except RuntimeError:  # no thread is to be had: the next command asks for its session itself
            self._settle(None)

    def take(self) -> Any:
        """Return the spare, which is the caller's from here on; None if there is none, or the host closed it."""
        with self._changed:
            while self._opening:
                self._changed.wait()
            channel, self._channel = self._channel, None
        return channel if channel is not None and not (channel.closed or channel.eof_received) else None

    def close(self) -> None:
        """Open none from here on. The connection, which is about to end, closes the one there is."""
        with self._changed:
            self._wanted = False
            self._channel = None

    def _fill(self) -> None:
        channel = None
        try:
            channel = self._open_channel()
        except (OSError, EOFError, paramiko.SSHException):
            pass  # whoever needs a session learns from its own attempt why there is none
        finally:
            self._settle(channel)  # after any other error too: `take` waits for it without a limit

    def _settle(self, channel: Any) -> None:
        with self._changed:
            self._opening = False
            if channel is None:
                self._wanted = False
            elif self._wanted:
                self._channel = channel
            self._changed.notify_all()

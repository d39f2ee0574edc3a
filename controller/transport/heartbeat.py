"""Noticing that the other end is gone.

Paramiko's own keepalive sends and never looks for an answer: against a frozen path it stays "active" for as long
as TCP does, which is minutes to hours.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_WATCH_S = 0.25
"""How often the age of the last sign of life is looked at."""


class Heartbeat:
    """Asks the server for an answer every `interval_s`; closes the connection after `dead_after_s` without any.

    Bytes of a command count as a sign of life too (`heard`): on a slow link the answer queues behind them.
    Two threads, because the question itself blocks when the path is frozen and the socket's buffer is full.
    """

    def __init__(self, transport: Any, *, interval_s: float, dead_after_s: float) -> None:
        self._transport = transport
        self._interval_s = interval_s
        self._dead_after_s = dead_after_s
        self._heard_at = time.monotonic()
        self._stop = threading.Event()
        self.problem = ""
        """Why the connection was closed by this object; empty while it was not."""

    def start(self) -> None:
        for target in (self._ask, self._watch):
            threading.Thread(target=target, name="ctl-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._heard_at

    def _ask(self) -> None:
        import paramiko

        while not self._stop.wait(self._interval_s) and self._transport.is_active():
            try:
                # Every server answers, if only with "no such request"; that is the sign of life.
                self._transport.global_request("keepalive@openssh.com", wait=True)
            except (OSError, EOFError, paramiko.SSHException) as error:
                self.problem = self.problem or f"the keepalive could not be sent: {error}"
                self._transport.close()
                return
            if self._transport.is_active():
                self.heard()

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_S) and self._transport.is_active():
            silent_s = self.silent_s
            if silent_s > self._dead_after_s:
                self.problem = f"no sign of life from the host for {silent_s:.0f} s"
                self._transport.close()
                return

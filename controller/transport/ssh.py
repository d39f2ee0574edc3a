"""The transport over fabric and paramiko. Both are loaded when a connection is opened, not before."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from controller.core.errors import ConnectionLost
from controller.transport.base import Completed
from controller.transport.bootstrap import OutputScanner, command_line, new_nonce
from controller.transport.deadline import Deadline
from controller.transport.hostkeys import Ask
from controller.transport.process import SshProcess
from controller.transport.remote import complete
from controller.transport.sshconfig import SshTarget, by_hand, resolve_chain

if TYPE_CHECKING:
    from controller.transport.link import Link

__all__ = ["SshTarget", "SshTransport"]

CONNECT_TIMEOUT_S = 30.0
"""For all hops and attempts together; the time a person takes to answer a question is not counted."""

KEEPALIVE_S = 5.0
DEAD_AFTER_S = 20.0
"""Silence after which the connection is given up: four unanswered questions, more than a Wi-Fi handover takes."""


class SshTransport:
    """Implements `controller.transport.base.Transport`. Safe to use from several threads."""

    note = ""

    def __init__(
        self,
        target: SshTarget,
        *,
        ask: Ask | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keepalive_s: float = KEEPALIVE_S,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        """Connects nowhere yet. `ask` puts a yes-or-no question to a person; without it unknown keys are refused."""
        self._target = target
        self._ask = ask
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._dead_after_s = dead_after_s
        self._lock = threading.Lock()
        self._link: Link | None = None

    def connect(self) -> None:
        """Connect and authenticate, unless connected.

        Raises ConfigError, HostKeyError, AuthenticationError, ConnectionFailed.
        """
        self._connected()

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> SshProcess:
        """Start a remote command; see `base.Transport.start`.

        `env` is visible in the host's process list: secrets go through stdin. Raises ValueError for an argv that no
        command line can carry, ConnectionFailed, ConnectionLost.
        """
        nonce = new_nonce()
        line = command_line(argv, env, nonce)
        link, channel = self._session()
        link.execute(channel, line)
        return SshProcess(channel, OutputScanner(nonce), link.heartbeat, host=self._target.host)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout: float
    ) -> Completed:
        """Run a command to its end within `timeout` seconds; see `base.Transport.run`."""
        return complete(self.start(argv, env=env), stdin, timeout)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> Link:
        with self._lock:
            if self._link is not None and self._link.alive:
                return self._link
            if self._link is not None:
                self._link.close()
                self._link = None
            chain = resolve_chain(self._target)
            from controller.transport.connect import open_link

            self._link = open_link(
                chain,
                ask=self._ask,
                deadline=Deadline(self._connect_timeout_s),
                keepalive_s=self._keepalive_s,
                dead_after_s=self._dead_after_s,
            )
            return self._link

    def _session(self) -> tuple[Link, Any]:
        """Open a session channel; over a new connection if this one turns out to be gone.

        That repeats nothing: without a channel no command was sent.
        """
        link = self._connected()
        channel = link.open_session()
        if channel is None:
            link = self._connected()
            channel = link.open_session()
        if channel is None:
            raise ConnectionLost(
                f"the connection to {self._target.host} ends as soon as it is made",
                why=link.heartbeat.problem,
                fix=f"check that `{by_hand(self._target, 'true')}` works",
            )
        return link, channel

"""The transport over the `ssh` program: whatever OpenSSH can do, behind the same protocol as `ssh.py`.

One control master a connection (`master.py`), one `ssh` client a command. Host keys are checked by ssh with
StrictHostKeyChecking; a key that it does not know is judged and introduced by `hostkeys`, as in the other transport.
Without a person nothing is ever asked (BatchMode). With one, ssh may ask on the terminal once, when it first
authenticates; a connection that breaks later is made again in silence or not at all.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Self

from controller.core.errors import ConfigError, ConnectionFailed, ConnectionLost
from controller.transport.base import Completed
from controller.transport.bootstrap import OutputScanner, command_line, new_nonce
from controller.transport.deadline import Deadline
from controller.transport.hostkeys import Ask
from controller.transport.master import Master
from controller.transport.opening import Opening, Pause
from controller.transport.pipes import PipeProcess
from controller.transport.remote import OPEN_TIMEOUT_S, SESSION_GRACE_S, SESSION_RETRY_S, complete
from controller.transport.ssh import CONNECT_TIMEOUT_S, DEAD_AFTER_S, KEEPALIVE_S
from controller.transport.sshconfig import SshTarget, by_hand, resolve_chain


class OpensshTransport:
    """Implements `controller.transport.base.Transport`. Safe to use from several threads."""

    note = ""

    def __init__(
        self,
        target: SshTarget,
        *,
        ask: Ask | None = None,
        pause: Pause = nullcontext,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keepalive_s: float = KEEPALIVE_S,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        """Connects nowhere yet.

        `ask` puts a yes-or-no question to a person; without it nothing is asked, by ssh neither. `pause` is held
        while ssh uses the terminal.
        """
        self._target = target
        self._ask = ask
        self._pause = pause
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._dead_after_s = dead_after_s
        self._lock = threading.Lock()
        self._master: Master | None = None
        self._was_connected = False

    def connect(self) -> None:
        """Connect and authenticate, unless connected.

        Raises ConfigError, HostKeyError, AuthenticationError, ConnectionFailed.
        """
        self._connected()

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> PipeProcess:
        """Start a remote command; see `base.Transport.start`.

        `env` is visible in the host's process list: secrets go through stdin. Raises ValueError for an argv that no
        command line can carry, ConnectionFailed, ConnectionLost.
        """
        nonce = new_nonce()
        line = command_line(argv, env, nonce)
        refused_until = time.monotonic() + SESSION_GRACE_S
        unsent = 0
        while unsent < 2:  # a second time only if it is certain that nothing was sent the first time
            master = self._connected()
            process = PipeProcess(
                master.client(line),
                OutputScanner(nonce),
                host=self._target.host,
                is_master_alive=master.check,
                dead_after_s=self._dead_after_s,
            )
            try:
                if process.settle(OPEN_TIMEOUT_S):
                    return process
            except ConnectionFailed:  # the session was refused
                process.close()
                if time.monotonic() >= refused_until:
                    raise
                time.sleep(SESSION_RETRY_S)
                continue
            except BaseException:
                process.close()
                raise
            process.close()
            self._forget(master)
            unsent += 1
        raise ConnectionLost(
            f"the connection to {self._target.host} ends as soon as it is made",
            why="its control master is gone each time that a command is to be started",
            fix=f"check that `{by_hand(self._target, 'true')}` works",
        )

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout: float
    ) -> Completed:
        """Run a command to its end within `timeout` seconds; see `base.Transport.run`."""
        return complete(self.start(argv, env=env), stdin, timeout)

    def close(self) -> None:
        """Let go of the connection. Idempotent. Its master ends by itself, `master.PERSIST_S` after its last use."""
        with self._lock:
            self._master = None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget(self, master: Master) -> None:
        master.check()  # removes the socket of a dead one
        with self._lock:
            if self._master is master:
                self._master = None

    def _connected(self) -> Master:
        with self._lock:
            if self._master is not None and self._master.has_socket:
                return self._master
            binary = shutil.which("ssh")
            if binary is None:
                raise ConfigError(
                    "there is no `ssh` program here", fix='install the OpenSSH client, or set transport = "paramiko"'
                )
            chain = resolve_chain(self._target)
            deadline = Deadline(self._connect_timeout_s)
            master = Master(binary, chain, keepalive_s=self._keepalive_s, dead_after_s=self._dead_after_s)
            opening = Opening(binary, chain, master, deadline, ask=self._ask, pause=self._pause)
            from controller.transport.retry import attempts  # tenacity is not for commands that connect nowhere

            with master.starting(deadline):
                if not master.check():
                    attempts(deadline)(opening.attempt, may_interact=not self._was_connected)
            self._master = master
            self._was_connected = True
            return master

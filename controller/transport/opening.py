"""Making a connection with the ssh program: the first attempt, an unknown host key, a person's answer, the errors."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from controller.core.errors import AuthenticationError, ConnectionFailed, HostKeyError
from controller.transport.deadline import Deadline
from controller.transport.hostkeys import Ask, HostKeyPolicy
from controller.transport.knownhosts import KnownKey, read_known_hosts, signature_algorithms
from controller.transport.master import Master, hop_command, run_ssh
from controller.transport.sshconfig import SshSettings, target_arguments

Pause = Callable[[], AbstractContextManager[None]]
"""Keeps the terminal free for somebody else's questions while its block runs."""

_HOST_KEY = ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED", "No matching host key")
_AUTHENTICATION = ("Permission denied (", "Too many authentication failures", "No more authentication methods")
_NAME = ("Could not resolve hostname", "Name or service not known")


class Opening:
    """One making of a connection, and what its failure means."""

    def __init__(
        self,
        binary: str,
        chain: Sequence[SshSettings],
        master: Master,
        deadline: Deadline,
        *,
        ask: Ask | None,
        pause: Pause,
    ) -> None:
        self._binary = binary
        self._chain = chain
        self._master = master
        self._deadline = deadline
        self._ask = ask
        self._pause = pause
        self._hop = chain[-1]
        self._said = ""  # by the last attempt that said anything

    def attempt(self, *, may_interact: bool) -> None:
        """Start the master, with a person's help where it is needed and allowed."""
        status, messages = self._start(interactive=False)
        if status and _holds(messages, _HOST_KEY):
            self._introduce(messages)
            status, messages = self._start(interactive=False)
        if status and _holds(messages, _AUTHENTICATION) and may_interact and self._someone_is_there():
            with self._deadline.pause(), self._pause():
                status, messages = self._start(interactive=True)
            if status:
                raise self._denied("ssh said why, above")
        if status != 0:
            raise self._explain(status, messages)

    def _start(self, *, interactive: bool) -> tuple[int | None, str]:
        return self._master.start(interactive=interactive, timeout_s=max(1.0, self._deadline.remaining()))

    def _someone_is_there(self) -> bool:
        return self._ask is not None and sys.stdin.isatty()

    def _introduce(self, messages: str) -> None:
        """Judge the key of each hop in turn; returns if all are known now. Raises HostKeyError."""
        for index, hop in enumerate(self._chain):
            policy = HostKeyPolicy(hop, self._ask, self._deadline)
            key = self._offered_key(index, policy)
            if key is not None:
                policy.missing_host_key(None, hop.address, key)
            elif index == len(self._chain) - 1:
                raise HostKeyError(
                    f"ssh does not trust the host key of {hop.label}",
                    why=messages,
                    fix=f"check it with `{hop.by_hand()}`",
                )

    def _offered_key(self, index: int, policy: HostKeyPolicy) -> _OfferedKey | None:
        """Have ssh write the key that a hop offers into a file of ours; nothing is authenticated."""
        types = [name for kind in policy.known_types() for name in signature_algorithms(kind)]
        left = max(1.0, self._deadline.remaining())
        with tempfile.NamedTemporaryFile("r", prefix="ctl-key-") as known:
            first = [
                "StrictHostKeyChecking=accept-new",
                f"UserKnownHostsFile={known.name}",
                "GlobalKnownHostsFile=none",
                "HashKnownHosts=no",
                "PreferredAuthentications=none",
                *([f"HostKeyAlgorithms=^{','.join(types)}"] if types else []),
            ]

            def command(messages: str) -> list[str]:
                batch = ["-o", "BatchMode=yes"]
                ssh = hop_command(self._binary, self._chain[: index + 1], batch, timeout_s=left, messages=messages)
                # The first value of an option counts, so these stand before the strict ones.
                ssh[1:1] = [word for option in first for word in ("-o", option)]
                return [*ssh, "-N", *target_arguments(self._chain[index].target)]

            run_ssh(command, timeout_s=left)
            keys = read_known_hosts([known.name])
        return _OfferedKey(keys[0]) if keys else None

    def _explain(self, status: int | None, messages: str) -> ConnectionFailed:
        hop = self._hop
        messages = self._said = messages or self._said
        if _holds(messages, _AUTHENTICATION):
            return self._denied(messages)
        if _holds(messages, _HOST_KEY):
            return HostKeyError(
                f"the host key of {hop.label} or of a jump before it is not known",
                why=messages,
                fix=f"check it with `{hop.by_hand()}`",
            )
        why = messages
        if "stdio forwarding failed" in messages:
            why = f"the jump host refused the way there: {messages}"
        elif status is None or self._deadline.expired:
            why = f"no answer within {self._deadline.seconds:g} s" + (f": {messages}" if messages else "")
        code = "connect-name" if _holds(messages, _NAME) else None
        return ConnectionFailed(
            f"cannot connect to {hop.label}",
            why=why or f"ssh ended with exit status {status}",
            fix=f"check that `{hop.by_hand('true')}` works",
            code=code,
        )

    def _denied(self, messages: str) -> AuthenticationError:
        hop = self._hop
        fix = (
            f"run this in a terminal, where ssh can ask you; check `{hop.by_hand('true')}`, or unlock your key with "
            "`ssh-add`"
        )
        if "Too many authentication failures" in messages:
            fix = (
                f"name the right key: set IdentityFile and `IdentitiesOnly yes` for {hop.alias} in {hop.config_name}"
            )
        methods = messages.rpartition("Permission denied (")[2].partition(")")[0]
        by_key = "publickey" in methods or "Permission denied (" not in messages
        return AuthenticationError(
            f"{hop.label} does not let user {hop.user} in without a question",
            why=messages,
            fix=fix,
            code=None if by_key else "authentication-method",
        )


class _OfferedKey:
    """A key as `HostKeyPolicy` asks for it."""

    def __init__(self, line: KnownKey) -> None:
        self._line = line

    def get_name(self) -> str:
        return self._line.key_type

    def asbytes(self) -> bytes:
        return self._line.blob


def _holds(messages: str, signs: Sequence[str]) -> bool:
    return any(sign in messages for sign in signs)

"""Public-key authentication with the keys that OpenSSH would offer, in its order.

Keys of the agent first, then those of files; one that cannot be used (a FIDO key, an encrypted file) is noted
and passed over. Nothing is forwarded, and no password is asked for.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH

from controller.core.errors import AuthenticationError, ConnectionFailed
from controller.transport.deadline import Deadline
from controller.transport.sshconfig import SshSettings

_REQUEST_IDENTITIES = b"\x0b"  # SSH_AGENTC_REQUEST_IDENTITIES
_IDENTITIES_ANSWER = 12  # SSH_AGENT_IDENTITIES_ANSWER

_USABLE = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
_CERTIFICATE = "-cert-v01@openssh.com"

_MANY_KEYS = 5
"""sshd closes the connection after MaxAuthTries failures, 6 by default."""


class Authenticator:
    """The `auth_strategy` of `paramiko.SSHClient.connect` for one hop."""

    def __init__(self, hop: SshSettings, deadline: Deadline) -> None:
        self._hop = hop
        self._deadline = deadline
        self._tried: list[str] = []
        self._for_openssh: list[str] = []
        self._absent = False

    def authenticate(self, transport: Any) -> None:
        """Authenticate.

        Raises AuthenticationError with every key tried and what became of it (`tried` in its data; `for_openssh`
        are those that only OpenSSH can use), ConnectionFailed if the connection ended before any key was refused.
        """
        if self._accepts_anyone(transport):
            return
        refusals = 0
        for label, key in self._keys():
            signer = _Signer(key)
            try:
                next_methods = transport.auth_publickey(self._hop.user, signer)
            except (OSError, EOFError, paramiko.SSHException) as error:
                if self._deadline.expired or not (transport.is_active() or refusals):
                    raise ConnectionFailed(
                        f"lost {self._hop.label} while authenticating", why=str(error), fix="try again"
                    ) from error
                refusals += 1
                self._tried.append(f"{label}: {signer.problem or 'refused'}")
                if not transport.is_active():
                    self._tried.append("the host closed the connection: too many keys were offered")
                    break
                continue
            if next_methods:
                raise self._not_by_key(next_methods, after=f" after {label}")
            return
        raise AuthenticationError(
            f"{self._hop.label} accepts none of your keys for user {self._hop.user}",
            why="; ".join(self._tried) or "there is no key in the agent or in a file to offer",
            fix=self._fix(refusals),
            data={"tried": list(self._tried), "for_openssh": list(self._for_openssh)},
        )

    def _accepts_anyone(self, transport: Any) -> bool:
        """Ask with method "none", as OpenSSH does: it names the methods on offer (and some proxies accept it)."""
        try:
            transport.auth_none(self._hop.user)
        except paramiko.BadAuthenticationType as error:
            if "publickey" not in error.allowed_types:
                raise self._not_by_key(error.allowed_types) from error
            return False
        except (OSError, EOFError, paramiko.SSHException) as error:
            if transport.is_active() and not self._deadline.expired:
                return False
            raise ConnectionFailed(
                f"lost {self._hop.label} while authenticating", why=str(error), fix="try again"
            ) from error
        return True

    def _not_by_key(self, methods: list[str], after: str = "") -> AuthenticationError:
        return AuthenticationError(
            f"{self._hop.label} does not let user {self._hop.user} in by public key alone",
            why=f"it wants {' or '.join(methods)}{after}",
            fix="ask the host's administrator to allow public keys for this account",
            code="authentication-method",
        )

    def _fix(self, refusals: int) -> str:
        hop = self._hop
        if refusals >= _MANY_KEYS:
            return (
                f"name the right key: set IdentityFile and `IdentitiesOnly yes` for {hop.alias} in {hop.config_name}"
            )
        check = f"check `{hop.by_hand('true')}`"
        if self._absent and not refusals:
            return f"correct IdentityFile for {hop.alias} in {hop.config_name}, or make that key; then {check}"
        return f"{check}; add a key there with `{hop.by_hand(program='ssh-copy-id')}`, or unlock yours with `ssh-add`"

    def _keys(self) -> Iterator[tuple[str, Any]]:
        wanted = [(path, _public_blob(path)) for path in self._hop.identity_files]
        blobs = [blob for _, blob in wanted if blob is not None]
        held = self._agent_keys()
        first = [key for blob in blobs for key in held if bytes(key.blob) == blob]
        rest = [] if self._hop.identities_only else [key for key in held if bytes(key.blob) not in blobs]
        for key in first + rest:
            name = f"agent key {key.comment or key.get_name()}"
            if key.get_name().removesuffix(_CERTIFICATE) in _USABLE:
                yield name, key
            else:
                self._tried.append(f"{name}: {key.get_name()} keys cannot be used here")
                self._for_openssh.append(name)
        offered = {bytes(key.blob) for key in first}
        for path, blob in wanted:
            if blob not in offered and (key := self._file_key(path)) is not None:
                yield f"key file {path}", key

    def _agent_keys(self) -> list[Any]:
        if self._hop.agent is None:
            return []
        try:
            agent = _Agent(self._hop.agent, timeout_s=max(1.0, self._deadline.remaining()))
            return agent.keys()
        except (FileNotFoundError, ConnectionRefusedError):
            return []  # a SSH_AUTH_SOCK left behind by an agent that is gone
        except (OSError, paramiko.SSHException) as error:
            self._tried.append(f"agent {self._hop.agent}: {error}")
            return []

    def _file_key(self, path: str) -> Any:
        try:
            return paramiko.PKey.from_path(path)
        except FileNotFoundError:
            if self._hop.names_identities:
                self._tried.append(f"key file {path}: there is no such file")
                self._absent = True
        except (paramiko.PasswordRequiredException, TypeError):
            # cryptography reports a missing passphrase as TypeError
            self._tried.append(f"key file {path}: needs its passphrase; unlock it with `ssh-add {path}`")
            self._for_openssh.append(f"key file {path}")
        except Exception as error:  # noqa: BLE001 - cryptography documents no common base; it is reported
            self._tried.append(f"key file {path}: {error or type(error).__name__}")
            self._for_openssh.append(f"key file {path}")
        return None


class _Signer:
    """A key whose failure to sign fails one attempt only.

    Paramiko signs in the thread that runs the connection, where an exception (the agent's key was locked or
    withdrawn) would end the connection and with it the chance to offer the next key. An empty signature is refused
    by the server like any other wrong one.
    """

    def __init__(self, key: Any) -> None:
        self._key = key
        self.public_blob = getattr(key, "public_blob", None)
        self.problem = ""

    def get_name(self) -> str:
        return str(self._key.get_name())

    def asbytes(self) -> bytes:
        return bytes(self._key.asbytes())

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> Any:
        try:
            return self._key.sign_ssh_data(data, algorithm)
        except Exception as error:  # noqa: BLE001 - reported as this key's outcome
            self.problem = f"could not sign: {error}"
            return b""


class _Agent(AgentSSH):  # type: ignore[misc]
    """The agent behind a socket. Unlike paramiko's, it has a time limit and survives a key that it cannot parse."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        super().__init__()
        self._conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._conn.settimeout(timeout_s)
        try:
            self._conn.connect(path)
        except OSError:
            self._conn.close()
            raise

    def keys(self) -> list[Any]:
        """Return its keys. Each refers to this object, whose socket lives as long as they do."""
        kind, answer = self._send_message(_REQUEST_IDENTITIES)
        if kind != _IDENTITIES_ANSWER:
            raise paramiko.SSHException("the agent does not list its keys")
        pairs = [(answer.get_binary(), answer.get_text()) for _ in range(answer.get_int())]
        return [key for blob, comment in pairs if (key := self._parse(blob, comment)) is not None]

    def _parse(self, blob: bytes, comment: str) -> Any:
        try:
            return AgentKey(agent=self, blob=blob, comment=comment)
        except Exception:  # noqa: BLE001 - malformed: a key that nobody can use is no key
            return None


def _public_blob(path: str) -> bytes | None:
    """Return the public key of an identity, from the file itself or PATH.pub; None if there is none."""
    for name in (path, f"{path}.pub"):
        try:
            with open(name, encoding="ascii") as stream:
                fields = stream.readline().split()
            if len(fields) >= 2 and not fields[0].startswith("-"):
                return base64.b64decode(fields[1], validate=True)
        except (OSError, ValueError):
            continue
    return None

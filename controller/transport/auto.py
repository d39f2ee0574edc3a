"""Which transport: paramiko, unless the user's ssh configuration asks for something that only OpenSSH does.

Paramiko starts faster and tells more exactly what went wrong, so it comes first. Where it cannot do what the
configuration or the host asks for, OpenSSH takes its place for good, and `note` says why.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Self

from controller.core.errors import AuthenticationError
from controller.transport.base import Completed, Process, Transport
from controller.transport.hostkeys import Ask
from controller.transport.knownhosts import entry_name, read_known_hosts
from controller.transport.opening import Pause
from controller.transport.openssh import OpensshTransport
from controller.transport.ssh import CONNECT_TIMEOUT_S, SshTransport
from controller.transport.sshconfig import SshSettings, SshTarget, resolve_chain

_OFF = ("", "none", "no", "false", "any")


def needs_openssh(chain: Sequence[SshSettings]) -> str:
    """Return what in the configuration of a way to a host only OpenSSH can do; "" if paramiko can do it all.

    Raises HostKeyError if a known_hosts file is unreadable.
    """
    for hop in chain:
        for wants in (_option, _authority):
            what = wants(hop)
            if what:
                return f"{what} for {hop.alias}"
    return ""


class AutoTransport:
    """Implements `controller.transport.base.Transport` by the one that it picks when it first connects."""

    def __init__(
        self,
        target: SshTarget,
        *,
        ask: Ask | None = None,
        pause: Pause = nullcontext,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Connects nowhere yet; for the arguments see `OpensshTransport`."""
        self._target = target
        self._make: Mapping[str, Callable[[], Transport]] = {
            "paramiko": lambda: SshTransport(target, ask=ask, connect_timeout_s=connect_timeout_s),
            "openssh": lambda: OpensshTransport(target, ask=ask, pause=pause, connect_timeout_s=connect_timeout_s),
        }
        self._lock = threading.Lock()
        self._chosen: Transport | None = None
        self.note = ""

    def connect(self) -> None:
        """Choose, and connect and authenticate; see `base.Transport.connect`."""
        self._choose().connect()

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Process:
        """Start a remote command; see `base.Transport.start`."""
        return self._choose().start(argv, env=env)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout: float
    ) -> Completed:
        """Run a command to its end; see `base.Transport.run`."""
        return self._choose().run(argv, stdin=stdin, env=env, timeout=timeout)

    def close(self) -> None:
        """Close the connection. Idempotent; the choice stays."""
        with self._lock:
            if self._chosen is not None:
                self._chosen.close()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose(self) -> Transport:
        with self._lock:
            if self._chosen is not None:
                return self._chosen
            has_ssh = shutil.which("ssh") is not None
            reason = needs_openssh(resolve_chain(self._target)) if has_ssh else ""
            if reason:
                return self._take("openssh", f"your ssh configuration sets {reason}")
            paramiko = self._make["paramiko"]()
            try:
                paramiko.connect()
            except AuthenticationError as error:
                reason = _only_openssh(error) if has_ssh else ""
                paramiko.close()
                if not reason:
                    raise
                openssh = self._make["openssh"]()
                openssh.connect()
                self._chosen = openssh
                self.note = _sentence(reason)
                return openssh
            self._chosen = paramiko
            return paramiko

    def _take(self, name: str, reason: str) -> Transport:
        self._chosen = self._make[name]()
        self.note = _sentence(reason)
        return self._chosen


def _sentence(reason: str) -> str:
    return f'using the ssh program for this host: {reason} (transport = "openssh" in hosts.toml says so for good)'


def _only_openssh(error: AuthenticationError) -> str:
    """Return why OpenSSH may be let in where paramiko was not; "" if nothing speaks for it."""
    if error.code == "authentication-method":
        return error.why  # a password, a code, Kerberos: ssh can ask a person, or has a ticket
    keys = error.data.get("for_openssh")
    if isinstance(keys, list) and keys:
        return f"only it can use {', '.join(map(str, keys))}"
    return ""


_UNSUPPORTED = {
    "certificatefile": "CertificateFile",
    "pkcs11provider": "PKCS11Provider",
    "knownhostscommand": "KnownHostsCommand",
    "revokedhostkeys": "RevokedHostKeys",
    "proxyusefdpass": "ProxyUseFdpass",
    "hostbasedauthentication": "HostbasedAuthentication",
    "bindaddress": "BindAddress",
    "bindinterface": "BindInterface",
}
"""Options that paramiko has no equivalent for, by their names in `ssh -G`, and as the user writes them."""


def _option(hop: SshSettings) -> str:
    for name, shown in _UNSUPPORTED.items():
        value = " ".join(hop.options.get(name, ()))
        if value.lower() not in _OFF:
            return f"{shown} {value}"
    if " ".join(hop.options.get("pubkeyauthentication", ())) in ("no", "false"):
        return "PubkeyAuthentication no"
    methods = " ".join(hop.options.get("preferredauthentications", ()))
    if methods and "publickey" not in methods.split(","):
        return f"PreferredAuthentications {methods}"
    return ""


def _authority(hop: SshSettings) -> str:
    keys = read_known_hosts((*hop.user_known_hosts, *hop.global_known_hosts))
    names = (entry_name(hop.host_key_name, hop.port), hop.host_key_name)
    about = [key for key in keys if any(key.matches(name) for name in names)]
    if any(key.marker == "" for key in about):
        return ""  # its own key is on file, which is enough
    return next((f"@cert-authority in {key.where}" for key in about if key.marker == "@cert-authority"), "")

"""Deciding whether a host is the one we know. Fabric accepts any key, even a changed one; this does not."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any

from controller.core.errors import HostKeyError
from controller.transport.deadline import Deadline
from controller.transport.knownhosts import (
    KnownKey,
    Standing,
    append_line,
    entry_name,
    fingerprint,
    format_line,
    judge,
    known_types,
    read_known_hosts,
)
from controller.transport.sshconfig import SshSettings

Ask = Callable[[str], bool]
"""Puts a yes-or-no question to the person at the terminal."""


class HostKeyPolicy:
    """The whole verification for one hop, as paramiko's missing-host-key policy.

    The client is given no known keys of its own, so paramiko calls this for every connection, before it
    authenticates. `ask` is None where nobody can be asked; then an unknown key is refused.
    """

    def __init__(self, hop: SshSettings, ask: Ask | None, deadline: Deadline) -> None:
        """Read the known_hosts files. Raises HostKeyError if one of them is unreadable."""
        self._hop = hop
        self._ask = ask if hop.may_ask else None
        self._deadline = deadline
        self._name = hop.host_key_name if hop.host_key_alias else entry_name(hop.host_key_name, hop.port)
        self._keys = read_known_hosts((*hop.user_known_hosts, *hop.global_known_hosts))

    def known_types(self) -> list[str]:
        """Return the key types on file, to be asked for first: another type of key would look like a change."""
        return known_types(self._keys, self._name, self._hop.host_key_name)

    def missing_host_key(self, _client: Any, _hostname: str, key: Any) -> None:
        """Return if the key is known or the person says yes; else raise HostKeyError."""
        key_type, blob = str(key.get_name()), bytes(key.asbytes())
        standing, line = judge(self._keys, self._name, self._hop.host_key_name, blob)
        if standing is Standing.REVOKED:
            assert line is not None
            raise self._revoked(key_type, blob, line)
        if standing is Standing.CHANGED:
            assert line is not None
            raise self._changed(key_type, blob, line)
        if standing is Standing.UNKNOWN:
            self._introduce(key_type, blob)

    def _introduce(self, key_type: str, blob: bytes) -> None:
        path = self._hop.user_known_hosts[0] if self._hop.user_known_hosts else None
        if self._ask is None:
            raise self._unknown(key_type, blob, path)
        question = f"The host key of {self._hop.label} is not known.\nIt offers {key_type} {fingerprint(blob)}.\n" + (
            f"Trust it, and add it to {path}?" if path else "Trust it this once?"
        )
        with self._deadline.pause():
            trusted = self._ask(question)
        if not trusted:
            raise self._unknown(key_type, blob, path)
        if path is not None:
            append_line(path, format_line(self._name, key_type, blob, hashed=self._hop.hash_known_hosts))

    def _unknown(self, key_type: str, blob: bytes, path: str | None) -> HostKeyError:
        authority = next((k for k in self._keys if k.marker == "@cert-authority" and k.matches(self._name)), None)
        note = f"; {authority.where} trusts a certificate authority, which ctl cannot check" if authority else ""
        line = format_line(self._name, key_type, blob, hashed=False)
        searched = ", ".join((*self._hop.user_known_hosts, *self._hop.global_known_hosts)) or "no file"
        add = f"echo {shlex.quote(line)} >> {shlex.quote(path or os.path.expanduser('~/.ssh/known_hosts'))}"
        return HostKeyError(
            f"the host key of {self._hop.label} is not known",
            why=f"it offers {key_type} {fingerprint(blob)}; looked in {searched}{note}",
            fix="compare that with the output of `ssh-keygen -lf` on the host's own /etc/ssh/ssh_host_*_key.pub, "
            f"then add it: {add}",
            code="host-key-unknown",
            data={"fingerprint": fingerprint(blob), "key_type": key_type, "known_hosts_line": line},
        )

    def _changed(self, key_type: str, blob: bytes, line: KnownKey) -> HostKeyError:
        remove = (
            f"remove line {line.line} of {line.file}"
            if line.is_pattern
            else f"ssh-keygen -R {shlex.quote(self._name)} -f {shlex.quote(line.file)}"
        )
        return HostKeyError(
            f"the host key of {self._hop.label} has changed",
            why=f"it offers {key_type} {fingerprint(blob)}, but {line.where} holds "
            f"{line.key_type} {fingerprint(line.blob)}: either the host was reinstalled, or this is another machine",
            fix=f"ask its administrator; if the new key is right: {remove}",
            code="host-key-changed",
            data={
                "offered": fingerprint(blob),
                "known": fingerprint(line.blob),
                "file": line.file,
                "line": line.line,
            },
        )

    def _revoked(self, key_type: str, blob: bytes, line: KnownKey) -> HostKeyError:
        return HostKeyError(
            f"the host key of {self._hop.label} is revoked",
            why=f"it offers {key_type} {fingerprint(blob)}, which {line.where} marks as @revoked",
            fix="do not connect; ask the host's administrator for its new key",
            code="host-key-revoked",
            data={"offered": fingerprint(blob), "file": line.file, "line": line.line},
        )

"""Reading and extending OpenSSH's known_hosts files.

Paramiko's reader raises on `@revoked` and `@cert-authority` lines and rewrites the whole file to add one; this one
understands the first, passes over the second, skips what it cannot read, and only ever appends.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controller.core.errors import HostKeyError

_HASHED = "|1|"


class Standing(StrEnum):
    """What known_hosts files say about a key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One line of a known_hosts file. `marker` is "", "@revoked" or "@cert-authority"."""

    marker: str
    names: str
    key_type: str
    blob: bytes
    file: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_pattern(self) -> bool:
        return not self.names.startswith(_HASHED) and re.search(r"[*?!]", self.names) is not None

    def matches(self, name: str) -> bool:
        """Tell whether the line is about `name` (`host`, or `[host]:port` where the port is not 22)."""
        if self.names.startswith(_HASHED):
            return _hash_matches(self.names, name)
        found = False
        for pattern in self.names.split(","):
            if _glob_matches(pattern.removeprefix("!"), name):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


def fingerprint(blob: bytes) -> str:
    """Return `SHA256:...` as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def entry_name(host: str, port: int) -> str:
    """Return the name under which known_hosts files list a host at a port."""
    return host if port == 22 else f"[{host}]:{port}"


def read_known_hosts(paths: Iterable[str]) -> list[KnownKey]:
    """Return every readable line of those files that exist.

    Raises HostKeyError if a file exists and cannot be read: it might have said that a key is revoked.
    """
    keys: list[KnownKey] = []
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as stream:
                lines = stream.readlines()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise HostKeyError(
                f"cannot read the known host keys in {path}",
                why=str(error),
                fix=f"make the file readable: ls -l {path}",
                code="known-hosts-unreadable",
            ) from error
        for number, line in enumerate(lines, 1):
            key = _parse_line(line, path, number)
            if key is not None:
                keys.append(key)
    return keys


def judge(keys: Sequence[KnownKey], name: str, bare_name: str, blob: bytes) -> tuple[Standing, KnownKey | None]:
    """Return what `keys` say about a host offering `blob`, and the line that decided it.

    `name` is `entry_name`'s; `bare_name` is the host without a port, under which OpenSSH accepts (but never
    refuses) a key too. A host with other keys on file and none equal counts as changed, as in OpenSSH.
    """
    for key in keys:
        if key.marker == "@revoked" and key.blob == blob and (key.matches(name) or key.matches(bare_name)):
            return Standing.REVOKED, key
    other: KnownKey | None = None
    for key in keys:
        if key.marker:
            continue
        if key.blob == blob and (key.matches(name) or key.matches(bare_name)):
            return Standing.KNOWN, key
        if other is None and key.matches(name):
            other = key
    return (Standing.CHANGED, other) if other is not None else (Standing.UNKNOWN, None)


def known_types(keys: Sequence[KnownKey], name: str, bare_name: str) -> list[str]:
    """Return the types of the keys on file for a host, so that one of them is asked for."""
    types = [key.key_type for key in keys if not key.marker and (key.matches(name) or key.matches(bare_name))]
    return list(dict.fromkeys(types))


def signature_algorithms(key_type: str) -> tuple[str, ...]:
    """Return the signature algorithms of a key type: an RSA key is one type with several."""
    return ("rsa-sha2-512", "rsa-sha2-256") if key_type == "ssh-rsa" else (key_type,)


def format_line(name: str, key_type: str, blob: bytes, *, hashed: bool) -> str:
    """Return a known_hosts line, without its newline."""
    if hashed:
        salt = secrets.token_bytes(hashlib.sha1(usedforsecurity=False).digest_size)
        digest = hmac.digest(salt, name.encode(), "sha1")
        name = f"{_HASHED}{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    return f"{name} {key_type} {base64.b64encode(blob).decode()}"


def append_line(path: str, line: str) -> None:
    """Append one line to a known_hosts file, in one write; create it (0600) and its folder (0700) where needed.

    Raises HostKeyError if that cannot be done.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+b", buffering=0) as stream:
            size = stream.seek(0, os.SEEK_END)
            unfinished = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            data = ("\n" * unfinished + line + "\n").encode()
            if stream.write(data) < len(data):
                stream.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise HostKeyError(
            f"cannot add the host key to {path}",
            why=str(error),
            fix=f"make it writable, or add this line yourself: {line}",
            code="known-hosts-unwritable",
        ) from error


def _parse_line(line: str, path: str, number: int) -> KnownKey | None:
    fields = line.split()
    if not fields or fields[0].startswith("#"):
        return None
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if len(fields) < 3:
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownKey(marker=marker, names=fields[0], key_type=fields[1], blob=blob, file=path, line=number)


def _glob_matches(pattern: str, name: str) -> bool:
    """Match with OpenSSH's `*` and `?` only: brackets are part of `[host]:port`, so fnmatch will not do."""
    regex = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(regex, name, re.IGNORECASE) is not None


def _hash_matches(hashed: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in hashed[len(_HASHED) :].split("|"))
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)

"""The payload as this workstation has it: which files, under which hash, in what form they travel."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import remote_payload
from remote_payload.host.framing import manifest_digest

PACKAGE = "remote_payload"

_RECEIVER = "host/receive.py"

_LEFT_OUT = frozenset({"__pycache__", "tests"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The files of one payload, read once, so that hash and contents cannot differ.

    `files` maps `remote_payload/...` to the contents, `manifest` the same names to their sha256 as hex; `digest` is
    the hash of the manifest, which names the payload on every host.
    """

    files: Mapping[str, bytes]
    manifest: Mapping[str, str]
    digest: str

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(map(len, self.files.values()))

    @property
    def receiver(self) -> str:
        """The source of the program that receives this payload on a host."""
        return self.files[f"{PACKAGE}/{_RECEIVER}"].decode()

    def archive(self) -> bytes:
        """Return the files as a gzipped tar: the same bytes for the same payload."""
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, data in sorted(self.files.items()):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                entry.mode = 0o600
                tar.addfile(entry, io.BytesIO(data))
        return gzip.compress(plain.getvalue(), compresslevel=6, mtime=0)


def load_payload(folder: Path | None = None) -> Payload:
    """Read the payload from the installed `remote_payload` package, or from `folder`, a copy of it.

    It is every `.py` file below, without tests and byte code.
    """
    if folder is None:
        assert remote_payload.__file__ is not None
        folder = Path(remote_payload.__file__).parent
    files = {
        f"{PACKAGE}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(folder).parts)
    }
    manifest = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return Payload(files=files, manifest=manifest, digest=manifest_digest(manifest))

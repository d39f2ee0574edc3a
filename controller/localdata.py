"""A data set on the workstation (`local:PATH`): what it is made of, and where it will lie on a host."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError
from controller.core.model import Host
from controller.core.values import LOCAL
from remote_payload.host.data import data_digest
from remote_payload.host.framing import file_digest
from remote_payload.host.layout import Layout
from remote_payload.host.probe_data import probe_data

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalData:
    """A file or a folder, hashed. `files`: {"path" below it ("" for a file itself), "size", "sha256"}."""

    path: Path
    files: tuple[dict[str, Any], ...]
    digest: str

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry["size"] for entry in self.files)

    def describe(self) -> dict[str, Any]:
        """Return {"name", "bytes", "container", "kind"}: as preflight will find it on a host.

        Raises OSError.
        """
        found = probe_data(lambda what: None, str(self.path))
        return {
            "name": self.path.name, "bytes": self.size, "container": found["container"], "kind": found["kind"],
        }  # fmt: skip

    def path_on(self, host: Host) -> str:
        """Return where on a host it will lie."""
        return posixpath.join(Layout(host.workdir).data, self.digest, self.path.name)

    def pieces(self) -> Iterator[bytes]:
        """Yield the contents of all files in order. Raises OSError."""
        for entry in self.files:
            with open(self.path / entry["path"] if entry["path"] else self.path, "rb") as file:
                left = entry["size"]
                while left and (piece := file.read(min(PIECE_BYTES, left))):
                    left -= len(piece)
                    yield piece


def local_data(path: str, folder: Path) -> LocalData | None:
    """Return the data set if `path` is one of the workstation; relative paths start at `folder`.

    Every byte is read, for the hash. Raises ConfigError if it cannot be.
    """
    if not path.startswith(LOCAL):
        return None
    found = (folder / Path(path.removeprefix(LOCAL)).expanduser()).resolve()
    try:
        files = tuple(_entry(found, name) for name in _names(found))
    except OSError as error:
        raise ConfigError(
            f"cannot read the data set {found}: {error.strerror}",
            why=f"`{path}` is a path on this workstation, relative ones start at {folder}",
            fix="correct `path` in [data], or leave out `local:` if it lies on the host",
            code="data-missing",
        ) from error
    if not files:
        raise ConfigError(
            f"the data set {found} is an empty folder",
            fix="put its files there, or correct `path` in [data]",
            code="data-missing",
        )
    return LocalData(path=found, files=files, digest=data_digest(list(files)))


def _names(path: Path) -> list[str]:
    if not path.is_dir():
        return [""]
    return sorted(
        (Path(folder) / name).relative_to(path).as_posix()
        for folder, _, names in os.walk(path)
        for name in names
        if not name.startswith(("cache-", "."))  # what `datasets` may compute again
    )


def _entry(path: Path, name: str) -> dict[str, Any]:
    file = path / name if name else path
    return {"path": name, "size": file.stat().st_size, "sha256": file_digest(str(file))}

"""What a command brings along from this workstation: files and folders, without what its rules ignore, hashed."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pathspec

from controller.core.command import ALWAYS_IGNORED, UploadSection
from controller.core.errors import ConfigError
from remote_payload.host.framing import file_digest, tree_digest

IGNORE_FILE = ".ctlignore"
"""In an uploaded folder: lines as in .gitignore."""

LARGE_BYTES = 4 << 30
"""Every run gets a fresh copy of its uploads: what is larger is data, and belongs on the host once."""

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """One tree. `files` are {"path", "size", "sha256", "exec"} as the host gets them; `sources`: where each lies."""

    files: tuple[dict[str, Any], ...]
    sources: Mapping[str, Path]
    digest: str

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry["size"] for entry in self.files)

    def pieces(self, wanted: Sequence[str]) -> Iterator[bytes]:
        """Yield the contents with these checksums, in their order. Raises OSError."""
        by_content = {entry["sha256"]: entry for entry in reversed(self.files)}
        for sha256 in wanted:
            entry = by_content[sha256]
            with open(self.sources[entry["path"]], "rb") as file:
                left = entry["size"]
                while left and (piece := file.read(min(PIECE_BYTES, left))):
                    left -= len(piece)
                    yield piece


def local_files(uploads: Sequence[UploadSection], folder: Path, origin: str) -> LocalFiles:
    """Collect what `uploads` name; relative paths start at `folder`, `origin` is the playbook's file.

    Raises ConfigError for what is not there, cannot be read, would lie in one place twice, is larger than an upload
    should be, or is a link that leads out of its folder.
    """
    try:
        sources = _sources(uploads, folder, origin)
        files = tuple(_entry(name, sources[name]) for name in sorted(sources))
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {error.filename}" if isinstance(error, OSError) else f"{IGNORE_FILE} is not UTF-8"
        fix = "correct the path in [[uploads]], or make the file readable"
        fix = fix if isinstance(error, OSError) else "save it as UTF-8"
        raise ConfigError(f"{origin}: {what}", why=str(error), fix=fix, code="upload-missing") from error
    return LocalFiles(files=files, sources=sources, digest=tree_digest(files))


def _sources(uploads: Sequence[UploadSection], folder: Path, origin: str) -> dict[str, Path]:
    """Return where each file lies, by its place below the run's folder."""
    sources: dict[str, Path] = {}
    for upload in uploads:
        found = (folder / Path(upload.path).expanduser()).absolute()
        if not found.exists():
            raise ConfigError(
                f"{origin}: there is no {found} to upload",
                why=f"`{upload.path}` is a path on this workstation, relative ones start at {folder}",
                fix="go to the folder that holds it, or correct `path` in [[uploads]]",
                code="upload-missing",
            )
        for name, source in _collected(found, upload):
            if sources.setdefault(name, source) != source:
                raise ConfigError(
                    f"{origin}: {source} and {sources[name]} would both be {name}",
                    fix="give one of the two [[uploads]] another `to`",
                    code="upload-twice",
                )
    return sources


def _collected(found: Path, upload: UploadSection) -> Iterator[tuple[str, Path]]:
    """Yield (place below the run's folder, file) of one upload."""
    place = upload.to or found.name
    if found.is_file():
        if found.stat().st_size > LARGE_BYTES:
            raise _too_large(found, "large data belongs on the host")
        yield place, found
        return
    own = found / IGNORE_FILE
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    spec = pathspec.GitIgnoreSpec.from_lines([*ALWAYS_IGNORED, *lines, *upload.ignore])
    size = 0
    for path in _walk(found, found, spec):
        size += path.stat().st_size
        if size > LARGE_BYTES:
            raise _too_large(
                found, f"name what is not needed in `ignore`, or in {own}; large data belongs on the host"
            )
        yield posixpath.normpath(posixpath.join(place, path.relative_to(found).as_posix())), path


def _too_large(found: Path, fix: str) -> ConfigError:
    what = f"{found} holds more than {LARGE_BYTES >> 30} GiB"
    return ConfigError(
        what, why="each run gets a fresh copy of what is uploaded for it", fix=fix, code="upload-large"
    )


def _walk(root: Path, folder: Path, spec: pathspec.GitIgnoreSpec) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        is_folder = entry.is_dir()
        # A folder that is ignored is not entered: nothing below it can be taken back in, as in git.
        if spec.match_file(f"{name}/" if is_folder else name):
            continue
        if is_folder and entry.is_symlink():
            raise ConfigError(
                f"{path} is a link to a folder",
                why="what lies behind it may be anything, even the folder itself",
                fix=f"name it in `ignore`, or upload {path.resolve()} by itself",
                code="upload-link",
            )
        if is_folder:
            yield from _walk(root, path, spec)
        elif entry.is_file():
            if entry.is_symlink():
                _refuse_stray(root, path)
            yield path


def _refuse_stray(root: Path, link: Path) -> None:
    """Raise ConfigError for a link out of the uploaded folder: whoever uploads it may not know what it leads to."""
    target = link.resolve()
    if not target.is_relative_to(root.resolve()):
        raise ConfigError(
            f"{link} is a link to {target}, outside the uploaded folder",
            why="only what lies in the folder is uploaded with it; a link may lead to a key or to anything else",
            fix=f"name it in `ignore`, put a copy in its place, or upload {target} by itself",
            code="upload-link",
        )


def _entry(name: str, path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "path": name, "size": status.st_size, "sha256": file_digest(str(path)), "exec": bool(status.st_mode & 0o100),
    }  # fmt: skip

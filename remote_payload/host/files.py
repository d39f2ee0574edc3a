"""Files that survive a crash: written whole or not at all, and private to the user."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from typing import Any, Dict, Iterator, List, Optional, Tuple

CHUNK = 1 << 20
"""1 MiB: large enough that read() overhead vanishes, small enough for any host's memory."""


def atomic_write(path: str, data: bytes) -> None:
    """Replace `path` with `data` (mode 0600) so that a reader, or a reboot, sees the old content or the new one.

    Raises OSError; the old content then stands and no temporary file is left.
    """
    folder = os.path.dirname(os.path.abspath(path))
    descriptor, temporary = tempfile.mkstemp(prefix=".%s." % os.path.basename(path), dir=folder)
    try:
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    fsync_folder(folder)


def write_json(path: str, record: Any) -> None:
    """`atomic_write` of a record as indented JSON, for documents that people read too."""
    atomic_write(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace"))


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """Return the object in `path`, or None if the file does not exist.

    Raises ValueError (which json.JSONDecodeError is) naming the file if it holds no JSON object, OSError if it
    cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    try:
        record = json.loads(data)
    except ValueError as error:
        raise ValueError("%s is not JSON: %s" % (path, error)) from error
    if not isinstance(record, dict):
        raise ValueError("%s holds no JSON object" % path)
    return record


def read_lines(path: str) -> List[Dict[str, Any]]:
    """Return what `each_line` yields, for files that are known to be small."""
    return list(each_line(path))


def each_line(path: str) -> Iterator[Dict[str, Any]]:
    """Yield the JSON objects of a file with one a line; a cut or foreign line is skipped, an absent file is empty.

    The last line of a writer that was killed may be cut, and nothing that reads a run may fail because of it.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            record = parse_line(line)
            if record is not None:
                yield record


def parse_line(line: bytes) -> Optional[Dict[str, Any]]:
    """Return the JSON object of a line, None if it holds none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte of `data` to a blocking descriptor; os.write may take only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_folder(folder: str) -> None:
    """Make renames and creations in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is still the one at `path`: somebody may have unlinked or moved it in between."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def tail_text(path: str, limit: int = 8192) -> str:
    """Return the last `limit` bytes of a file as text, "" if there is none."""
    return tail_bytes(path, limit).decode("utf-8", "replace")


def tail_bytes(path: str, limit: int) -> bytes:
    """Return the last `limit` bytes of a file, none if it does not exist."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read()
    except FileNotFoundError:
        return b""


def sha256_of(paths: List[str]) -> Tuple[int, str]:
    """Return (bytes, sha256 hex) over the concatenation of the files."""
    digest = hashlib.sha256()
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(CHUNK), b""):
                digest.update(piece)
                total += len(piece)
    return total, digest.hexdigest()

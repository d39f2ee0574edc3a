"""Receives a data set from the workstation into WORKDIR/data/HASH/NAME, content addressed.

    in    request {"workdir", "digest", "name", "files": [{"path", "size", "sha256"}]}; a file by itself has path ""
    out   line {"have": true, "path"}: it is there; the end
          or   {"have": false}: send it
    in    frames {"end": bool} with pieces of the files, one after another in the order of the request
    out   line {"have": true, "path"}

An error may be answered in place of either line; what is sent from then on is not read. The data set is unpacked
beside, verified against every checksum, synced and renamed, so that it is whole or absent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any, BinaryIO, Dict, Iterable, Iterator, List

from remote_payload.host.errors import HostError
from remote_payload.host.files import fsync_folder
from remote_payload.host.framing import manifest_digest, read_frame
from remote_payload.host.layout import HASH, Layout
from remote_payload.host.protocol import check_record

SPARE_BYTES = 1 << 28
"""Room to leave on the disk that holds the work folder: run folders and logs live there too."""

STALE_S = 86400.0
"""Age of its newest write at which what a push left half done is certainly not being written any more."""

_STAGING = ".incoming-"


def receive(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Hold the conversation on this process's stdin. Raises HostError, ProtocolError."""
    check_record(request, {"workdir": str, "digest": str, "name": str, "files": list}, "data request")
    files, name = request["files"], request["name"]
    _check(request["digest"], name, files)
    store = os.path.join(Layout(request["workdir"]).data, request["digest"])
    target = os.path.join(store, name)
    if os.path.lexists(target):
        _answer(out, {"have": True, "path": target})
        return 0
    os.makedirs(store, mode=0o700, exist_ok=True)
    sweep_stale(_stagings(os.path.dirname(store)))
    size = sum(entry["size"] for entry in files)
    free = shutil.disk_usage(store).free
    if free < size + SPARE_BYTES:
        why = "%s bytes are free in %s, %s are needed" % (format(free, ","), store, format(size + SPARE_BYTES, ","))
        raise HostError(
            "data-no-room", "there is no room for the data set", why, "free some, or use data on the host"
        )
    _answer(out, {"have": False})
    staging = tempfile.mkdtemp(prefix=_STAGING, dir=store)
    try:
        with full_disk_told("data", store, size):
            _unpack(files, name, staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _answer(out, {"have": True, "path": target})
    return 0


def _stagings(data: str) -> Iterator[str]:
    for digest in os.listdir(data):
        folder = os.path.join(data, digest)
        if HASH.fullmatch(digest) and os.path.isdir(folder):
            yield from (os.path.join(folder, name) for name in os.listdir(folder) if name.startswith(_STAGING))


def sweep_stale(paths: Iterable[str]) -> None:
    """Remove those of a killed push's files and folders that were last written more than a day ago."""
    for path in paths:
        try:
            if time.time() - _written(path) <= STALE_S:
                continue
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            continue  # another push has just put it in its place, or swept it


def _written(path: str) -> float:
    """Return when a file, or anything in a folder, was last written: a folder's own time stands still meanwhile."""
    inside = (os.path.join(folder, name) for folder, _, files in os.walk(path) for name in files)
    return max(os.lstat(each).st_mtime for each in (path, *inside))


@contextlib.contextmanager
def full_disk_told(what: str, folder: str, size: int) -> Iterator[None]:
    """Raise HostError (`WHAT-disk-full`) where the disk that `size` bytes are received into becomes full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = "%s while %s bytes were received into %s" % (os.strerror(error.errno), format(size, ","), folder)
        fix = "free some (a quota may be the limit), then run the command again, or use data on the host"
        raise HostError("%s-disk-full" % what, "the disk that holds the work folder became full", why, fix) from error


def _unpack(files: List[Dict[str, Any]], name: str, staging: str, target: str) -> None:
    pieces = pieces_of_stdin()
    for entry in files:
        path = os.path.join(staging, name, entry["path"]) if entry["path"] else os.path.join(staging, name)
        store_file(path, entry, pieces)
    for folder, _, _ in os.walk(staging):
        fsync_folder(folder)
    try:
        os.rename(os.path.join(staging, name), target)
    except OSError:
        if not os.path.lexists(target):  # another push was faster: its copy is as good
            raise
    fsync_folder(os.path.dirname(target))


def data_digest(files: List[Dict[str, Any]]) -> str:
    """Return the name of a data set by its contents: the same on both sides."""
    return manifest_digest({entry["path"]: entry["sha256"] for entry in files})


def _check(digest: str, name: str, files: List[Dict[str, Any]]) -> None:
    paths = [name, *(entry["path"] for entry in files if entry["path"])]
    for path in paths:
        parts = path.split("/")
        if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
            raise _damaged("it names %r" % path)
    if "/" in name or not files or not HASH.fullmatch(digest) or data_digest(files) != digest:
        raise _damaged("its files do not have the hash %s" % digest)


class Pieces:
    """The bytes of all files in a row, whatever the frames' borders."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        self._frames = frames
        self._rest = b""

    def take(self, count: int) -> bytes:
        """Return at least one and at most `count` bytes."""
        if not self._rest:
            self._rest = next(self._frames, b"")
            if not self._rest:
                raise _damaged("it ended early")
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece


def pieces_of_stdin() -> Pieces:
    """Return the bodies of the frames on stdin as one stream, up to the frame that says `end`."""

    def frames() -> Iterator[bytes]:
        while True:
            header, piece = read_frame(sys.stdin.buffer)
            if piece:
                yield piece
            if header.get("end"):
                return

    return Pieces(frames())


def store_file(path: str, entry: Dict[str, Any], pieces: Pieces) -> None:
    """Write one announced file, synced. Raises HostError if its contents are not those of its checksum."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    digest, left = hashlib.sha256(), entry["size"]
    with open(path, "xb") as file:
        while left:
            piece = pieces.take(left)
            file.write(piece)
            digest.update(piece)
            left -= len(piece)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != entry["sha256"]:
        raise _damaged("%s has other contents than announced: was it written to meanwhile?" % (entry["path"] or path))


def _damaged(why: str) -> HostError:
    return HostError("data-damaged", "the data set did not arrive as it was announced", why, "run the command again")


def _answer(out: BinaryIO, record: Dict[str, Any]) -> None:
    out.write(json.dumps(record).encode() + b"\n")
    out.flush()

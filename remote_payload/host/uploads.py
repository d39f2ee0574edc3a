"""The files that a command brings along: received once by content, and copied afresh for each run.

    in    request {"workdir"}, body {"files": [{"path", "size", "sha256", "exec"}]}: the whole tree
    out   line {"digest", "missing": [sha256, ...]}: what this host does not have yet
    in    frames {"end": bool} with the contents of the missing ones, one after another in that order
    out   line {"digest"}; the tree is known from here on

Files lie in WORKDIR/files/blobs/HH/SHA256, trees in WORKDIR/files/trees/DIGEST.json. A run never works on these: its
`place` step copies the tree into its own `work` folder, verifying each file on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from typing import Any, BinaryIO, Dict, Iterator, List, Set

from remote_payload.host.data import SPARE_BYTES, full_disk_told, pieces_of_stdin, store_file, sweep_stale
from remote_payload.host.errors import HostError, ProtocolError
from remote_payload.host.files import fsync_folder, read_json, write_json
from remote_payload.host.framing import tree_digest
from remote_payload.host.layout import HASH, Layout
from remote_payload.host.protocol import check_record

_COPY_BYTES = 1 << 20

_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}")
"""A blob that is being received."""


def receive(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `uploads`: hold the conversation on this process's stdin. Raises HostError, ProtocolError."""
    check_record(request, {"workdir": str}, "uploads request")
    files = _checked(json.loads(body))
    layout, digest = Layout(request["workdir"]), tree_digest(files)
    wanted = _missing(layout, files)
    if wanted:
        sweep_stale(_temporaries(layout))
    _require_room(layout, wanted)
    _answer(out, {"digest": digest, "missing": [entry["sha256"] for entry in wanted]})
    if wanted:
        pieces, size = pieces_of_stdin(), sum(entry["size"] for entry in wanted)
        with full_disk_told("upload", layout.files, size):
            for entry in wanted:
                _receive_blob(layout, entry, pieces)
    trees = os.path.join(layout.files, "trees")
    os.makedirs(trees, mode=0o700, exist_ok=True)
    write_json(os.path.join(trees, "%s.json" % digest), {"files": files})
    _answer(out, {"digest": digest})
    return 0


def place(workdir: str, digest: str, target: str) -> int:
    """Copy a known tree into the new folder `target`; return the number of its files.

    Raises HostError if a file is not there or not as it was received.
    """
    layout = Layout(workdir)
    if not HASH.fullmatch(digest):
        raise ProtocolError("not a tree's hash: %r" % digest)
    tree = read_json(os.path.join(layout.files, "trees", "%s.json" % digest))
    if tree is None:
        raise _gone("the tree %s is not on this host" % digest)
    os.makedirs(target, mode=0o700, exist_ok=True)
    for entry in tree["files"]:
        path = os.path.join(target, entry["path"])
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            _copy(_blob(layout, entry["sha256"]), path, entry)
        except OSError as error:
            raise _gone("%s: %s" % (entry["path"], error)) from error
    return len(tree["files"])


def _copy(source: str, path: str, entry: Dict[str, Any]) -> None:
    digest = hashlib.sha256()
    with open(source, "rb") as reader, open(path, "xb") as writer:
        for piece in iter(lambda: reader.read(_COPY_BYTES), b""):
            digest.update(piece)
            writer.write(piece)
    if digest.hexdigest() != entry["sha256"]:
        raise _gone("the stored copy of %s is damaged" % entry["path"])
    os.chmod(path, 0o700 if entry["exec"] else 0o600)


def _checked(record: Any) -> List[Dict[str, Any]]:
    """Return the files of a tree whose names all stay below its folder, none of them twice."""
    files: List[Dict[str, Any]] = check_record(record, {"files": list}, "uploads body")["files"]
    seen: Set[str] = set()
    for entry in files:
        check_record(entry, {"path": str, "size": int, "sha256": str, "exec": bool}, "uploaded file")
        parts = entry["path"].split("/")
        if entry["path"] in seen or "\0" in entry["path"] or any(part in ("", ".", "..") for part in parts):
            raise ProtocolError("an upload names %r" % entry["path"])
        if not HASH.fullmatch(entry["sha256"]):
            raise ProtocolError("%r has no sha256" % entry["path"])
        seen.add(entry["path"])
    return files


def _missing(layout: Layout, files: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return one entry for each content that is not here, in the order of the tree."""
    wanted: Dict[str, Dict[str, Any]] = {}
    for entry in files:
        try:
            here = os.stat(_blob(layout, entry["sha256"])).st_size == entry["size"]
        except FileNotFoundError:
            here = False
        if not here:
            wanted.setdefault(entry["sha256"], entry)
    return list(wanted.values())


def _require_room(layout: Layout, wanted: List[Dict[str, Any]]) -> None:
    os.makedirs(layout.files, mode=0o700, exist_ok=True)
    size = 2 * sum(entry["size"] for entry in wanted)  # the store's copy and the run's
    free = shutil.disk_usage(layout.files).free
    if wanted and free < size + SPARE_BYTES:
        why = "%s bytes are free in %s, %s are needed" % (
            format(free, ","), layout.files, format(size + SPARE_BYTES, ","),
        )  # fmt: skip
        raise HostError(
            "upload-no-room", "there is no room for the uploads", why, "free some, or ignore what is not needed"
        )


def _receive_blob(layout: Layout, entry: Dict[str, Any], pieces: Any) -> None:
    target = _blob(layout, entry["sha256"])
    temporary = "%s.%s" % (target, os.urandom(4).hex())
    try:
        store_file(temporary, entry, pieces)
        os.replace(temporary, target)  # whoever else sends the same has the same bytes
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    fsync_folder(os.path.dirname(target))


def _temporaries(layout: Layout) -> Iterator[str]:
    for folder, _, names in os.walk(os.path.join(layout.files, "blobs")):
        yield from (os.path.join(folder, name) for name in names if _TEMPORARY.fullmatch(name))


def _blob(layout: Layout, sha256: str) -> str:
    return os.path.join(layout.files, "blobs", sha256[:2], sha256)


def _gone(why: str) -> HostError:
    return HostError("upload-gone", "the uploaded files cannot be put in place", why, "run the command again")


def _answer(out: BinaryIO, record: Dict[str, Any]) -> None:
    out.write(json.dumps(record).encode() + b"\n")
    out.flush()

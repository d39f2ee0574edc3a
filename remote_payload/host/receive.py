"""Receives the payload. Sent as text to `python -I -S -c`, so it imports nothing but the standard library.

Conversation, all in one remote command; the question is in its arguments, so that an unchanged payload costs no more
than any command does:
    argv WORKDIR DIGEST
    out  line  {"have": true, "path"}: the payload is there and whole; the end
         or    {"have": false}: send it
    in   frame {"manifest": {relpath: sha256}}
         frames {"last": bool} with pieces of a gzipped tar
    out  line  {"have": true, "path", "files"}
An error is one line {"error": {"code", "what", "why", "fix"}} and exit code 70.

A payload is unpacked into a folder beside, verified, synced, and renamed into place, so that it is whole or absent
however this ends, and whoever else pushes at the same time.
"""

import errno
import hashlib
import os
import stat
import struct
import sys
import time

# Every verb asks first whether the payload is there, and waits for this interpreter. What the answer "yes" does not
# need is imported where it is used: json (with re) and typing take longer to load than the files take to hash. No
# `from __future__ import annotations`: a Python 3.6 would not read as far as the word about its age.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Dict, Iterator, Tuple

# The frame of framing.py, which is not here yet; a test holds the two together.
_FRAME = struct.Struct(">II")
_MAX_HEADER = 1 << 20
_MAX_BODY = 1 << 26

_MAX_ARCHIVE_BYTES = 1 << 28
"""256 MiB, far above any payload: a wrong stream must not fill the disk."""

_STALE_S = 86400.0
"""Age at which a staging folder is certainly not being filled any more; a push takes seconds."""

_PLAIN = frozenset(range(0x20, 0x7F)) - set(b'"\\')
"""Of ASCII, what a JSON string holds as it is."""

_STAGING = ".incoming-"
_COMPLETE = ".complete"


class ReceiveError(Exception):
    """Explained to the user by the workstation: a stable code, what happened, why, what to do."""

    def __init__(self, code: str, what: str, why: str, fix: str) -> None:
        super().__init__(what)
        self.record = {"code": code, "what": what, "why": why, "fix": fix}


def _damaged(why: str) -> ReceiveError:
    return ReceiveError("push-damaged", "the payload did not arrive as it was sent", why, "run the command again")


def read_frame(stream: "BinaryIO") -> "Tuple[Dict[str, Any], bytes]":
    """Read one frame; raise ReceiveError if the stream ends early or is not ours."""
    import json

    head, body = _FRAME.unpack(_read_exactly(stream, _FRAME.size))
    if head > _MAX_HEADER or body > _MAX_BODY:
        raise _damaged("a frame announces a header of %d and a body of %d bytes" % (head, body))
    try:
        header = json.loads(_read_exactly(stream, head))
    except ValueError as error:
        raise _damaged("a frame's header is no JSON: %s" % error) from error
    if not isinstance(header, dict):
        raise _damaged("a frame's header is not an object")
    return header, _read_exactly(stream, body)


def _read_exactly(stream: "BinaryIO", count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = stream.read(count - len(data))
        if not piece:
            raise _damaged("the stream ended after %d of %d bytes" % (len(data), count))
        data += piece
    return bytes(data)


def manifest_text(files: "Dict[str, str]") -> bytes:
    """Return the lines whose hash is that of the payload: `HEX  RELATIVE/PATH`, sorted, as sha256sum prints them."""
    return "".join("%s  %s\n" % (files[name], name) for name in sorted(files)).encode()


def manifest_digest(files: "Dict[str, str]") -> str:
    """Return the payload hash; the same as framing.manifest_digest."""
    return hashlib.sha256(manifest_text(files)).hexdigest()


def check_manifest(manifest: "Dict[str, str]", digest: str) -> None:
    """Raise ReceiveError unless the manifest has this hash and all its names stay below the folder."""
    for name in manifest:
        parts = name.split("/")
        if name.startswith("/") or "\0" in name or "\n" in name or any(part in ("", ".", "..") for part in parts):
            raise _damaged("the manifest names %r" % name)
    if not manifest or manifest_digest(manifest) != digest:
        raise _damaged("the manifest does not have the hash %s" % digest)


def prepare_workdir(workdir: str) -> str:
    """Create the work folder (0700) and its payload folder, and return the latter's absolute path.

    Raises ReceiveError if the folder cannot be made, is another user's, or may be written by others: what lies in it
    is executed.
    """
    path = os.path.abspath(os.path.expanduser(workdir))
    payloads = os.path.join(path, "payload")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ReceiveError(
                "workdir-unsafe",
                "the work folder %s is not yours alone" % path,
                "owner %d, mode %04o; code in it is executed as user %d"
                % (status.st_uid, stat.S_IMODE(status.st_mode), os.geteuid()),
                "chmod 700 it if it is yours, or set another `workdir` in hosts.toml",
            )
        os.makedirs(payloads, mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the folder is right, and its disk full
        raise ReceiveError(
            "workdir-unusable",
            "cannot use the work folder %s" % path,
            str(error),
            "set `workdir` in hosts.toml to a folder that you may write",
        ) from error
    return payloads


def damaged_files(folder: str, manifest: "Dict[str, str]") -> "Iterator[str]":
    """Yield the names whose contents in `folder` are not those of the manifest."""
    for name, expected in manifest.items():
        try:
            with open(os.path.join(folder, name), "rb") as stream:
                actual = hashlib.sha256(stream.read()).hexdigest()
        except OSError:
            actual = ""
        if actual != expected:
            yield name


def is_complete(folder: str, digest: str) -> bool:
    """Tell whether `folder` holds the whole payload of this hash, unchanged since it was pushed."""
    try:
        with open(os.path.join(folder, _COMPLETE), "rb") as stream:
            text = stream.read()
    except OSError:
        return False
    if hashlib.sha256(text).hexdigest() != digest:
        return False
    lines = [line.partition("  ") for line in text.decode().split("\n")[:-1]]  # a name may hold any other line end
    return not any(damaged_files(folder, {name: expected for expected, _, name in lines}))


def unpack(archive: bytes, folder: str, manifest: "Dict[str, str]") -> None:
    """Write exactly the manifest's files, verified and synced, into `folder`.

    Raises ReceiveError for a link or special file, for a name that the manifest does not have (an absolute one, one
    with `..`), for missing or different contents.
    """
    import io
    import tarfile

    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for entry in tar:
                if not entry.isreg() or entry.name not in manifest:
                    raise _damaged("the archive holds %r, which does not belong to it" % entry.name)
                source = tar.extractfile(entry)
                assert source is not None  # a regular file has contents
                _write(os.path.join(folder, entry.name), source.read())
    except (tarfile.TarError, OSError, EOFError) as error:
        raise _damaged("cannot unpack the archive: %s" % error) from error
    wrong = sorted(damaged_files(folder, manifest))
    if wrong:
        raise _damaged("missing or different: %s" % ", ".join(wrong[:5]))
    for path, _folders, _files in os.walk(folder):
        _sync_folder(path)


def install(staging: str, target: str, manifest: "Dict[str, str]") -> None:
    """Move the unpacked payload from `staging` to `target`, which appears whole.

    If it is there already (another push came first, or it was damaged), each differing file is replaced in place:
    a running job keeps its path.
    """
    _write(os.path.join(staging, _COMPLETE), manifest_text(manifest))
    _sync_folder(staging)
    try:
        os.rename(staging, target)
    except OSError:
        if not os.path.isdir(target):
            raise
        for name in [*damaged_files(target, manifest), _COMPLETE]:
            os.makedirs(os.path.dirname(os.path.join(target, name)), mode=0o700, exist_ok=True)
            os.replace(os.path.join(staging, name), os.path.join(target, name))
        for path, _folders, _files in os.walk(target):
            _sync_folder(path)
    _sync_folder(os.path.dirname(target))


def sweep(payloads: str) -> None:
    """Remove staging folders that a killed push left more than a day ago."""
    import shutil

    for name in os.listdir(payloads):
        path = os.path.join(payloads, name)
        try:
            stale = name.startswith(_STAGING) and time.time() - os.lstat(path).st_mtime > _STALE_S
        except FileNotFoundError:
            continue  # another push has just put it in its place
        if stale:
            shutil.rmtree(path, ignore_errors=True)


def receive(workdir: str, digest: str, stdin: "BinaryIO", stdout: "BinaryIO") -> None:
    """Hold the conversation described above. Raises ReceiveError, OSError."""
    os.umask(0o077)
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise _damaged("%r is no hash" % digest)
    payloads = prepare_workdir(workdir)
    target = os.path.join(payloads, digest)
    if is_complete(target, digest):
        stdout.write(b'{"have": true, "path": %s}\n' % quoted(target))
        stdout.flush()
        return
    import shutil
    import tempfile

    _answer(stdout, {"have": False})
    request, _body = read_frame(stdin)
    manifest = request.get("manifest")
    if not isinstance(manifest, dict) or not all(isinstance(each, str) for each in manifest.values()):
        raise _damaged("the first frame has no manifest of names and hashes")
    check_manifest(manifest, digest)
    archive = _read_archive(stdin)
    sweep(payloads)
    staging = tempfile.mkdtemp(prefix=_STAGING, dir=payloads)
    try:
        unpack(archive, staging, manifest)
        install(staging, target, manifest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already, if it was renamed
    _answer(stdout, {"have": True, "path": target, "files": len(manifest)})


def _read_archive(stdin: "BinaryIO") -> bytes:
    archive = bytearray()
    last = False
    while not last:
        header, piece = read_frame(stdin)
        last = bool(header.get("last"))
        archive += piece
        if len(archive) > _MAX_ARCHIVE_BYTES:
            raise _damaged("the archive is larger than %d bytes" % _MAX_ARCHIVE_BYTES)
    return bytes(archive)


def _write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def quoted(text: str) -> bytes:
    """Return `text` as a JSON string, in ASCII alone; a name that is no Unicode keeps its surrogates."""
    units = struct.iter_unpack(">H", text.encode("utf-16-be", "surrogatepass"))
    return b'"%s"' % b"".join(b"%c" % unit if unit in _PLAIN else b"\\u%04x" % unit for (unit,) in units)


def _answer(stdout: "BinaryIO", record: "Dict[str, Any]") -> None:
    import json

    stdout.write(json.dumps(record).encode() + b"\n")
    stdout.flush()


def main() -> int:
    """Run the conversation on this process's stdin and stdout; return the exit code."""
    if sys.version_info < (3, 9):
        found = "%d.%d" % sys.version_info[:2]
        error = ReceiveError(
            "python-old",
            "the host's bootstrap Python is %s" % found,
            "%s is older than 3.9" % sys.executable,
            "set `bootstrap_python` in hosts.toml to a Python 3.9 or newer",
        )
        _answer(sys.stdout.buffer, {"error": error.record})
        return 70
    try:
        receive(sys.argv[1], sys.argv[2], sys.stdin.buffer, sys.stdout.buffer)
    except ReceiveError as failure:
        _answer(sys.stdout.buffer, {"error": failure.record})
        return 70
    except OSError as failure:
        record = {"code": "push-failed", "what": "the host could not store the payload", "why": str(failure)}
        _answer(sys.stdout.buffer, {"error": {**record, "fix": "check the disk that holds `workdir`"}})
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(main())

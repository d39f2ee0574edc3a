"""How records and bytes travel in one stream, and the digests that prove that they came over whole.

Shared by workstation and host; `receive.py`, which arrives before any other module, holds a copy of two functions.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any, Dict, Iterator, Sequence, Tuple

from remote_payload.host.errors import ProtocolError

_FRAME = struct.Struct(">II")
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 26
"""64 MiB: one frame of a log or an upload; larger things are sent in pieces."""


def pack_head(header: Dict[str, Any], body_bytes: int) -> bytes:
    """Return a frame up to its body, which is to follow: two big-endian uint32 (header length, body length), JSON."""
    head = json.dumps(header, separators=(",", ":")).encode()
    if len(head) > MAX_HEADER or body_bytes > MAX_BODY:
        raise ProtocolError("frame too large: header %d, body %d bytes" % (len(head), body_bytes))
    return _FRAME.pack(len(head), body_bytes) + head


def pack_frame(header: Dict[str, Any], body: bytes = b"") -> bytes:
    """Return one whole frame."""
    return pack_head(header, len(body)) + body


class FrameReader:
    """Turns bytes that arrive in any pieces into frames. A cut stream is seen as `pending` bytes at its end."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Tuple[Dict[str, Any], bytes]]:
        self._buffer += data
        while len(self._buffer) >= _FRAME.size:
            head, body = _FRAME.unpack_from(self._buffer)
            if head > MAX_HEADER or body > MAX_BODY:
                raise ProtocolError("frame announces header %d, body %d bytes: not our stream" % (head, body))
            end = _FRAME.size + head + body
            if len(self._buffer) < end:
                return
            header = json.loads(self._buffer[_FRAME.size : _FRAME.size + head])
            if not isinstance(header, dict):
                raise ProtocolError("frame header is not an object")
            with memoryview(self._buffer) as view:  # a slice of the buffer itself would be one copy more
                payload = bytes(view[_FRAME.size + head : end])
            del self._buffer[:end]
            yield header, payload


def read_frame(stream: Any) -> Tuple[Dict[str, Any], bytes]:
    """Read exactly one frame from a blocking binary stream; raise ProtocolError if it ends early."""
    prefix = _read_exactly(stream, _FRAME.size)
    head, body = _FRAME.unpack(prefix)
    if head > MAX_HEADER or body > MAX_BODY:
        raise ProtocolError("frame announces header %d, body %d bytes: not our stream" % (head, body))
    header = json.loads(_read_exactly(stream, head))
    if not isinstance(header, dict):
        raise ProtocolError("frame header is not an object")
    return header, _read_exactly(stream, body)


def _read_exactly(stream: Any, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = stream.read(count - len(data))
        if not piece:
            raise ProtocolError("stream ended after %d of %d bytes" % (len(data), count))
        data += piece
    return bytes(data)


def file_digest(path: str) -> str:
    """Return the sha256 of a file's contents as hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def manifest_digest(files: Dict[str, str]) -> str:
    """Return the payload hash: sha256 over sorted lines `HEX  RELATIVE/PATH`, as sha256sum prints them."""
    text = "".join("%s  %s\n" % (files[name], name) for name in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()


def tree_digest(files: Sequence[Dict[str, Any]]) -> str:
    """Return the hash of an upload: sha256 over sorted lines `SHA256 x|- PATH` of {"sha256", "exec", "path"}."""
    lines = sorted("%s %s %s\n" % (f["sha256"], "x" if f["exec"] else "-", f["path"]) for f in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()

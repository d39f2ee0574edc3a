"""A small ssh-agent that lists whatever keys a test wants, a FIDO key among them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import paramiko

_LIST, _LISTED, _SIGN, _SIGNED, _FAILURE = 11, 12, 13, 14, 5

FIDO_BLOB = b"".join(
    struct.pack(">I", len(part)) + part for part in (b"sk-ssh-ed25519@openssh.com", b"k" * 32, b"ssh:")
)

MALFORMED_BLOB = struct.pack(">I", 11) + b"ssh-ed25519" + b"\xff\xff\xff\xff"


class FakeAgent:
    """Offers `blobs` (which it cannot sign with) and then the keys of `files`, on the socket `path`."""

    def __init__(self, path: Path, *, blobs: Sequence[bytes] = (), files: Sequence[Path] = ()) -> None:
        self.path = path
        self.signed = 0
        self._keys = [paramiko.PKey.from_path(file) for file in files]
        self._blobs = [*blobs, *(key.asbytes() for key in self._keys)]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as stream:
            while head := stream.read(4):
                request = stream.read(struct.unpack(">I", head)[0])
                answer = self._answer(request)
                client.sendall(struct.pack(">I", len(answer)) + answer)

    def _answer(self, request: bytes) -> bytes:
        if request[0] == _LIST:
            listed = paramiko.Message()
            listed.add_byte(bytes([_LISTED]))
            listed.add_int(len(self._blobs))
            for number, blob in enumerate(self._blobs):
                listed.add_string(blob)
                listed.add_string(f"key-{number}")
            return bytes(listed.asbytes())
        if request[0] == _SIGN:
            message = paramiko.Message(request[1:])
            blob, data = message.get_binary(), message.get_binary()
            for key in self._keys:
                if key.asbytes() == blob:
                    self.signed += 1
                    signed = paramiko.Message()
                    signed.add_byte(bytes([_SIGNED]))
                    signed.add_string(key.sign_ssh_data(data).asbytes())
                    return bytes(signed.asbytes())
        return bytes([_FAILURE])

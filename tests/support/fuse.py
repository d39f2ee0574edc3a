"""A mounted file system made of one thread: dead (it never answers), mute or with errors at a chosen operation.

It speaks the kernel's protocol (linux/fuse.h, 7.x) as far as creating, writing and removing files needs, so that what
a network disk does can be had on any Linux machine with root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOKUP, FORGET, GETATTR, SETATTR, UNLINK, OPEN, WRITE, STATFS = 1, 2, 3, 4, 10, 14, 16, 17
RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, CREATE, INTERRUPT = (
    18, 20, 25, 26, 27, 28, 29, 34, 35, 36,
)  # fmt: skip
BATCH_FORGET = 42

HEADER = struct.Struct("<IIQQIIII")
REQUEST_LIMIT = 1 << 20
MNT_DETACH = 2


class FlakyFileSystem:
    """Answers every request but those of `mute`; `errors` maps an operation to the errno that it fails with.

    A request that was taken and not answered cannot be interrupted: SIGKILL does not end who made it.
    """

    def __init__(self, device: int, errors: dict[int, int], mute: frozenset[int] = frozenset()) -> None:
        self._device, self._errors, self._mute = device, errors, mute
        self.muted = threading.Event()
        """Set once somebody waits for an answer that never comes."""
        self._nodes: dict[str, int] = {}
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._halt.set()
        self._thread.join(10)

    def _serve(self) -> None:
        while not self._halt.is_set():
            if not select.select([self._device], [], [], 0.1)[0]:
                continue
            try:
                request = os.read(self._device, REQUEST_LIMIT)
            except OSError:  # unmounted, or the asker was killed meanwhile
                continue
            _, operation, unique, node, *_ = HEADER.unpack_from(request)
            if operation in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            if operation in self._mute:
                self.muted.set()
                continue
            code, body = self._answer(operation, node, request[HEADER.size :])
            try:
                os.write(self._device, struct.pack("<IiQ", 16 + len(body), -code, unique) + body)
            except OSError:
                continue

    def _answer(self, operation: int, node: int, body: bytes) -> tuple[int, bytes]:
        if operation in self._errors:
            return self._errors[operation], b""
        if operation == INIT:
            return 0, struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 16, 12, 1 << 17, 1, 32, 0, 0)
        if operation == LOOKUP:
            found = self._nodes.get(_name(body))
            return (0, _entry(found)) if found else (errno.ENOENT, b"")
        if operation in (GETATTR, SETATTR):
            return 0, struct.pack("<QII", 0, 0, 0) + _attributes(node)
        if operation == CREATE:
            number = self._nodes[_name(body[16:])] = max([1, *self._nodes.values()]) + 1
            return 0, _entry(number) + bytes(16)
        if operation == UNLINK:
            self._nodes.pop(_name(body), None)
            return 0, b""
        if operation == WRITE:
            return 0, body[16:20] + bytes(4)
        if operation == STATFS:
            return 0, struct.pack("<QQQQQIII28x", 1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 20, 4096, 255, 4096)
        if operation in (OPEN, OPENDIR):
            return 0, bytes(16)
        if operation in (READDIR, RELEASE, RELEASEDIR, FSYNC, FLUSH, ACCESS):
            return 0, b""
        return errno.ENOSYS, b""


@contextmanager
def mounted(
    point: Path, errors: dict[int, int] | None, mute: frozenset[int] = frozenset()
) -> Iterator[FlakyFileSystem | None]:
    """Mount at `point`; without `errors` nobody ever answers. Raises OSError where that is not allowed.

    At the end all who wait for an answer get an error.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    server = None
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"ctl-test", os.fsencode(point), b"fuse.ctltest", 0, options) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            if errors is not None:
                server = FlakyFileSystem(device, errors, mute)
            yield server
        finally:
            libc.umount2(os.fsencode(point), MNT_DETACH)
            if server is not None:
                server.close()
    finally:
        os.close(device)


def _name(body: bytes) -> str:
    return os.fsdecode(body.split(b"\0", 1)[0])


def _entry(node: int) -> bytes:
    return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + _attributes(node)


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o644
    return struct.pack("<QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

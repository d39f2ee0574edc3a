"""A TCP relay that misbehaves on request: delays, throttles, cuts after N bytes, freezes, refuses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 65536
_POLL_S = 0.1


class TcpProxy:
    """Relays a loopback port to `address`:`port`. The attributes may be changed at any time.

    `delay_s` is added to every piece, in each direction. `cut_after` is the number of bytes from the server after
    which every connection is closed (None: never); it counts over all connections from the time it is set.
    `cut_sent_after` is the same for bytes to the server. `rate` limits each direction to so many bytes a second.
    """

    def __init__(self, address: str, port: int, *, delay_s: float = 0.0) -> None:
        self._target = (address, port)
        self.delay_s = delay_s
        self._cut_after: int | None = None
        self._cut_sent_after: int | None = None
        self.cut_once = False
        """Whether a cut at a byte happens once, instead of to every connection from then on."""
        self.rate: float | None = None
        self.received = 0
        """Bytes passed on from the server so far."""
        self.sent = 0
        """Bytes passed on to the server so far."""
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        """Accepted so far."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def cut_after(self) -> int | None:
        return self._cut_after

    @cut_after.setter
    def cut_after(self, count: int | None) -> None:
        with self._lock:
            self._cut_after = count

    @property
    def cut_sent_after(self) -> int | None:
        return self._cut_sent_after

    @cut_sent_after.setter
    def cut_sent_after(self, count: int | None) -> None:
        with self._lock:
            self._cut_sent_after = count

    def calm(self) -> None:
        """End every misbehaviour."""
        self.cut_after = self.cut_sent_after = None
        self.delay_s, self.rate = 0.0, None
        self.refuse(False)
        self.thaw()

    def freeze(self) -> None:
        """Pass nothing on from now on, and keep every connection open: a path that went dark."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def refuse(self, refusing: bool = True) -> None:
        """Close new connections at once, as an overloaded sshd does."""
        self._refusing = refusing

    def cut(self) -> None:
        """Close every connection now; new ones are accepted."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self._closed = True
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self._refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [client, server]
            threading.Thread(target=self._relay, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._relay, args=(server, client, True), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, from_server: bool) -> None:
        try:
            while data := source.recv(_CHUNK_BYTES):
                while not self._flowing.wait(_POLL_S):
                    if self._closed:
                        return
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self.rate:
                    time.sleep(len(data) / self.rate)
                allowed = self._allow(len(data), from_server)
                sink.sendall(data[:allowed])
                if allowed < len(data):
                    if self.cut_once:
                        self.cut_after = self.cut_sent_after = None
                    self.cut()
                    return
        except OSError:
            pass  # the other side, or a cut, ended it
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _allow(self, count: int, from_server: bool) -> int:
        with self._lock:
            left = self._cut_after if from_server else self._cut_sent_after
            allowed = count if left is None else min(count, left)
            if from_server:
                self.received += allowed
                self._cut_after = None if left is None else left - allowed
            else:
                self.sent += allowed
                self._cut_sent_after = None if left is None else left - allowed
            return allowed

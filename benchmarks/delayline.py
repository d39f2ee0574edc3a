"""A TCP relay that delays every byte and throttles none: round-trip time where the kernel offers no netem.

It runs as a process of its own, so that it takes no time from the one that is measured.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from typing import Self

_CHUNK_BYTES = 1 << 18
_CHUNKS_IN_FLIGHT = 512
"""128 MiB for each direction: more than any window here, so that the line itself never limits."""


class DelayLine:
    """Relays the loopback port `port` to `address`:`target`; without delay until `set_rtt_ms`."""

    def __init__(self, address: str, target: int) -> None:
        command = [sys.executable, "-m", "benchmarks.delayline", address, str(target)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._ask(""))

    def set_rtt_ms(self, rtt_ms: float) -> None:
        """Add `rtt_ms` milliseconds to every round trip from now on."""
        self._ask(f"{rtt_ms}\n")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=10)  # it ends with its stdin


class _Relay:
    """Both directions of every connection, a thread for each end of each line."""

    def __init__(self, address: str, port: int) -> None:
        self._target = (address, port)
        self.rtt_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                return
            for sock in (client, server):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((client, server), (server, client)):
                line: queue.Queue[tuple[float, bytes]] = queue.Queue(_CHUNKS_IN_FLIGHT)
                threading.Thread(target=self._take, args=(source, line), daemon=True).start()
                threading.Thread(target=self._give, args=(sink, line), daemon=True).start()

    def _take(self, source: socket.socket, line: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            line.put((time.monotonic() + self.rtt_s / 2, data))

    def _give(self, sink: socket.socket, line: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, data = line.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
            except OSError:
                data = b""  # the other side is gone; what still arrives is dropped
                while line.get()[1]:
                    continue
                return


def main() -> None:
    relay = _Relay(sys.argv[1], int(sys.argv[2]))
    print(relay.port, flush=True)
    for line in sys.stdin:
        relay.rtt_s = float(line) / 1000
        print("set", flush=True)


if __name__ == "__main__":
    main()

"""A transport without a network: remote commands are real processes of this machine, cut on request.

It keeps the contract of `controller.transport.base`, so that stages are tested against the real payload in
milliseconds; what only SSH can do wrong is tested against a real sshd.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence

from controller.core.errors import ConnectionFailed, ConnectionLost
from controller.transport.base import Completed


class LocalProcess:
    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None, cut_after: int | None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        weakref.finalize(self, self._stderr.close)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **(env or {})},
        )
        self._left = cut_after
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]

    def write(self, data: bytes, *, timeout: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def read(self, *, timeout: float) -> bytes:
        if self._left == 0:
            raise ConnectionLost("cut by the test")
        if not self._selector.select(timeout):
            raise TimeoutError
        data = os.read(self._process.stdout.fileno(), min(1 << 16, self._left or 1 << 16))  # type: ignore[union-attr]
        if self._left is not None:
            self._left -= len(data)
        return data

    def wait(self, *, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.read(timeout=timeout):
            assert time.monotonic() < deadline
        return self._process.wait(timeout)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # what it did not read is written once more
                    stream.close()
        self._selector.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    @property
    def stderr(self) -> bytes:
        self._stderr.seek(0)
        return self._stderr.read()


class LocalTransport:
    """`cuts`: how many bytes of stdout each of the next `start` calls delivers before the connection "breaks".

    `unreachable`: how many of the next commands fail before anything is sent.
    """

    note = ""

    def __init__(self) -> None:
        self.cuts: list[int] = []
        self.unreachable = 0
        self.lose_answers = 0
        self.started: list[Sequence[str]] = []

    def connect(self) -> None:
        pass

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> LocalProcess:
        if self.unreachable:
            self.unreachable -= 1
            raise ConnectionFailed("unreachable, says the test")
        self.started.append(argv)
        return LocalProcess(argv, env, self.cuts.pop(0) if self.cuts else None)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout: float
    ) -> Completed:
        process = self.start(argv, env=env)
        try:
            with contextlib.suppress(BrokenPipeError):  # a command that reads nothing, as over SSH
                process.write(stdin, timeout=timeout)
                process.close_stdin()
            output = b""
            while data := process.read(timeout=timeout):
                output += data
            code = process.wait(timeout=timeout)
        finally:
            process.close()
        if self.lose_answers:
            self.lose_answers -= 1
            raise ConnectionLost("the answer was lost, says the test")
        return Completed(code=code, stdout=output, stderr=process.stderr)

    def close(self) -> None:
        pass

    def __enter__(self) -> LocalTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A transport whose commands are forks of one warm process: the payload's verbs in milliseconds, hundreds of them.

Only the start of a Python interpreter is saved. The verb reads a pipe, writes a pipe, locks and writes the same
files, and the supervisors that it starts are processes like any other. The process that is forked has imported the
payload and nothing else: a fork of pytest's own, with all that hundreds of test modules import, takes fifty times as
long. As a module this is that process: on stdin a line `{"verb", "bytes"}` and the request, on stdout a line
`{"code", "bytes"}` and the answer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from remote_payload.host import main as payload

if TYPE_CHECKING:
    from controller.transport.base import Completed

DEADLINE_S = 60.0
"""For a verb, and for the server to end once nobody asks: tens of milliseconds on a machine at work."""


class ForkedTransport:
    """`cut_sent` and `cut_received`: for each of the next commands, after how many bytes its line is cut (None: not).

    A negative `cut_received` counts from the end of the answer.
    A cut request reaches the host up to there and is followed by an end of file, as sshd passes a broken connection
    on; a cut answer reaches the controller up to there, while the verb goes on to its end. `on_cut` is called each
    time.
    """

    note = ""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self.cut_sent: list[int | None] = []
        self.cut_received: list[int | None] = []
        self.on_cut: Callable[[], None] = lambda: None
        self.commands = 0
        self.answers: list[bytes] = []
        """What the verbs wrote whose answers were cut, whole."""

    def __enter__(self) -> Self:
        root = Path(__file__).resolve().parents[2]
        self._server = subprocess.Popen(
            [sys.executable, "-S", __file__, str(self._deadline_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(root)},
            process_group=0,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.close()
        try:
            self._server.wait(self._deadline_s)
        except subprocess.TimeoutExpired:
            # A verb hangs, and the server in it. What verbs have started are supervisors, in sessions of their own.
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            raise
        finally:
            self._server.stdout.close()

    @property
    def pid(self) -> int:
        """Of the server, and of the process group that it makes with its verbs."""
        return self._server.pid

    def connect(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout: float
    ) -> Completed:
        from controller.core.errors import ConnectionFailed, ConnectionLost
        from controller.transport.base import Completed

        sent = self.cut_sent.pop(0) if self.cut_sent else None
        received = self.cut_received.pop(0) if self.cut_received else None
        self.commands += 1
        code, output = self._ask(argv[-1], stdin if sent is None else stdin[:sent])
        if sent is not None:
            self.answers.append(output)
            self.on_cut()
            raise ConnectionFailed(f"cut by the test after {sent} bytes of the request")
        if received is not None and received < len(output):
            self.answers.append(output)
            self.on_cut()
            raise ConnectionLost(f"cut by the test after {received} bytes of the answer")
        return Completed(code=code, stdout=output, stderr=b"")

    def _ask(self, verb: str, request: bytes) -> tuple[int, bytes]:
        """Have a verb run, fed with `request`; return its exit code and what it wrote."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"verb": verb, "bytes": len(request)}).encode() + b"\n" + request)
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, f"the server has ended: verb {verb} took longer than {self._deadline_s:g} s, or see its stderr"
        head = json.loads(line)
        return head["code"], self._server.stdout.read(head["bytes"])


def serve(deadline_s: float) -> None:
    for module, _ in payload.VERBS.values():
        importlib.import_module(f"remote_payload.host.{module}")
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        code, output = run_verb(asked["verb"], sys.stdin.buffer.read(asked["bytes"]), deadline_s)
        sys.stdout.buffer.write(json.dumps({"code": code, "bytes": len(output)}).encode() + b"\n" + output)
        sys.stdout.buffer.flush()


def run_verb(verb: str, request: bytes, deadline_s: float = DEADLINE_S) -> tuple[int, bytes]:
    """Run a verb of the payload in a fork, fed with `request`; return its exit code and what it wrote.

    Raises TimeoutError, and ends it, where the answer has no end after `deadline_s`: the verb hangs, or what it has
    started holds its stdout.
    """
    deadline = time.monotonic() + deadline_s
    request_read, request_write = os.pipe()
    answer_read, answer_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        with contextlib.suppress(BaseException):
            signal.alarm(math.ceil(deadline_s) + 10)  # should the server be gone
            os.dup2(request_read, 0)
            os.dup2(answer_write, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.closerange(3, 256)
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - until _exit
            sys.argv = [payload.__file__, verb]
            code = payload.main()
            sys.stdout.flush()
        os._exit(code)
    os.close(request_read)
    os.close(answer_write)
    with os.fdopen(request_write, "wb") as stream, contextlib.suppress(BrokenPipeError):
        stream.write(request)
    try:
        output = _read_to_end(answer_read, deadline)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(answer_read)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), output


def _read_to_end(descriptor: int, deadline: float) -> bytes:
    pieces: list[bytes] = []
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    raise TimeoutError("the verb's answer has no end")


if __name__ == "__main__":
    serve(float(sys.argv[1]))

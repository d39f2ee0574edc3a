"""Looks at files in a child process with limits: a damaged file, or one made to harm, costs its own answer only.

As a module it is the child: one JSON request a line on stdin, {"path", "nan"}, one answer a line on stdout:
{"facts"} or {"damaged"} or {"unreadable"}, the last two with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from typing import Any

from remote_payload.survey.facts import DamagedError, UnreadableError, inspect

MEMORY_BYTES = 8 << 30
"""Beside the file itself; the import of torch with CUDA takes about 1 GiB of it."""

CPU_S = 600
"""Of one child for all its files, given anew to each: a bomb of nested containers ends there."""

START_S = 120.0
"""For the first answer: the import of torch from a cold network file system takes a minute."""

SLOWEST_BYTES_PER_S = 4 << 20
"""A file that is read slower than this has a disk that hangs."""


class Reader:
    """One child, started when it is first needed and again after it died. A context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, path: str, *, nan: bool) -> dict[str, Any]:
        """Return the child's answer; of a file that killed its reader, {"damaged": how}."""
        try:
            size = os.path.getsize(path)
        except OSError as error:
            return {"damaged": error.strerror or str(error)}
        process = self._started()
        timer = threading.Timer(START_S + size / SLOWEST_BYTES_PER_S, process.kill)
        timer.daemon = True
        timer.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"path": path, "nan": nan}).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            self._end()
            return {"damaged": "reading it killed its reader (exit code %s)" % process.returncode}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "remote_payload.survey.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # No GPU may be touched: the run's lease is held, but its memory is being proved free.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died with our request unread
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        self._process = None


def _limit(size: int) -> None:
    """Limit this process for its next file of `size` bytes, which torch may map privately as a whole."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = MEMORY_BYTES + size
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    spent = int(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (spent if hard < 0 else min(spent, hard), hard))


def _answer(path: str, nan: bool) -> dict[str, Any]:
    try:
        _limit(os.path.getsize(path))
        return {"facts": inspect(path, nan)}
    except UnreadableError as error:
        return {"unreadable": str(error)}
    except DamagedError as error:
        return {"damaged": str(error)}
    except MemoryError:
        return {"damaged": "it needs more than %d GiB of memory" % (MEMORY_BYTES >> 30)}
    except OSError as error:
        return {"damaged": error.strerror or str(error)}


def main() -> int:
    """Answer until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        sys.stdout.write(json.dumps(_answer(request["path"], request["nan"])) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

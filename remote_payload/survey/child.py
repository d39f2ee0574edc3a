"""Looks at files in a child process with limits: a damaged file, or one made to harm, costs its own answer only.

As a module it is the child: one JSON request a line on stdin, {"path", "nan"}, one answer a line on stdout:
{"facts"} or {"damaged"} or {"unreadable"}, the last two with the reason.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from remote_payload.host.asked import AskedChild, ChildDied
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
    """One child for one file after the other. A context manager."""

    def __init__(self) -> None:
        # No GPU may be touched: the run's lease is held, but its memory is being proved free.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        self._child = AskedChild([sys.executable, "-m", "remote_payload.survey.child"], env)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()

    def ask(self, path: str, *, nan: bool) -> dict[str, Any]:
        """Return the child's answer; of a file that killed its reader, {"damaged": how}."""
        try:
            size = os.path.getsize(path)
        except OSError as error:
            return {"damaged": error.strerror or str(error)}
        try:
            return self._child.ask({"path": path, "nan": nan}, START_S + size / SLOWEST_BYTES_PER_S)
        except ChildDied as error:
            return {"damaged": "reading it killed its reader (%s)" % error}


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

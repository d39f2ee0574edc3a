"""A child process that answers each JSON line with one, within a time, and is replaced once it died."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from typing import Any, Dict, Mapping, Optional, Sequence

END_S = 10.0
"""For a child whose stdin was closed: it ends at once, unless its last file still hangs on a dead disk."""


class ChildDied(Exception):
    """The child ended, or was killed at its time, without a whole answer; `code` is its exit code, -9 if killed."""

    def __init__(self, code: Optional[int]) -> None:
        super().__init__("exit code %s" % code)
        self.code = code


class AskedChild:
    """One process, started when it is first asked and again after it died. For one thread at a time."""

    def __init__(self, argv: Sequence[str], env: Optional[Mapping[str, str]] = None) -> None:
        self._argv, self._env = list(argv), env
        self._process: Optional[subprocess.Popen[bytes]] = None

    def ask(self, request: Dict[str, Any], timeout_s: float) -> Dict[str, Any]:
        """Return the answer. Raises ChildDied; OSError if the child cannot be started."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = _Deadline(process, timeout_s)
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            killed = deadline.over()
        code = self.end() if killed or not answer.endswith(b"\n") else None
        if not answer.endswith(b"\n"):
            raise ChildDied(code)
        found: Dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> Optional[int]:
        """End the child; return its exit code, None if there was no child."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died with our request unread
            process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(END_S)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.end()  # something else ended it while it was idle: the next file must not be blamed
        if self._process is None:
            self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._env)
        return self._process


class _Deadline:
    """Kills a process after a time, unless `over` was first: a timer alone may fire after the answer was read."""

    def __init__(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._over = self._killed = False
        self._timer = threading.Timer(timeout_s, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def _fire(self) -> None:
        with self._lock:
            if not self._over:
                self._killed = True
                self._process.kill()

    def over(self) -> bool:
        """Say whether the process was killed; it will not be from here on."""
        with self._lock:
            self._over = True
        self._timer.cancel()
        return self._killed

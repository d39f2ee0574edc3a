"""A person at a terminal: an interactive shell on a pseudo-terminal, and what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

PATIENCE_S = 60.0
"""For anything to appear: two busy cores start Python in seconds."""


def _own_terminal() -> None:
    """In the child: take the terminal, and hear its hang-up also where the tests themselves run under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Terminal:
    """`bash -i` on a terminal of `size` (columns, lines), in a session of its own so that job control works."""

    def __init__(self, cwd: Path, env: Mapping[str, str], size: tuple[int, int] = (100, 30)) -> None:
        self._cwd = cwd
        self._env = {key: value for key, value in env.items() if key not in ("CI", "NO_COLOR")}
        self._env |= {"TERM": "xterm-256color", "PS1": "$ ", "HISTFILE": "", "LC_ALL": "C.UTF-8"}
        self._screen = pyte.HistoryScreen(*size, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd, secondary = pty.openpty()
        self._set_size(self._screen.columns, self._screen.lines)
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            cwd=self._cwd, env=self._env, stdin=secondary, stdout=secondary, stderr=secondary,
            start_new_session=True, preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(secondary)
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read_on, daemon=True)
        self._reader.start()
        self.wait_for("$")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.send_signal(signal.SIGHUP)
        self.hang_up()
        self._shell.kill()
        self._shell.wait(timeout=10)

    def hang_up(self) -> None:
        """Take the terminal away from those on it."""
        if self._fd >= 0:
            self._closing.set()
            self._reader.join(timeout=10)
            os.close(self._fd)
            self._fd = -1

    def press(self, keys: str) -> None:
        """Type `keys` as they are: `\\r` is enter, `\\x1b` escape, `\\x1a` Ctrl-Z."""
        os.write(self._fd, keys.encode())

    def run(self, line: str) -> None:
        """Type a command line."""
        self.press(line + "\r")

    def answer(self, line: str) -> str:
        """Run a command line, and return the first line that it prints."""
        mark = f"done-{time.monotonic_ns()}"
        self.run(f"{line}; echo {mark[:5]}''{mark[5:]}")
        self.wait(lambda: mark in self.text(), mark)
        lines = self.text().splitlines()
        at = next(index for index, shown in enumerate(lines) if shown == mark)
        return lines[at - 1].removeprefix("$ ")

    def resize(self, columns: int, lines: int) -> None:
        with self._lock:
            self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def lines(self) -> list[str]:
        """Return what the screen shows, without what was scrolled away."""
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    def text(self) -> str:
        return "\n".join(self.lines())

    def history(self) -> str:
        """Return what was scrolled away, and the screen."""
        with self._lock:
            top = ["".join(row[column].data for column in range(self._screen.columns)).rstrip()
                   for row in self._screen.history.top]  # fmt: skip
        return "\n".join([*top, *self.lines()])

    def wait_for(self, wanted: str) -> str:
        """Wait until the screen shows `wanted`, and return the screen."""
        self.wait(lambda: wanted in self.text(), wanted)
        return self.text()

    def wait_until_gone(self, unwanted: str) -> str:
        self.wait(lambda: unwanted not in self.text(), f"no {unwanted}")
        return self.text()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what!r}; the screen shows:\n{self.text()}"
            time.sleep(0.05)

    def mode(self) -> tuple[bool, bool]:
        """Return whether the terminal edits lines and whether it echoes, as a shell needs both."""
        flags = termios.tcgetattr(self._fd)[3]
        return bool(flags & termios.ICANON), bool(flags & termios.ECHO)

    def cursor_shown(self) -> bool:
        with self._lock:
            return not self._screen.cursor.hidden

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read_on(self) -> None:
        while not self._closing.is_set():
            if not select.select([self._fd], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # the shell is gone
                return
            with self._lock:
                self._stream.feed(data)

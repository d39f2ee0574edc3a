"""Single keys from the terminal: a reader thread, and the terminal's mode that it needs.

The mode is `cbreak`: keys come at once and without an echo, while Ctrl-C and Ctrl-Z go on to send their signals.
Whatever happens to the process, the mode that was found is put back.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from typing import Any

ESCAPE_WAIT_S = 0.05
"""The bytes of one key arrive together; an escape with nothing behind it for so long is the key itself."""

_SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "[H": "home", "[F": "end", "[1~": "home", "[4~": "end",
    "[5~": "pageup", "[6~": "pagedown", "[3~": "delete", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "OH": "home", "OF": "end",
}  # fmt: skip
"""After an escape, as xterm, VT and the Linux console send them."""

_CONTROLS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\t": "tab"}


def decode(text: str) -> Iterator[str]:
    """Yield the keys in what was read: names such as `up`, `esc`, `enter`, or single characters.

    Sequences of no known key are dropped whole, so that they are never taken for letters.
    """
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character != "\x1b":
            if character in _CONTROLS or character.isprintable():
                yield _CONTROLS.get(character, character)
            continue
        if position == len(text) or text[position] not in "[O":
            yield "esc"
            continue
        end = position + 1
        while end < len(text) and not "@" <= text[end] <= "~":
            end += 1
        sequence = text[position : end + 1]
        position = end + 1
        if sequence in _SEQUENCES:
            yield _SEQUENCES[sequence]


def in_foreground(fd: int) -> bool:
    """Return whether the terminal `fd` is this process's: one in the background that changed it would be stopped."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # no terminal, or it is gone
        return False


class KeyReader:
    """Calls `on_key` from a thread of its own for each key, between `start` and `stop`."""

    def __init__(self, fd: int, on_key: Callable[[str], None]) -> None:
        self._fd = fd
        self._on_key = on_key
        self._found: list[Any] | None = None
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None

    @property
    def gone(self) -> bool:
        """Whether the terminal is: its reader ended by itself, and no key will ever come."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self) -> None:
        """Take over the keyboard; nothing happens in the background, where it belongs to somebody else."""
        if self._thread is not None or not in_foreground(self._fd):
            return
        self._found = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSADRAIN)
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._read_on, args=(self._wake[0],), name="ctl-keys", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give the keyboard back as it was found. Safe to call twice, and from a signal handler."""
        if self._thread is None or self._wake is None:
            return
        thread, wake = self._thread, self._wake
        self._thread, self._wake = None, None
        with contextlib.suppress(BrokenPipeError):  # the reader has ended by itself, with its terminal
            os.write(wake[1], b"x")
        if thread is not threading.current_thread():
            thread.join(timeout=1.0)
        os.close(wake[1])
        if self._found is not None and in_foreground(self._fd):
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._found)

    def _read_on(self, wake: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            while True:
                ready, _, _ = select.select([self._fd, wake], [], [])
                if wake in ready:
                    return
                data = os.read(self._fd, 1024)
                if not data:
                    return
                if data.endswith(b"\x1b") and select.select([self._fd], [], [], ESCAPE_WAIT_S)[0]:
                    data += os.read(self._fd, 1024)
                for key in decode(decoder.decode(data)):
                    self._on_key(key)
        except OSError:
            return  # the terminal was closed; SIGHUP says the rest, and where it is ignored `gone`
        finally:
            os.close(wake)

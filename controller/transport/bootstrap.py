"""How an argv becomes one remote command line, and how its output is told from everything around it.

sshd hands the command line to the user's login shell, whichever that is. So the line is a constant that sh, dash,
bash, zsh, fish and tcsh all read alike (no `!`, backslash or newline, no quote inside its single quotes), followed
by one base64 word, whose letters, digits, `+` and `/` mean nothing to any of them. The constant makes `sh` decode and
evaluate that word. Nothing is read from stdin: dash would run data that follows a script there.

Secrets never belong in `env` here: the word is visible in the host's process list, and base64 hides nothing. They
travel in a frame on stdin.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping, Sequence

_CONSTANT = """exec sh -c 'eval "$(printf %s "$1" | base64 -d)"' ctl """

MAX_LINE_BYTES = 120_000
"""Linux takes 131072 bytes (MAX_ARG_STRLEN) for one argument, and the login shell gets the line as one."""

CHATTER_KEPT_BYTES = 65536
"""Enough for any message of the day; what a shell prints is kept for error messages only."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_MARK = b"\x1e"
"""ASCII record separator: rare at the end of text, so that almost no output has to be held back (see `feed`)."""


def new_nonce() -> str:
    """Return 16 hex digits that no output can guess."""
    return secrets.token_hex(8)


def _quote(text: str) -> str:
    """Quote for sh. Always: a bare `if`, `A=b` or `exit` would be a keyword, an assignment, a built-in."""
    if "\0" in text:
        raise ValueError(f"a NUL byte cannot be passed to a command: {text!r}")
    return "'" + text.replace("'", "'\"'\"'") + "'"


def command_line(argv: Sequence[str], env: Mapping[str, str] | None, nonce: str) -> str:
    """Return the command line for sshd's exec request that runs `argv` with `env` added to its environment.

    On stdout the command's own output is preceded by a begin marker and followed by a trailer with its exit code
    (127 not found, 126 not executable, 128 + N killed by signal N); `OutputScanner` takes both away.

    Raises ValueError for an empty argv, a program name that begins with `-`, a NUL byte, an environment name that
    is none, or a line longer than MAX_LINE_BYTES: larger things travel on stdin.
    """
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise ValueError(f"not a program to run: {list(argv)[:1]!r}")
    exports = ""
    for name, value in (env or {}).items():
        if not _ENV_NAME.fullmatch(name):
            raise ValueError(f"not the name of an environment variable: {name!r}")
        exports += f"export {name}={_quote(value)}\n"
    words = " ".join(_quote(word) for word in argv)
    # The subshell's exec takes built-ins, functions and aliases out of the search for the program.
    script = (
        f"printf '\\036ctl-begin {nonce}\\n'\n({exports}exec {words})\nprintf '\\036ctl-end {nonce} %d\\n' \"$?\"\n"
    ).encode("utf-8", "surrogateescape")
    script += b"\n" * (-len(script) % 3)  # so that no `=` is needed, which zsh and csh may expand
    line = _CONSTANT + base64.b64encode(script).decode()
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"command line of {len(line)} bytes, the limit is {MAX_LINE_BYTES}: send data on stdin")
    return line


class OutputScanner:
    """Splits a stream into chatter, the command's output and the exit code.

    `begun` says that the host ran our script, `code` is the exit code once the trailer was seen.
    """

    def __init__(self, nonce: str) -> None:
        self._begin = b"%bctl-begin %b\n" % (_MARK, nonce.encode())
        self._end = b"%bctl-end %b " % (_MARK, nonce.encode())
        self._held = b""
        self.begun = False
        self.code: int | None = None
        self._chatter = b""

    @property
    def chatter(self) -> bytes:
        """What a login shell or ForceCommand wrapper printed around the command: its last 64 KiB."""
        return self._chatter if self.begun else self._chatter + self._held

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream and return what is certainly the command's output.

        Held back is only a tail that could be the beginning of the trailer: one that starts with the mark. Bytes
        after the trailer are chatter: a detached child may keep the stream open for hours.
        """
        data = self._held + data
        self._held = b""
        if self.code is not None:
            self._keep(data)
            return b""
        if not self.begun:
            start = data.find(self._begin)
            if start < 0:
                kept = max(0, len(data) - len(self._begin) + 1)
                self._keep(data[:kept])
                self._held = data[kept:]
                return b""
            self._keep(data[:start])
            self.begun = True
            data = data[start + len(self._begin) :]
        return self._until_trailer(data)

    def _until_trailer(self, data: bytes) -> bytes:
        start = data.find(self._end)
        if start >= 0:
            stop = data.find(b"\n", start)
            if stop < 0:
                self._held = data[start:]
            else:
                self.code = int(data[start + len(self._end) : stop])
                self._keep(data[stop + 1 :])
            return data[:start]
        mark = data.rfind(_MARK, max(0, len(data) - len(self._end)))
        if mark >= 0 and self._end.startswith(data[mark:]):
            self._held = data[mark:]
            return data[:mark]
        return data

    def _keep(self, data: bytes) -> None:
        self._chatter = (self._chatter + data)[-CHATTER_KEPT_BYTES:]

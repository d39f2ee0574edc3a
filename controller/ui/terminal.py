"""stdout is data, stderr is talk: the two consoles, and the one way to ask a person."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from controller.core.errors import Interrupted, RefusedError
from controller.core.outputs import not_ours_text
from controller.ui.clean import clean_block

PIPE_WIDTH = 8192
"""Columns where there is no terminal, more than any value has: paths and argv stay whole for grep."""


@cache
def out_console() -> Console:
    return _console(sys.stdout)


@cache
def err_console() -> Console:
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=cast("IO[str]", Unpadded(stream)), highlight=False, width=PIPE_WIDTH)


class Unpadded:
    """A text stream whose lines end with their text: rich fills tables up with blanks, which a reader would keep."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(_PADDING.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_PADDING = re.compile(r" +(?=\n)")


@contextmanager
def silence() -> Iterator[None]:
    """Say nothing on stderr through `err_console`, as `-qq` wants it: errors and questions have ways of their own."""
    console = err_console()
    console.quiet = True
    try:
        yield
    finally:
        console.quiet = False


@contextmanager
def spoken() -> Iterator[None]:
    """Speak even in a `silence`: what a person is asked about is shown."""
    console = err_console()
    before, console.quiet = console.quiet, False
    try:
        yield
    finally:
        console.quiet = before


def can_ask() -> bool:
    """Tell whether a person sees a question and can answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_yes_no(question: str) -> bool:
    """Ask on the terminal; False where there is none to ask on. Anything but y or yes is a no."""
    if not can_ask():
        return False
    with spoken():
        err_console().print(Text(clean_block(question) + " [y/N] "), end="")
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def require_yes(question: str, *, unattended: str, fix: str, declined: str, why: str = "") -> None:
    """Go on only if a person says so. Raises RefusedError (`confirmation-needed`: nobody is there; `declined`)."""
    if not can_ask():
        raise RefusedError(unattended, why=why, fix=fix, code="confirmation-needed")
    try:
        sure = ask_yes_no(question)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {declined}") from None
    if not sure:
        raise RefusedError(f"declined: {declined}", code="declined")


_LOSSES = {"clear": "delete", "quarantine": "move aside", "resume": "go on with"}


def loss_question(host: str, output: Mapping[str, Any], listing: Mapping[str, Any], *, keepable: bool = True) -> str:
    """Return the question before a folder is touched: what becomes of how much, where, and which run wrote it.

    `keepable`: whether the command takes `--stale quarantine` in place of it.
    """
    count, partial, marker = int(output["entries"]), listing.get("partial"), listing.get("marker") or {}
    amount = f"{count:,} {'entry' if count == 1 else 'entries'}"
    whose = f"written by run {marker['run_id']}" if marker else "which no run of ctl wrote"
    half = f", deleting {partial:,} half-written" if partial and output["stale"] == "resume" else ""
    others = not_ours_text(listing)
    beside = f"; {others}, {'moved with them' if output['stale'] == 'quarantine' else 'left alone'}" if others else ""
    keep = " (`--stale quarantine` would keep them)" if output["stale"] == "clear" and marker and keepable else ""
    return f"{_LOSSES[output['stale']]} {amount} of {output['path']} on host {host}, {whose}{half}{keep}{beside}?"


def print_json(document: Any) -> None:
    """Print the one document of `--json`."""
    print(json.dumps(document, indent=1, default=str))

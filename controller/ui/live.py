"""The dashboard: frames at the bottom of the terminal, on stderr, and the keys that choose what they show."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TextIO

from rich.text import Text

from controller.core.errors import CtlError
from controller.ui.board import Controls, Known, RunBoard, Snapshot
from controller.ui.fleet import fleet_lines
from controller.ui.frame import render
from controller.ui.glyphs import UNICODE, Glyphs, glyphs_for
from controller.ui.keymap import Action, Pane, Situation, UiState, press
from controller.ui.keys import KeyReader, in_foreground
from controller.ui.logbuffer import LogPage
from controller.ui.overlays import trace_end
from controller.ui.painter import Painter
from controller.ui.suspension import Suspension

REFRESH_S = 0.25
"""Four frames a second: enough for a spinner to look alive, little enough for a slow link. Keys wait for it too."""

HOLD_S = 20.0
"""How long a failed run stays on the screen for a key that says somebody is there to read its traceback."""

SMALLEST = (20, 5)
"""Columns and lines below which nothing can be said."""


class LiveView:
    """A dashboard of one or several runs on a terminal. Its last frame stays in the scrollback.

    Each run is a board from `sink`, which may be fed from any thread, as often as things happen.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        keyboard: int | None = None,
        clock: Callable[[], float] = time.time,
        size: Callable[[], tuple[int, int]] | None = None,
        replay: bool = False,
        on_playback: Callable[[], None] | None = None,
        on_screen: Callable[[], bool] | None = None,
        hold_s: float = HOLD_S,
        error_follows: bool = False,
    ) -> None:
        """`keyboard` is the descriptor of a terminal to read keys from; `clock` gives seconds since the epoch.

        `on_screen` says whether the terminal is ours at the moment, and not that of another process in front.
        `error_follows`: a failure is told whole after the last frame, which leaves it out.
        """
        self._stream = stream or sys.stderr
        self._clock = clock
        self._size = size or functools.partial(_size_of, self._stream)
        self._glyphs = glyphs_for(self._stream.encoding)
        self._painter = Painter(self._stream)
        self._on_screen = on_screen or functools.partial(_is_ours, self._stream)
        self._boards: list[RunBoard] = []
        self._state = UiState()
        self._replay = replay
        self._error_follows = error_follows
        self._on_playback = on_playback
        self._hold_s = hold_s
        self._leave_at: float | None = None
        self._stay = threading.Event()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._halted = True
        self._closing = self._last = False
        self._lock = threading.RLock()  # a signal handler may find it held by the code that it interrupted
        self._ticker: threading.Thread | None = None
        self._keys = KeyReader(keyboard, self.press) if keyboard is not None else None
        self._suspension = Suspension(self._suspend, self._resume, self._restore)

    @property
    def left(self) -> bool:
        """Whether somebody has asked to leave a replay, or a run that has ended."""
        return self._wake.is_set()

    @property
    def told(self) -> Collection[tuple[object, ...]]:
        """None: a frame shows the end of a traceback at most."""
        return ()

    def sink(self, *, run: str, host: str, known: Known) -> RunBoard:
        """Add a run and return its board; from the second on the view is a table with a row each."""
        board = RunBoard(run=run, host=host, known=known, clock=self._clock)
        for event in known.earlier:
            board.event(event)
        with self._lock:
            self._boards.append(board)
            if len(self._boards) == 2:
                self._state = replace(self._state, opened=None)
        return board

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the dashboard off the screen, to ask a question on a terminal as it was found."""
        self._suspend()
        try:
            yield
        finally:
            self._resume()

    def __enter__(self) -> Self:
        self._suspension.__enter__()
        self._ticker = threading.Thread(target=self._tick_on, name="ctl-frames", daemon=True)
        self._resume()
        self._ticker.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc_type is None:
                with suppress(KeyboardInterrupt):  # as good a key as any to leave with
                    self._hold()
        finally:
            self._closed.set()
            self._wake.set()
            if self._ticker is not None:
                self._ticker.join(timeout=5)
            if self._keys is not None:
                self._keys.stop()
            with suppress(OSError), self._lock:  # the terminal may be gone
                if not self._halted:
                    # What stays is the dashboard, or the table, whatever was looked at last.
                    self._state = UiState(opened=None if len(self._boards) > 1 else 0)
                    self._closing, self._last = self._error_follows, True
                    self._paint(keys=False)
                    self._painter.leave()
                self._halted = True
            self._suspension.__exit__(exc_type, exc, trace)

    # ------------------------------------------------------------------------------------------ frames

    def frame(self, width: int, height: int, glyphs: Glyphs = UNICODE, *, keys: bool = False) -> list[Text]:
        """Return the frame of this moment for a terminal of `width` by `height` cells, one of which is kept free."""
        width, height = max(SMALLEST[0], width), max(SMALLEST[1], height)
        rows = height - 1  # the cursor needs a line of its own, or the terminal scrolls
        shots = [board.snapshot() for board in self._boards]
        if not shots:
            return []
        state = self._state
        if state.opened is None:
            lines = fleet_lines(shots, state, width, rows, glyphs)
            for line in lines:
                line.truncate(width, overflow="ellipsis" if glyphs is UNICODE else "crop")
            return lines
        left = None if self._leave_at is None else max(0.0, self._leave_at - time.monotonic())
        return render(
            shots[state.opened], width, rows, page_of=functools.partial(self._page, state), state=state,
            glyphs=glyphs, keys=keys, replay=self._replay, runs=len(shots), ends_in_s=left,
            closing=self._closing, last=self._last,
        )  # fmt: skip

    def _page(self, state: UiState, count: int) -> LogPage:
        board = self._boards[state.opened or 0]
        with board.lock:
            return board.log_buffer.page(
                count, end=state.frozen, skip=state.skip, needle=state.needle, rank=state.rank
            )

    def _tick_on(self) -> None:
        """Draw a frame every REFRESH_S, never more often."""
        while not self._closed.is_set():
            due = time.monotonic() + REFRESH_S
            with self._lock:
                if not self._halted and self._on_screen():
                    try:
                        self._paint(keys=self._keys is not None and self._keys.running)
                    except OSError:
                        return  # the terminal is gone, or its reader; the run is watched all the same
            self._closed.wait(max(0.0, due - time.monotonic()))

    def _paint(self, *, keys: bool) -> None:
        size = self._size()
        self._painter.paint(self.frame(*size, self._glyphs, keys=keys), size)

    # -------------------------------------------------------------------------------------------- keys

    def press(self, key: str) -> None:
        """Take a key, by the name that `keys.decode` gives it."""
        self._leave_at = None
        self._stay.set()
        with self._lock:
            self._state, action = press(self._state, key, self._situation())
            opened = self._state.opened
        if action is Action.CLOSE:
            self._wake.set()
        elif action is Action.PLAYBACK and self._on_playback is not None:
            self._on_playback()
        elif action is Action.DETACH:
            for controls in self._controls(opened):
                controls.detach()
        elif action is Action.STOP:
            # It takes as long as the job takes to end, and the keys go on meanwhile.
            threading.Thread(target=self._stop, args=(opened,), name="ctl-stop", daemon=True).start()

    def _controls(self, opened: int | None) -> Sequence[Controls]:
        boards = self._boards if opened is None or len(self._boards) > 1 else [self._boards[opened]]
        return [board.controls for board in boards if board.controls is not None]

    def _stop(self, opened: int | None) -> None:
        controls = self._boards[opened or 0].controls
        try:
            said = controls.stop() if controls is not None else "there is nothing to stop yet"
        except CtlError as error:
            said = f"{error.what}; {error.fix}" if error.fix else error.what
        with self._lock:
            self._state = replace(self._state, said=said)

    def _situation(self) -> Situation:
        boards = self._boards
        if not boards:
            return Situation(live=False)
        board = boards[self._state.opened if self._state.opened is not None else self._state.chosen]
        shot = board.snapshot()
        width, height = self._size()
        failures = shot.failures
        room = height - 2
        return Situation(
            runs=len(boards),
            live=board.controls is not None,
            ended=all(self._ended(each) for each in boards) if self._state.opened is None else self._ended(board),
            failed=bool(failures),
            replay=self._replay,
            total=self._page(self._state, 0).total,
            page=max(1, height - 4 if self._state.pane is not Pane.BOARD else height // 3),
            trace_end=trace_end(failures, width, room, self._glyphs),
            ranks=1 + max((*shot.silent, *shot.ranks.values()), default=-1),
        )

    @staticmethod
    def _ended(board: RunBoard) -> bool:
        return board.snapshot().view.end is not None

    def _hold(self) -> None:
        """Keep a failed run, or a replay at its end, on the screen for as long as somebody reads it."""
        if self._keys is None or not self._keys.running or self._hold_s <= 0:
            return
        shots: list[Snapshot] = [board.snapshot() for board in self._boards]
        failed = any(shot.view.end and (shot.cause or shot.failures) for shot in shots)
        if not (self._replay or failed) or self._wake.is_set():
            return
        if not self._replay:
            self._leave_at = time.monotonic() + self._hold_s
            self._stay.clear()
            if not self._stay.wait(self._hold_s):
                return
        while not self._keys.gone and not self._wake.wait(REFRESH_S):
            pass  # in steps: signals are only heard between them, and a terminal that is gone has no more keys

    # -------------------------------------------------------------------------- the terminal's ownership

    def _suspend(self) -> None:
        with self._lock:
            if not self._halted:
                self._painter.wipe()
            self._halted = True
        if self._keys is not None:
            self._keys.stop()

    def _resume(self) -> None:
        if self._keys is not None:
            self._keys.start()
        with self._lock:
            self._halted = False

    def _restore(self) -> None:
        """Give the terminal back as it was found; a frame that stands there stays."""
        if self._keys is not None:
            self._keys.stop()
        self._painter.leave()


def _is_ours(stream: TextIO) -> bool:
    """In the background the terminal is somebody else's, who is typing on it."""
    return not stream.isatty() or in_foreground(stream.fileno())


def _size_of(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of the terminal behind a stream; 80 by 24 where it does not tell."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return (size.columns or 80), (size.lines or 24)

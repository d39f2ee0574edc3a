"""Signals that take the terminal away from a dashboard: Ctrl-Z and its return, and the end of the process.

Handlers can only be set in the main thread; in any other one nothing is done here.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

FATAL = (signal.SIGTERM, signal.SIGHUP)
"""They end this process as they always do, once the terminal is as it was found."""


class Suspension:
    """A context manager around the ownership of a terminal.

    `suspend` is called before a stop that is announced, `restore` before a fatal signal and after a stop that was
    not, `resume` when the process goes on.
    """

    def __init__(self, suspend: Callable[[], None], resume: Callable[[], None], restore: Callable[[], None]) -> None:
        self._suspend = suspend
        self._resume = resume
        self._restore = restore
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGTSTP: self._on_stop, signal.SIGCONT: self._on_continue}
            handlers.update((number, self._on_fatal) for number in FATAL)
            for number, handler in handlers.items():
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell without job control
                    self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._suspend()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the process goes on
        signal.signal(signal.SIGTSTP, self._on_stop)
        self._resume()

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        """After a SIGSTOP, of which nobody was told, the shell has written below the frame and set its own mode."""
        self._restore()
        self._resume()

    def _on_fatal(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

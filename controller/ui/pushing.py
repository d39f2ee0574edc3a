"""How far a data set is on its way to a host, where no run is watched: a bar, or without a terminal some lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from controller.ui.clean import clean

LINES_S = 10.0
"""Between two lines where there is no terminal."""


class PushBar:
    """Called with each event of a contact, as `stages.base.Emit`; shows those that say how much is sent."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._said = clock()

    def __call__(self, event_type: str, /, **fields: object) -> None:
        if event_type != "stage":
            return
        if fields["status"] != "started":
            self.close()
        done, total = fields.get("done"), fields.get("total")
        if not isinstance(done, int) or not isinstance(total, int):
            return
        if self._console.is_terminal:
            self._draw(str(fields["name"]), done, total)
        elif self._clock() - self._said >= LINES_S:
            self._said = self._clock()
            self._console.print(f"{clean(str(fields['name']))} {clean(str(fields['text']))}", markup=False)

    def _draw(self, name: str, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("sending {task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                TransferSpeedColumn(), TimeRemainingColumn(), console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task(clean(name), total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

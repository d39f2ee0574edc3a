"""A run as it goes on, in the output of a notebook's cell: one display that is updated, without widgets."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from controller.core.events import Event
from controller.core.logs import LogFolder, LogLine
from controller.core.runview import Contact, RunView, StageView, Status
from controller.core.state import reduce
from controller.ui.charts import sparkline
from controller.ui.clean import clean
from controller.ui.formats import (
    bytes_text,
    count_text,
    duration_text,
    ending_css,
    left_text,
    memory_text,
    number_text,
    state_text,
)
from controller.ui.markup import Markup, block, escape, facts, join, tag
from controller.ui.notebook import framed

UPDATE_S = 0.5
"""Seconds between two updates: each is a message to the browser and is stored in the notebook."""

TAIL = 8
"""Log lines shown; all are in the run folder, and `run.logs()` gives them."""

HISTORY = 40
"""Cells of a sparkline."""

_SIGNS = {Status.STARTED: "▸", Status.DONE: "✓", Status.FAILED: "✗", Status.SKIPPED: "○"}
_CSS = {Status.STARTED: "", Status.DONE: "good", Status.FAILED: "bad", Status.SKIPPED: "soft"}


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook; IPython is never imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookView:
    """A sink of a run that shows it in the cell which made it. A context manager: its end shows the last state.

    Log lines and events may come at any rate; a display takes two updates a second.
    """

    def __init__(self, run_id: str, host: str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._view = RunView(run=run_id, host=host)
        self._folder = LogFolder()
        self._tail: deque[LogLine] = deque(maxlen=TAIL)
        self._handle: Any = None
        self._shown = 0.0

    def event(self, event: Event) -> None:
        self._view = reduce(self._view, event)
        self._update()

    def log(self, data: bytes) -> None:
        lines = self._folder.feed(data)
        if lines:
            self._tail.extend(lines)
            self._update()

    def __enter__(self) -> Self:
        from IPython.display import display

        self._handle = display(self, display_id=True)
        self._shown = self._clock()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.update(self)

    def _update(self) -> None:
        now = self._clock()
        if now - self._shown >= UPDATE_S:
            self._shown = now
            self._handle.update(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        now = self._clock()
        tail = list(self._tail)
        return {"text/plain": live_text(self._view, tail, now), "text/html": str(live_html(self._view, tail, now))}


def live_text(view: RunView, tail: Sequence[LogLine], now: float) -> str:
    """Return the same as `live_html` in a few lines, for a frontend without HTML and for whoever reads the file."""
    lines = [f"run {view.run} on {view.host}: {state_text(view)}, {duration_text(view.elapsed_s(now), running=True)}"]
    for label, stages in (("ctl", view.own_stages), ("host", view.steps), ("job", view.phases)):
        if stages:
            signs = (f"{_SIGNS[each.status]} {each.name}{_seconds(each)}" for each in stages)
            lines.append(f"  {label:<9}" + "  ".join(signs))
    if view.progress is not None:
        done = f"{count_text(view.progress.done)} of {count_text(view.progress.total)}"
        lines.append(f"  {'samples':<9}{done}, {count_text(view.progress.tokens)} tokens")
    lines += [f"  {notice.code}: {notice.text}" for notice in view.warnings]
    for failure in view.exceptions[:1]:
        lines += [f"  {failure.first.label}: {failure.first.summary}", *failure.first.traceback.splitlines()]
    if view.end is None:
        lines += [f"  | {line.text}" for line in tail]
    return "\n".join(map(clean, lines))


def live_html(view: RunView, tail: Sequence[LogLine], now: float) -> Markup:
    """Return a run's present state: stages, devices, progress, warnings, and the end of its log."""
    css = "warn" if view.end is None else ending_css(view.end.end_reason)
    head = join([tag("b", f"run {view.run}"), escape(f" on {view.host}: "), tag("span", state_text(view), css)])
    parts: list[Markup] = [tag("div", join([head, escape(f", {duration_text(view.elapsed_s(now), running=True)}")]))]
    if view.contact is not Contact.CONNECTED and view.end is None:
        parts.append(tag("div", f"{view.contact.value}: {view.contact_text}; the run goes on without us", "warn"))
    rows = [
        (label, join(map(_stage, stages), " &nbsp; "))
        for label, stages in (("ctl", view.own_stages), ("host", view.steps), ("job", view.phases))
        if stages
    ]
    parts.append(facts([*rows, *_progress(view), *_devices(view)]))
    parts += [
        tag("div", join([tag("span", notice.code, "warn"), escape(f": {notice.text}")])) for notice in view.warnings
    ]
    parts += [
        join([tag("div", f"{failure.first.label}: {failure.first.summary}", "bad"), block(failure.first.traceback)])
        for failure in view.exceptions[:1]
    ]
    if tail and view.end is None:
        parts.append(block("\n".join(line.text for line in tail)))
    return framed(*parts)


def _stage(stage: StageView) -> Markup:
    return join([tag("span", _SIGNS[stage.status], _CSS[stage.status]), escape(f" {stage.name}{_seconds(stage)}")])


def _seconds(stage: StageView) -> str:
    return "" if stage.seconds is None else f" {duration_text(stage.seconds)}"


def _progress(view: RunView) -> list[tuple[str, Markup]]:
    progress = view.progress
    if progress is None:
        return []
    share = progress.fraction or 0.0
    bar = Markup(f'<progress max="1" value="{share:.4f}" style="width:22em;vertical-align:middle"></progress>')
    words = f" {count_text(progress.done)} of {count_text(progress.total)}"
    if left := left_text(view):
        words += f", {left}"
    speed = view.tokens_per_s if view.end is None else view.tokens_per_s_overall
    rate = "" if speed is None else f", {count_text(speed)} tokens/s"
    amount = f"{count_text(progress.tokens)} tokens, {bytes_text(progress.bytes)}{rate}"
    lost = [f"{count_text(count)} {name}" for name in ("skipped", "failed") if (count := getattr(progress, name))]
    return [
        ("samples", join([bar, escape(words), *(tag("span", f", {each}", "warn") for each in lost)])),
        ("amount", escape(amount)),
    ]


def _devices(view: RunView) -> list[tuple[str, Markup]]:
    """The last figures and the recent past of each GPU, or of the CPU; after the end they would be stale."""
    if not view.samples or view.end is not None:
        return []
    latest, recent = view.samples[-1], view.samples[-HISTORY:]
    if not latest.gpus:
        line = sparkline([sample.cpu_percent for sample in recent], HISTORY)
        return [("cpu", _device(line, latest.cpu_percent, latest.memory_used, latest.memory_total))]
    rows = []
    for gpu in latest.gpus:
        past = [next((each.util for each in sample.gpus if each.index == gpu.index), None) for sample in recent]
        rows.append(
            (f"gpu {gpu.index}", _device(sparkline(past, HISTORY), gpu.util, gpu.memory_used, gpu.memory_total))
        )
    return rows


def _device(line: str, util: float | None, used: float | None, total: float | None) -> Markup:
    code = Markup(f'<code style="white-space:pre;background:none">{escape(line)}</code>')
    return join([code, escape(f" {number_text(util, '%')}, {memory_text(used, total)}")])

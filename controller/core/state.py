"""Events to the state of a run: `reduce(view, event) -> view`, pure, so that live, replayed and tested runs agree.

Clocks: an event's `t` is by its writer's clock. Durations are only ever taken between times of one clock; where the
present is needed it is an argument, and the caller corrects it for the host's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from controller.core.events import Event
from controller.core.holding import ENDED_BY
from controller.core.runview import (
    WRITING_PHASES,
    Contact,
    EndView,
    FindingView,
    GpuView,
    NoticeView,
    ProgressView,
    RunView,
    SampleView,
    StageView,
    Status,
)
from controller.core.tracebacks import Failure
from remote_payload.host.codes import PAUSES
from remote_payload.host.protocol import RunState

__all__ = ["HISTORY", "NOTICES", "RATE_WINDOW_S", "RunView", "in_order", "reduce", "replay"]

HISTORY = 120
"""Samples kept: more than any sparkline is wide."""

RATE_WINDOW_S = 60.0
"""The momentary rate: long enough to even out batches, short enough to show a straggler within a minute."""

NOTICES = 50
"""Notices kept; all of them are in the run folder."""


def reduce(view: RunView, event: Event) -> RunView:
    """Take one event into account.

    A writer's events must come in its own order, as its file holds them; one that was taken already (same writer
    and `seq`, or an earlier one) changes nothing. Writers may come in any order. Unknown types, unknown fields and
    values of the wrong type are passed over: a newer or a confused host never stops the screen.
    """
    if event.seq <= view.seen.get(event.writer, -1):
        return view
    on_host = event.writer != "controller"
    view = replace(
        view,
        run=view.run or event.run,
        host=view.host or event.host,
        started=event.t if view.started is None else min(view.started, event.t),
        host_time=max(view.host_time or event.t, event.t) if on_host else view.host_time,
        seen={**view.seen, event.writer: event.seq},
    )
    handler = _HANDLERS.get(event.type)
    return handler(view, event) if handler else view


def replay(view: RunView, events: Iterable[Event]) -> RunView:
    """Reduce recorded events of several writers, as `in_order` puts them."""
    for _, event in in_order(events):
        view = reduce(view, event)
    return view


def in_order(events: Iterable[Event]) -> list[tuple[float, Event]]:
    """Return events of several writers by time, yet never against a writer's own order, each with its time.

    The time is the event's own, or that of an earlier one of its writer if that was later.
    """
    by_writer: dict[str, list[Event]] = {}
    for event in events:
        by_writer.setdefault(event.writer, []).append(event)
    keyed = []
    for writer, own in by_writer.items():
        latest = -math.inf
        for event in sorted(own, key=lambda each: each.seq):
            latest = max(latest, event.t)  # a clock that was set back does not reorder a writer
            keyed.append((latest, writer, event.seq, event))
    return [(t, event) for t, *_, event in sorted(keyed, key=lambda each: each[:3])]


def _stage(view: RunView, event: Event) -> RunView:
    return replace(view, stages=_advance(view.stages, event))


def _step(view: RunView, event: Event) -> RunView:
    steps = _advance(view.steps, event)
    # The step ran, and found that there was nothing to try: a tick would say that something was proved.
    if steps and steps[-1].name == "rehearse" and steps[-1].status is Status.DONE and _rehearsed_nothing(view):
        steps = (*steps[:-1], replace(steps[-1], status=Status.SKIPPED))
    return replace(view, steps=steps, step=_text(event, "name"))


def _rehearsed_nothing(view: RunView) -> bool:
    return any(notice.code == "rehearsal-skipped" for notice in view.notices)


def _phase(view: RunView, event: Event) -> RunView:
    view = replace(view, phases=_advance(view.phases, event))
    begins = (_text(event, "name"), _text(event, "status")) == (WRITING_PHASES[0], Status.STARTED.value)
    if begins and view.recent_progress:
        # What was reported before the load says of how many; a rate over the load would say nothing.
        return replace(view, recent_progress=(replace(view.recent_progress[-1], t=event.t),))
    return view


def _finding(view: RunView, event: Event) -> RunView:
    names = ("level", "code", "what", "why", "fix")
    return replace(view, findings=(*view.findings, FindingView(**{name: _text(event, name) for name in names})))


def _contact(view: RunView, event: Event) -> RunView:
    try:
        status = Contact(_text(event, "status"))
    except ValueError:
        return view
    since = event.t if status is not view.contact else view.contact_since
    return replace(view, contact=status, contact_text=_text(event, "text"), contact_since=since)


def _state(view: RunView, event: Event) -> RunView:
    state = _text(event, "state")
    since = event.t if state == RunState.STOPPING.value and view.stopping_since is None else view.stopping_since
    return replace(view, state=state, state_text=_text(event, "text"), stopping_since=since)


def _sample(view: RunView, event: Event) -> RunView:
    gpus = event.get("gpus")
    sample = SampleView(
        t=event.t,
        gpus=tuple(_gpu(gpu) for gpu in gpus if isinstance(gpu, Mapping)) if isinstance(gpus, list) else (),
        cpu_percent=_number(event.data, "cpu_percent"),
        memory_used=_number(event.data, "memory_used"),
        memory_total=_number(event.data, "memory_total"),
        disk_free=_number(event.data, "disk_free"),
        disk_total=_number(event.data, "disk_total"),
    )
    return replace(view, samples=(*view.samples, sample)[-HISTORY:])


def _progress(view: RunView, event: Event) -> RunView:
    total, records = _number(event.data, "total"), _number(event.data, "records")
    progress = ProgressView(
        t=event.t,
        total=None if total is None else int(total),
        unit=_text(event, "unit") or "samples",
        records=None if records is None else int(records),
        values=values if isinstance(values := event.get("values"), Mapping) else {},
        **{name: int(_number(event.data, name) or 0) for name in ("done", "tokens", "bytes", "skipped", "failed")},
    )
    # One report from before the window stays, so that the window is spanned from its very edge.
    older = [each for each in view.recent_progress if each.t <= event.t - RATE_WINDOW_S][-1:]
    within = [each for each in view.recent_progress if each.t > event.t - RATE_WINDOW_S]
    return replace(
        view,
        first_progress=view.first_progress or progress,
        recent_progress=(*older, *within[-HISTORY:], progress),
    )


def _notice(view: RunView, event: Event) -> RunView:
    notice = NoticeView(
        level=_text(event, "level"),
        code=_text(event, "code"),
        text=_text(event, "text"),
        writer=event.writer,
        t=event.t,
    )
    view = replace(view, notices=(*view.notices, notice)[-NOTICES:])
    if notice.code in PAUSES:
        return replace(view, pause=notice if view.end is None else None)
    if notice.code in ENDED_BY and view.pause is not None and view.pause.code in ENDED_BY[notice.code]:
        # A rate over the pause would say nothing of what is to come.
        kept = view.recent_progress[-1:]
        return replace(view, pause=None, recent_progress=tuple(replace(each, t=event.t) for each in kept))
    return view


def _problem(view: RunView, event: Event) -> RunView:
    notice = NoticeView(
        level="warn", code=_text(event, "code"), text=_text(event, "what"), writer=event.writer, t=event.t
    )
    return replace(view, notices=(*view.notices, notice)[-NOTICES:])


def _exception(view: RunView, event: Event) -> RunView:
    rank = _number(event.data, "rank")
    failure = Failure(
        source=event.writer,
        rank=None if rank is None else int(rank),
        exc_type=_text(event, "exc_type"),
        message=_text(event, "message"),
        traceback=_text(event, "traceback"),
        where=_text(event, "where"),
        t=event.t,
    )
    return replace(view, failures=(*view.failures, failure))


def _end(view: RunView, event: Event) -> RunView:
    code, signal, clean = _number(event.data, "exit_code"), _number(event.data, "signal"), event.get("gpus_clean")
    end = EndView(
        end_reason=_text(event, "end_reason"),
        exit_code=None if code is None else int(code),
        signal=None if signal is None else int(signal),
        message=_text(event, "message"),
        gpus_clean=clean if isinstance(clean, bool) else "unknown",
    )
    return replace(view, end=end, ended=event.t, pause=None)


_HANDLERS: Mapping[str, Callable[[RunView, Event], RunView]] = {
    "stage": _stage,
    "step": _step,
    "phase": _phase,
    "finding": _finding,
    "contact": _contact,
    "state": _state,
    "sample": _sample,
    "progress": _progress,
    "notice": _notice,
    "problem": _problem,
    "exception": _exception,
    "end": _end,
}


def _advance(stages: tuple[StageView, ...], event: Event) -> tuple[StageView, ...]:
    """Start a stage, or end the latest of its name: a stage that is started again gets a new entry."""
    name = _text(event, "name")
    try:
        status = Status(_text(event, "status"))
    except ValueError:
        return stages
    fresh = StageView(
        name=name,
        status=status,
        text=_text(event, "text"),
        started=event.t,
        seconds=_number(event.data, "seconds"),
        fraction=_fraction(event.data),
    )
    for position in reversed(range(len(stages))):
        known = stages[position]
        if known.name == name and known.status is Status.STARTED:
            seconds = fresh.seconds
            if seconds is None and fresh.status is not Status.STARTED and known.started is not None:
                seconds = max(0.0, event.t - known.started)
            ended = replace(fresh, started=known.started, seconds=seconds)
            return (*stages[:position], ended, *stages[position + 1 :])
    return (*stages, fresh)


def _fraction(record: Mapping[str, Any]) -> float | None:
    done, total = _number(record, "done"), _number(record, "total")
    return min(1.0, max(0.0, done / total)) if done is not None and total else None


def _gpu(record: Mapping[str, Any]) -> GpuView:
    return GpuView(
        index=int(_number(record, "index") or 0),
        util=_number(record, "util"),
        memory_used=_number(record, "memory_used"),
        memory_total=_number(record, "memory_total"),
        power_w=_number(record, "power_w"),
        temperature_c=_number(record, "temperature_c"),
    )


def _text(event: Event, name: str) -> str:
    value = event.get(name)
    return "" if value is None else str(value)


def _number(record: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number, or None for anything else."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value

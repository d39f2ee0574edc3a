"""What a run's events come to over time: stages, throughput, GPUs; the values behind the charts of a report.

Pure and bounded: however long a run was, a chart gets at most as many points as it can show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controller.core.events import Event
from controller.core.ledger import LedgerLine
from controller.core.numbers import finite
from controller.core.runview import ProgressView, RunView, StageView, Status

LAUNCH_SLACK_S = 5.0
"""The first step may begin some seconds after the launch was confirmed, for example behind a slow `recheck`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens a second in steps of `step_s`, from `start` (seconds since the epoch, the host's clock).

    `by_rank` is empty where the ledgers do not say when a sample was written; `total` then comes from the driver's
    reports of progress.
    """

    start: float
    step_s: float
    total: tuple[float, ...]
    by_rank: Mapping[int, tuple[float, ...]]


def rates(
    lines: Iterable[LedgerLine], reports: Sequence[ProgressView], started: float | None = None, *, most: int = 60
) -> Rates | None:
    """Return the throughput by time and rank, None if it cannot be told.

    `started` is when capturing began, by the host's clock. A sample counts where its file was complete. Steps are at
    least a tenth of a second; a second where only the driver's reports are there, which come no oftener.
    """
    timed = [line for line in lines if line.t is not None and line.rank is not None and not line.kept]
    if timed:
        points = [(line.t or 0.0, line.tokens, line.rank) for line in timed]
        begin = min(point[0] - (line.seconds or 0.0) for point, line in zip(points, timed, strict=True))
    else:
        points = [(now.t, max(0, now.tokens - before.tokens), None) for before, now in _pairs(reports)]
        begin = reports[0].t if reports else 0.0
    if not any(tokens for _, tokens, _ in points):
        return None
    first, last = min(begin, started or begin), max(point[0] for point in points)
    step = max(0.1 if timed else 1.0, (last - first) / most)
    count = int((last - first) / step) + 1
    ranks = sorted({rank for _, _, rank in points if rank is not None})
    total, by_rank = [0.0] * count, {rank: [0.0] * count for rank in ranks}
    for t, tokens, rank in points:
        place = min(count - 1, max(0, int((t - first) / step)))
        total[place] += tokens / step
        if rank is not None:
            by_rank[rank][place] += tokens / step
    shares = {rank: tuple(values) for rank, values in by_rank.items()}
    return Rates(start=first, step_s=step, total=tuple(total), by_rank=shares)


def _pairs(reports: Sequence[ProgressView]) -> Iterable[tuple[ProgressView, ProgressView]]:
    return itertools.pairwise(reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stage on the common time axis: `begin` and `end` in seconds since the run's first event.

    `row` is ctl, host or job; `end` is None for one that had not ended when the run was last seen.
    """

    row: str
    name: str
    status: Status
    begin: float
    end: float | None
    text: str = ""


def spans(view: RunView) -> list[Span]:
    """Return the stages of the controller, the steps of the supervisor and the phases of the driver, by their start.

    Two clocks meet here. The supervisor's first word falls into our `launch`, so a host's clock that says otherwise
    is moved there. What was done here after the run had ended, such as an attach on the next day, is left out.
    """
    launch = next((stage for stage in view.stages if stage.name == "launch" and stage.started is not None), None)
    started = [each.started for each in (*view.steps, *view.phases) if each.started is not None]
    shift = 0.0
    if launch is not None and launch.started is not None and started:
        earliest, latest = launch.started, launch.started + (launch.seconds or 0.0)
        first = min(started)
        shift = 0.0 if earliest <= first <= latest + LAUNCH_SLACK_S else latest - first
    over = math.inf if view.ended is None else view.ended + shift
    rows: list[tuple[str, StageView, float]] = [
        *(("ctl", stage, 0.0) for stage in view.stages if (stage.started or 0.0) <= over),
        *(("host", step, shift) for step in view.steps),
        *(("job", phase, shift) for phase in view.phases),
    ]
    begins = [stage.started + moved for _, stage, moved in rows if stage.started is not None]
    if not begins:
        return []
    origin = min(begins)
    found = []
    for row, stage, moved in rows:
        if stage.started is None:
            continue
        begin = stage.started + moved - origin
        end = None if stage.status is Status.STARTED or stage.seconds is None else begin + stage.seconds
        found.append(Span(row=row, name=stage.name, status=stage.status, begin=begin, end=end, text=stage.text))
    return sorted(found, key=lambda span: span.begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """One device over time: percent and bytes, None where nothing was measured. `name` is `gpu 0` or `cpu`."""

    name: str
    util: tuple[float | None, ...]
    memory: tuple[float | None, ...]
    memory_total: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """All devices of a host on one time axis: `times` in seconds since the first sample, at `start`."""

    start: float
    times: tuple[float, ...]
    devices: tuple[Gauge, ...]


def gauges(events: Iterable[Event], *, most: int = 300) -> Gauges | None:
    """Return utilisation and memory of each GPU, or of the CPU of a host without any; None without a sample.

    Where there are more than `most` samples, each point is the mean of as many consecutive ones as it takes.
    """
    samples = [(event.t, _devices(event)) for event in events if event.type == "sample"]
    if not samples:
        return None
    size = -(-len(samples) // most)
    chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
    names = dict.fromkeys(name for _, devices in samples for name in devices)
    series = []
    for name in names:
        own = [[devices[name] for _, devices in chunk if name in devices] for chunk in chunks]
        totals = [total for figures in own for _, _, total in figures if total is not None]
        series.append(
            Gauge(
                name=name,
                util=tuple(_mean(util for util, _, _ in figures) for figures in own),
                memory=tuple(_mean(used for _, used, _ in figures) for figures in own),
                memory_total=max(totals, default=None),
            )
        )
    start = samples[0][0]
    times = tuple(sum(t - start for t, _ in chunk) / len(chunk) for chunk in chunks)
    return Gauges(start=start, times=times, devices=tuple(series))


_Figures = tuple[float | None, float | None, float | None]
"""Percent, bytes in use, bytes in all."""


def _devices(event: Event) -> dict[str, _Figures]:
    """Return the figures of each device of one sample, by its name."""
    gpus = event.get("gpus")
    known = [gpu for gpu in gpus if isinstance(gpu, Mapping)] if isinstance(gpus, list) else []
    if not known:
        return {"cpu": _figures(event.data, "cpu_percent")}
    return {f"gpu {gpu.get('index')}": _figures(gpu, "util") for gpu in known}


def _figures(record: Mapping[str, object], util: str) -> _Figures:
    names = (util, "memory_used", "memory_total")
    first, second, third = (finite(record.get(name)) for name in names)
    return first, second, third


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

"""The state of a run as values: what a dashboard, a plain line or a notebook shows. Made by `state.reduce`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from controller.core.holding import holding
from controller.core.tracebacks import Failure, FoldedFailure, fold
from remote_payload.host.protocol import RunState

WRITING_PHASES = ("capture", "drain")
"""Phases of the driver in which samples are written; the canaries beside them write none."""

CAPTURING = (*WRITING_PHASES, "extract")
"""Phases, and the step around them, that take as long as there are samples to capture."""

KINDS = {
    "extract": "extraction", "rehearse": "rehearsal", "convert": "conversion", "setup": "set-up",
    "fetch-model": "download",
}  # fmt: skip
"""What a run of a kind of job is called; one of a command is a run."""


def kind_word(kind: str | None) -> str:
    """Return what a run of this kind of job is called."""
    return KINDS.get(kind or "", "run")


class Status(StrEnum):
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class Contact(StrEnum):
    """Whether the host can be reached; says nothing about the run."""

    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """A stage of the controller, a step of the supervisor or a phase of the driver.

    `started` is by its writer's clock; `seconds` is known once it is over.
    """

    name: str
    status: Status
    text: str = ""
    started: float | None = None
    seconds: float | None = None
    fraction: float | None = None
    """How far it is, between 0 and 1, where it says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A finding of preflight: `level` is ok, warn or fail."""

    level: str
    code: str
    what: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """One GPU at one time: percent, bytes, watts, degrees Celsius. None is a value that the device did not give."""

    index: int
    util: float | None
    memory_used: float | None
    memory_total: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """The host at one time; `gpus` is empty on a host without any.

    Memory and disk in bytes; the disk is the file system of the output, None before the first sample of it.
    """

    t: float
    gpus: tuple[GpuView, ...]
    cpu_percent: float | None
    memory_used: float | None
    memory_total: float | None
    disk_free: float | None = None
    disk_total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """Samples, or whatever `unit` names, done of `total` (None until it is known), and what they came to."""

    t: float
    done: int
    total: int | None
    tokens: int
    bytes: int
    skipped: int
    failed: int
    unit: str = "samples"
    records: int | None = None
    """Of an extraction: the records of its whole data set, of all shares; None from payloads that did not tell."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What else a command says of where it is: a loss, a learning rate."""

    @property
    def has_tokens(self) -> bool:
        """Whether what is counted has tokens at all: a download has none."""
        return self.unit == "samples" or self.tokens > 0

    @property
    def fraction(self) -> float | None:
        """Between 0 and 1; None without a total."""
        return min(1.0, self.done / self.total) if self.total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeView:
    level: str
    code: str
    text: str
    writer: str
    t: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndView:
    """How the run ended, in the words of the supervisor; `gpus_clean` is True, False or "unknown"."""

    end_reason: str
    exit_code: int | None
    signal: int | None
    message: str
    gpus_clean: bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """All that a screen needs to know of one run on one host."""

    run: str = ""
    host: str = ""
    playbook: str = ""
    state: str = ""  # a RunState, "" until the supervisor spoke
    state_text: str = ""
    step: str = ""
    stages: tuple[StageView, ...] = ()
    steps: tuple[StageView, ...] = ()
    phases: tuple[StageView, ...] = ()
    findings: tuple[FindingView, ...] = ()
    samples: tuple[SampleView, ...] = ()
    first_progress: ProgressView | None = None
    recent_progress: tuple[ProgressView, ...] = ()  # the last is the present one
    failures: tuple[Failure, ...] = ()
    notices: tuple[NoticeView, ...] = ()
    pause: NoticeView | None = None
    """Why nothing is admitted, while that is so; None once the run has ended."""
    contact: Contact = Contact.CONNECTED
    contact_text: str = ""
    contact_since: float | None = None
    end: EndView | None = None
    started: float | None = None
    ended: float | None = None
    stopping_since: float | None = None
    host_time: float | None = None  # the latest `t` of a writer on the host
    ending_s: float | None = None
    """Seconds that runs like this take from their last sample to their end; None where none is known."""
    seen: Mapping[str, int] = field(default_factory=dict)  # writer -> last seq taken

    @property
    def progress(self) -> ProgressView | None:
        return self.recent_progress[-1] if self.recent_progress else None

    @property
    def cut_off(self) -> bool:
        """Whether the run is being ended, or has ended, before its work was done: no rate of then says when it is.

        The host is `stopping` at the end of every run; a step that did not get done tells this one.
        """
        undone = any(step.status in (Status.STARTED, Status.FAILED) for step in self.steps[-1:])
        return undone and (self.state == RunState.STOPPING.value or self.end is not None)

    @property
    def warnings(self) -> tuple[NoticeView, ...]:
        """Of the notices those that warn, and of which nothing later said that they are past."""
        captured = any(phase.name == "drain" and phase.status is Status.DONE for phase in self.phases)
        still = holding(self.notices, captured=captured, ended=self.end is not None)
        return tuple(notice for notice in still if notice.level == "warn")

    @property
    def own_stages(self) -> tuple[StageView, ...]:
        """The controller's stages, of each name the latest: every look at a run is a watch, and there may be many."""
        return tuple({stage.name: stage for stage in self.stages}.values())

    @property
    def kept(self) -> int:
        """Samples of an earlier run that an extraction found and takes over: its first report has them."""
        return self.first_progress.done if self.first_progress is not None and self.writes_samples else 0

    @property
    def phase(self) -> StageView | None:
        """The driver's phase at work, else its last."""
        return current(self.phases)

    @property
    def exceptions(self) -> tuple[FoldedFailure, ...]:
        """First failing rank first, equal ones folded."""
        return fold(self.failures)

    @property
    def tokens_per_s(self) -> float | None:
        """Over the last RATE_WINDOW_S seconds of progress (see `state`); None before there are two reports.

        None too of a run that is cut off.
        """
        return None if self.cut_off else _rate(self.recent_progress, lambda each: each.tokens)

    @property
    def tokens_per_s_overall(self) -> float | None:
        """Since the first report, over the seconds of capture and drain alone, as `tokens_per_s` of the summary.

        Of a job without these phases, over the time between the first report and the latest.
        """
        first, latest = self.first_progress, self.progress
        if first is None or latest is None:
            return None
        working = [phase for phase in self.phases if phase.name in WRITING_PHASES and phase.started is not None]
        if not working:
            return _rate((first, latest), lambda each: each.tokens)
        seconds = sum(
            phase.seconds if phase.seconds is not None else max(0.0, latest.t - (phase.started or 0.0))
            for phase in working
        )
        return max(0, latest.tokens - first.tokens) / seconds if seconds else None

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes written, over the same window as `tokens_per_s`."""
        return None if self.cut_off else _rate(self.recent_progress, lambda each: each.bytes)

    @property
    def disk_free(self) -> float | None:
        """Bytes left on the output's file system at the latest sample."""
        return self.samples[-1].disk_free if self.samples else None

    @property
    def disk_full_s(self) -> float | None:
        """Seconds until the output's file system is full at the momentary rate.

        None where nothing is written, and in a pause, before which there was a rate.
        """
        free, rate = self.disk_free, self.bytes_per_s
        return free / rate if free is not None and rate and self.pause is None else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last sample at the momentary rate; None without a total, without movement, in a pause, and
        of a run that is cut off, which writes none any more.

        What follows, a canary, the engine's end and the proof of the files, is not in it: see `ending_s`.
        """
        progress = self.progress
        if progress is None or progress.total is None or self.pause is not None or self.cut_off:
            return None
        left = max(0, progress.total - progress.done)
        rate = _rate(self.recent_progress, lambda each: each.done)
        return left / rate if left and rate else None if left else 0.0

    @property
    def ending_since_s(self) -> float | None:
        """Seconds since the last sample was on disk, by the host's clock, as `ending_s` counts; None before that."""
        written = [phase for phase in self.phases if phase.name in WRITING_PHASES]
        if not any(phase.name == "drain" for phase in written) or self.host_time is None:
            return None
        if any(phase.started is None or phase.seconds is None for phase in written):
            return None
        return max(0.0, self.host_time - max((phase.started or 0.0) + (phase.seconds or 0.0) for phase in written))

    @property
    def writes_samples(self) -> bool:
        """Whether it is an extraction, after whose last sample more is to come."""
        return any(phase.name in WRITING_PHASES for phase in self.phases)

    def elapsed_s(self, now: float) -> float:
        """Seconds since the first event, up to the end if there is one."""
        if self.started is None:
            return 0.0
        return max(0.0, (self.ended if self.ended is not None else now) - self.started)


def at_work(view: RunView) -> StageView | None:
    """Return the innermost stage under way: of the driver, else of the supervisor, else of the controller.

    The controller's watch is under way all the time, and says nothing.
    """
    for stages in (view.phases, view.steps, view.stages):
        working = [stage for stage in stages if stage.status is Status.STARTED and stage.name != "watch"]
        if working:
            return working[-1]
    return None


def current(stages: Sequence[StageView]) -> StageView | None:
    """Return the last stage that is at work, else the last one."""
    working = [stage for stage in stages if stage.status is Status.STARTED] or list(stages)
    return working[-1] if working else None


def _rate(reports: Sequence[ProgressView], value: Callable[[ProgressView], int]) -> float | None:
    if len(reports) < 2 or reports[-1].t <= reports[0].t:
        return None
    return max(0.0, (value(reports[-1]) - value(reports[0])) / (reports[-1].t - reports[0].t))

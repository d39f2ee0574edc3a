"""Numbers and words as people read them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from controller.core.laststage import last_stage
from controller.core.runview import ProgressView, RunView, Status
from remote_payload.host.protocol import EndReason, RunState

UNKNOWN = "-"
"""Shown where a value is not known: one missing sensor never breaks a row."""

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")

_STATES = {
    "": "preparing",
    "orphaned": "running, but its supervisor died",
    "stopping": "stopping",
    "lost": "lost: neither job nor supervisor lives",
}

_PAUSES = {"disk-low": "paused: the disk is full", "disk-full": "paused: the disk is full"}
"""By the code of the notice that began it; one that only a newer version knows is `paused` alone."""

_GIVEN_UP = {"preflight": "refused", "confirm": "declined"}
"""By the stage that failed; another one says nothing of why."""

_END_REASONS = {
    "succeeded": "succeeded",
    "job-failed": "failed",
    "job-signaled": "killed by a signal",
    "verify-failed": "ended, but its output is not what was promised",
    "limit-exceeded": "stopped: a time limit was exceeded",
    "stopped": "stopped on request",
    "cancelled": "cancelled before it was launched",
    "lease-busy": "refused: another run holds the host",
    "lease-dirty": "refused: an earlier run is not proved to be over",
    "recheck-failed": "refused: the GPUs were no longer free",
    "clear-changed": "refused: the output folder has changed since it was shown",
    "clear-failed": "refused: the output folder could not be cleared",
    "rehearsal-failed": "refused: the rehearsal on a cut model failed",
    "supervisor-failed": "failed: an error in the supervisor",
}


_END_WORDS = {
    "succeeded": "succeeded", "job-failed": "failed", "job-signaled": "killed", "verify-failed": "not proved",
    "limit-exceeded": "over time", "stopped": "stopped", "cancelled": "cancelled", "supervisor-failed": "failed",
}  # fmt: skip
"""The same in twelve cells, for a column; every other end is a refusal."""

_WHILE = {
    "recheck": "looking at the GPUs once more",
    "rehearse": "rehearsing on a model cut from this one",
    "place": "placing the uploaded files",
    "clear": "clearing the output folder",
    "extract": "between two phases of the extraction",
    "command": "running the command",
    "convert": "writing the samples anew",
    "fetch": "downloading",
    "create": "making the environment",
    "install": "installing packages",
    "verify": "reading back what was written",
    "data": "reading the data set",
    "resume": "proving the files that were there",
    "load": "loading the model",
    "probe": "giving the model a first short sample",
    "canary": "comparing captured states with a reference",
    "capture": "capturing hidden states",
    "drain": "writing what was still in memory",
    "canary-end": "comparing states once more at the end",
}
"""What a run was doing in a step of the supervisor or a phase of the driver."""

_TELL_WHERE = ("verify-failed", "lease-", "recheck-", "clear-", "rehearsal-", "cancelled")
"""Ends, or how they begin, whose words name the stage already."""


def bytes_text(count: float | None) -> str:
    """Return a size in bytes, KiB, MiB, ... with three digits that matter: `512 B`, `1.50 KiB`, `71.2 GiB`."""
    if count is None:
        return UNKNOWN
    if count < 1024:
        return f"{count:.0f} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        if value < 999.5 or unit == _UNITS[-1]:
            return f"{value:.{_decimals(value)}f} {unit}"
    raise AssertionError("the last unit always returns")


def memory_text(used: float | None, total: float | None) -> str:
    """Return used and total in GiB: `71.2/95.0 GiB`."""
    if used is None and total is None:
        return UNKNOWN
    used_text = UNKNOWN if used is None else f"{used / 2**30:.1f}"
    return f"{used_text} GiB" if total is None else f"{used_text}/{total / 2**30:.1f} GiB"


def duration_text(seconds: float | None, *, running: bool = False) -> str:
    """Return `0.4 s`, `48 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`; whole seconds for one that still grows."""
    if seconds is None:
        return UNKNOWN
    if running:
        seconds = math.floor(max(0.0, seconds))
        if seconds < 60:
            return f"{seconds} s"
    elif seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def left_text(view: RunView) -> str:
    """Return how long it still takes: `3 min 05 s left`; empty where that is not known, after the end, and while the
    run is ended before its work is done.

    Of an extraction that is until the run has ended, and once its end takes longer than that of earlier ones
    `5 s over the usual`; where no earlier run tells how long its end takes, `3 min 05 s to last sample`.
    """
    if view.end is not None or view.cut_off:
        return ""
    eta, ending, since = view.eta_s, view.ending_s, view.ending_since_s
    if view.writes_samples and ending is not None and since is not None:
        late = since - ending
        return f"{duration_text(late)} over the usual" if late > 0 else f"{duration_text(-late)} left"
    if eta is None:
        return ""
    if view.writes_samples and ending is not None:
        return f"{duration_text(eta + ending)} left"
    if not eta:
        return ""  # all is done that is counted, and what follows is not known
    return f"{duration_text(eta)} {'to last sample' if view.writes_samples else 'left'}"


def age_text(seconds: float | None) -> str:
    """Return an age in at most four cells, for a column: `3 s`, `12 m`, `3 h`, `2 d`."""
    if seconds is None:
        return UNKNOWN
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{min(99, math.floor(seconds / size))} {unit}"
    return f"{math.floor(max(0.0, seconds))} s"


def amount_text(number: float | None, unit: str) -> str:
    """Return how much of a `progress` event's unit there is, without the unit's name: bytes have their own."""
    return bytes_text(number) if unit == "bytes" else count_text(number)


def count_text(count: float | None) -> str:
    """Return a whole number with thousands separators."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def number_text(value: float | None, unit: str = "") -> str:
    """Return a measurement without decimals and its unit: `412 W`."""
    return UNKNOWN if value is None else f"{value:.0f}{unit and ' ' + unit}"


def plural(count: int, noun: str) -> str:
    """Return `1 sample`, `2 samples`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def clock_text(t: float, now: float | None = None) -> str:
    """Return the local time of day of seconds since the epoch, with the date where it is not that of `now`."""
    then, today = time.localtime(t), time.localtime(t if now is None else now)
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)


def state_text(view: RunView) -> str:
    """Return where a run stands, in words: its end if it has ended, else its state."""
    if view.end is not None:
        return end_text(view.end.end_reason)
    if given_up(view):
        failed = view.stages[-1].status is Status.FAILED
        return _GIVEN_UP.get(view.stages[-1].name, "not launched") if failed else "not launched"
    return state_word(view.state, view.pause.code if view.pause else None)


def given_up(view: RunView) -> bool:
    """Whether the last that was done here failed, or was broken off, before any host had the run."""
    return not view.state and bool(view.stages) and view.stages[-1].status in (Status.FAILED, Status.SKIPPED)


def declined(view: RunView) -> bool:
    """Whether somebody was asked and said no: that is neither a success nor a failure."""
    return given_up(view) and (view.stages[-1].name, view.stages[-1].status) == ("confirm", Status.FAILED)


def broken_off(view: RunView) -> RunView:
    """Return a view whose watch ends now: of a run that no host has, what was under way here is not any more.

    Of one whose launch has begun nobody knows that here.
    """
    if view.state or any(stage.name in ("launch", "watch") for stage in view.stages):
        return view
    return replace(
        view,
        stages=tuple(
            replace(stage, status=Status.SKIPPED, text="") if stage.status is Status.STARTED else stage
            for stage in view.stages
        ),
    )


def state_word(state: str, paused: str | None = None) -> str:
    """Return a RunState in words; of one that runs `paused` says what it waits for, by the code of the notice."""
    if paused and state == RunState.RUNNING.value:
        return _PAUSES.get(paused, "paused")
    return _STATES.get(state, state)


def is_paused(view: RunView) -> bool:
    """Whether a run that goes on waits for room; while it stops or is lost, that is what is to be said."""
    return view.pause is not None and view.state == RunState.RUNNING.value


def pause_seconds(view: RunView, host_now: float) -> float | None:
    """Return for how long a run has been paused, None if it is not; `host_now` is by the host's clock."""
    return max(0.0, host_now - view.pause.t) if view.pause is not None and is_paused(view) else None


def end_text(end_reason: str) -> str:
    """Return an EndReason in words."""
    return _END_REASONS.get(end_reason, end_reason)


def end_word(end_reason: str) -> str:
    """Return an EndReason in a word, for a column."""
    return _END_WORDS.get(end_reason, "refused")


class Ending(StrEnum):
    """What an end means to people: a stop that somebody asked for is no failure, and no success either."""

    WELL = "green"
    STOPPED = "yellow"
    BADLY = "red"


def ending_of(end_reason: str) -> Ending:
    """Return what an EndReason means; the value is the colour that it is shown in."""
    if end_reason in (EndReason.STOPPED.value, EndReason.CANCELLED.value):
        return Ending.STOPPED
    return Ending.WELL if end_reason == EndReason.SUCCEEDED.value else Ending.BADLY


def summary_end(summary: Mapping[str, Any]) -> tuple[str, Ending]:
    """Return how a run ended as its summary says, in words and in what that means; of a lost one that it is lost."""
    reason = summary.get("end_reason")
    if reason is None:
        return state_word(str(summary.get("state") or UNKNOWN)), Ending.BADLY
    return end_text(str(reason)), ending_of(str(reason))


def ending_css(end_reason: str) -> str:
    """Return the class of the same in HTML."""
    return css_of(ending_of(end_reason))


def css_of(ending: Ending) -> str:
    """Return the class of what an end means."""
    return {Ending.WELL: "good", Ending.STOPPED: "warn", Ending.BADLY: "bad"}[ending]


def last_stage_text(end_reason: str, stage: Mapping[str, Any] | None) -> str:
    """Return what a run was doing when it ended: `loading the model, after 3 min 12 s`.

    `stage` is `last_stage` of its summary. Empty where there is none, and where the words of the end name it.
    """
    if not stage or end_reason.startswith(_TELL_WHERE):
        return ""
    name = str(stage.get("phase") or stage.get("step"))
    seconds = stage.get("seconds")
    after = f", after {duration_text(seconds)}" if isinstance(seconds, int | float) else ""
    return _WHILE.get(name, f"at `{name}`") + after


def ended_text(end_reason: str, stage: Mapping[str, Any] | None) -> str:
    """Return an EndReason in words, and at what: `stopped on request while loading the model, after 3 min 12 s`.

    `stage` is as for `last_stage_text`.
    """
    doing = last_stage_text(end_reason, stage)
    return end_text(end_reason) + (f" while {doing}" if doing else "")


def view_end_text(view: RunView) -> str:
    """Return the same of a run that has ended as its events say."""
    stage = last_stage(view)
    return ended_text(view.end.end_reason if view.end else view.state, stage.record() if stage else None)


def last_words(view: RunView) -> str:
    """Return where a run that is lost was heard of last, and how far it had come; empty where nothing says."""
    stage = last_stage(view)
    doing = last_stage_text(view.state, stage.record() if stage else None)
    words = [f"its last sign of life came while {doing}"] if doing else []
    return "; ".join([*words, *([done_text(view.progress)] if view.progress else [])])


def done_text(progress: ProgressView) -> str:
    """Return how much is done of how much: `12 of 60 samples (20 %)`, `3.00 MiB of 4.00 MiB (75 %)`."""
    of = "" if progress.total is None else f" of {amount_text(progress.total, progress.unit)}"
    unit = "" if progress.unit == "bytes" else f" {progress.unit}"
    share = "" if progress.fraction is None else f" ({progress.fraction * 100:.0f} %)"
    return f"{amount_text(progress.done, progress.unit)}{of}{unit}{share}"


def gpus_clean_text(view: RunView) -> str:
    """Return whether an ended run left its host as it was: no process of the run, GPUs at their baseline.

    Empty where the message of its end says so already.
    """
    end = view.end
    if end is None:
        return clean_text("unknown")
    stage = last_stage(view)
    record = {"end_reason": end.end_reason, "gpus_clean": end.gpus_clean, "last_stage": stage}
    words = host_text(record)
    return "" if words in end.message else words


NOTHING_STARTED = "nothing was started"


def host_text(record: Mapping[str, Any]) -> str:
    """Return how a run left its host, of its summary or of a stop's answer: clean or not, as far as that is known.

    One that ended before its first step, in the queue for example, has used nothing there, and nothing was measured.
    """
    reason = record.get("end_reason")
    unstarted = reason == EndReason.CANCELLED.value or (
        reason not in (None, EndReason.SUCCEEDED.value) and record.get("last_stage", 0) is None
    )
    unmeasured = record.get("gpus_clean") == "unknown"
    return NOTHING_STARTED if unstarted and unmeasured else clean_text(record.get("gpus_clean"))


def clean_text(gpus_clean: bool | str | None) -> str:
    """Return the words for `gpus_clean` of a result or summary."""
    words = {True: "host left clean", False: "host is not clean yet"}
    return words.get(gpus_clean, "not known whether the host is clean")  # type: ignore[arg-type]


def _decimals(value: float) -> int:
    if value >= 99.95:
        return 0
    return 1 if value >= 9.995 else 2


def inline_text(value: object) -> str:
    """Return a record on one line: `path /dev/shm/x, reason busy`."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key} {inline_text(each)}" for key, each in value.items() if each not in (None, "", [], {})
        )
    if isinstance(value, list | tuple):
        return " ".join(inline_text(each) for each in value)
    return str(value)

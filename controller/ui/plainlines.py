"""What plain lines say of a run: each change, a sign of life, how far it is, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence

from controller.core.runview import Contact, RunView, StageView, Status, at_work
from controller.core.tracebacks import Failure
from controller.ui.clean import clean, clean_block
from controller.ui.formats import (
    bytes_text,
    count_text,
    done_text,
    duration_text,
    gpus_clean_text,
    is_paused,
    left_text,
    state_text,
    state_word,
    view_end_text,
)
from remote_payload.host.protocol import RunState

QUIET_S = 30.0
"""Silence of the job is mentioned from here on."""


def progress_line(view: RunView) -> str:
    """Return the progress of a run in one line."""
    progress = view.progress
    if progress is None:
        return "no samples yet"
    parts = [clean(done_text(progress))]
    if view.tokens_per_s is not None and progress.has_tokens:
        parts.append(f"{count_text(view.tokens_per_s)} tokens/s")
    elif view.end is not None and view.tokens_per_s_overall is not None and progress.has_tokens:
        parts.append(f"{count_text(view.tokens_per_s_overall)} tokens/s overall")
    if progress.unit == "bytes":
        parts += [f"{bytes_text(view.bytes_per_s)}/s"] if view.bytes_per_s else []
    elif progress.bytes or (progress.unit == "samples" and progress.done):
        parts.append(bytes_text(progress.bytes))
    parts += [f"{clean(name)} {clean(value)}" for name, value in progress.values.items()]
    parts += [
        f"{count_text(n)} {word}" for n, word in ((progress.skipped, "skipped"), (progress.failed, "failed")) if n
    ]
    if left := left_text(view):
        parts.append(left)
    return ", ".join(parts)


def standing_line(view: RunView) -> str:
    """Return where a run stands, or how it ended, and how far it came, in one line."""
    words = view_end_text(view) if view.end is not None else state_text(view)
    stage = at_work(view) if view.end is None else None
    if stage is not None:
        words += f", {clean(stage.name)}"
        if stage.started is not None and view.host_time is not None:
            words += f" for {duration_text(view.host_time - stage.started, running=True)}"
    return clean(words) + (f": {progress_line(view)}" if view.progress is not None else "")


def changes(before: RunView, view: RunView, *, refused: bool) -> list[str]:
    """Return a line for each change; what refused the run only where no error says it, see `choose_view`."""
    lines: list[str] = []
    for label, old, new in (
        ("", before.stages, view.stages),
        ("host: ", before.steps, view.steps),
        ("job: ", before.phases, view.phases),
    ):
        lines += [f"{label}{_stage(stage)}" for stage in _changed(old, new)]
    for finding in view.findings[len(before.findings) :]:
        if finding.level == "warn" or (finding.level == "fail" and refused):
            why = f": {clean(finding.why)}" if finding.why else ""
            fix = f" (fix: {clean(finding.fix)})" if finding.fix else ""
            lines.append(f"{clean(finding.level).upper()}  {clean(finding.what)}{why}{fix}")
    fresh = [notice for notice in view.notices if notice not in before.notices]
    lines += [f"{clean(notice.level).upper()}  {clean(notice.writer)}: {clean(notice.text)}" for notice in fresh]
    if view.contact is not before.contact:
        back = "connected again" if view.contact is Contact.CONNECTED else f"contact {view.contact.value}"
        lines.append(back + (f": {clean(view.contact_text)}" if view.contact_text else ""))
    if view.state != before.state and view.state:
        lines.append(f"run {clean(view.run)} is {clean(state_word(view.state))}")
    if is_paused(view) and before.pause is None:
        lines.append(f"run {clean(view.run)} is {clean(state_text(view))}")
    elif before.pause is not None and view.pause is None and view.end is None:
        lines.append(f"run {clean(view.run)} goes on")
    fresh_failures = view.failures[len(before.failures) :]
    if view.state == RunState.STOPPING.value:
        # What processes report as they are stopped reads like a failure, and is none; the log has it whole.
        lines += [f"{clean(failure.label)} ended with {clean(failure.exc_type)}" for failure in fresh_failures]
    else:
        lines += [line for failure in fresh_failures for line in _failure(failure, view.failures)]
    if view.end is not None and before.end is None:
        if view.progress is not None:
            lines.append(progress_line(view))
        told = any(stage.text == view.end.message for stage in view.steps)  # by the step that failed
        message = f": {clean(view.end.message)}" if view.end.message and not told else ""
        left = gpus_clean_text(view)
        lines.append(f"run {clean(view.run)} {clean(view_end_text(view))}{message}{left and f'; {left}'}")
    return lines


def _changed(old: Sequence[StageView], new: Sequence[StageView]) -> list[StageView]:
    return [stage for index, stage in enumerate(new) if index >= len(old) or stage != old[index]]


def _stage(stage: StageView) -> str:
    seconds = "" if stage.seconds is None or stage.status is Status.STARTED else f" in {duration_text(stage.seconds)}"
    text = f": {clean(stage.text)}" if stage.text else ""
    return f"{clean(stage.name)} {stage.status.value}{seconds}{text}"


def _failure(failure: Failure, known: Sequence[Failure]) -> list[str]:
    """A traceback whole the first time; a word for each process that reports the same."""
    earlier = known[: known.index(failure)]
    head = f"EXCEPTION  {clean(failure.label)}: {clean(failure.summary)}"
    first = next((each for each in earlier if each.cause == failure.cause), None)
    if first is not None:
        return [f"{head} (same place as {clean(first.label)})"]
    return [head, *(f"  {line}" for line in clean_block(failure.traceback).splitlines())]


def heartbeat(view: RunView, now: float, quiet_s: float) -> str:
    stage = at_work(view) or view.phase or (view.stages[-1] if view.stages else None)
    parts = [f"still {clean(stage.name)}" if stage else "still preparing"]
    parts[0] += f" after {duration_text(view.elapsed_s(now), running=True)}"
    if is_paused(view):
        parts.insert(0, state_text(view))
    if view.progress is not None:
        parts.append(progress_line(view))
    if view.contact is not Contact.CONNECTED:
        parts.append(f"contact {view.contact.value}")
    elif quiet_s >= QUIET_S:
        parts.append(f"no output for {duration_text(quiet_s, running=True)}")
    return "; ".join(parts)

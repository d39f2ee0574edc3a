"""What a view is told of a run beside its events: ranks of GPUs, usual durations, signs of life, the cause."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from controller import diagnosis, history
from controller.core.events import Event, parse_event
from controller.core.numbers import finite
from controller.core.runview import CAPTURING
from controller.core.tracebacks import Failure, FoldedFailure
from controller.run import Run, load_plan
from controller.runfolder import RunFolder
from controller.stages.mirror import LOCAL_EVENTS
from controller.ui.board import Diagnosed, Known
from remote_payload.host.files import parse_line, tail_bytes
from remote_payload.host.layout import LOG_TIMES
from remote_payload.host.protocol import EndReason, Plan

LAST_BYTES = 64 << 10
"""Looked at for the last line of a ledger, which has the figures of each state."""

EARLIER_RUNS = 5
"""Enough for a median, few enough to be read before the first frame."""

_TIMED = ("stage", "step", "phase")

_READ = ("data", "resume", "verify")
"""Phases and steps that take as long as there are samples, those of an earlier run included."""

_AMOUNT = ("data", "max_samples", "shard")
"""What in a plan says of how many samples an extraction is."""


def known_of(folder: RunFolder, plan: Plan | None = None, *, live: bool = True) -> Known:
    """Return what is known of the run in a local folder; `live` is False for one that is replayed from it.

    `plan` is for a run whose folder does not hold it yet.
    """
    plan = plan or load_plan(folder)
    earlier = earlier_runs(plan) if plan else []
    return Known(
        title=plan["job"]["name"] if plan else str((folder.read("local.json") or {}).get("name") or ""),
        earlier=_earlier(folder) if live else (),
        ranks=gpu_ranks(plan) if plan else {},
        usual=usual_seconds(earlier, plan),
        ending_s=usual_ending(earlier),
        # Of a replay they would be those of its end.
        written=(lambda: written_at(folder)) if live else dict,
        printed=(lambda: printed_at(folder)) if live else (lambda: None),
        diagnose=lambda: _diagnosed(folder),
    )


class RunControls:
    """What keys may do to a run that is being watched."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def detach(self) -> None:
        """End the watch; the run goes on."""
        self._run.detach()

    def stop(self) -> str:
        """Stop the run on its host, and return how that went. Raises CtlError."""
        return self._run.stop().message


def gpu_ranks(plan: Plan) -> dict[int, int]:
    """Return the tensor-parallel rank of each GPU by its index in nvidia-smi; empty where that is not known.

    vLLM gives rank i the i-th of the visible GPUs.
    """
    if not plan["host"]["gpus"] or not plan.get("extract"):
        return {}
    visible = plan["job"]["env"].get("CUDA_VISIBLE_DEVICES")
    indices: Sequence[int] = range(plan["host"]["gpus"])
    if visible:
        words = [word.strip() for word in visible.split(",")]
        if not all(word.isdecimal() for word in words):
            return {}  # UUIDs: samples name GPUs by index only
        indices = [int(word) for word in words]
    extract = plan["extract"] or {}
    size = int(extract["engine"].get("tensor_parallel_size") or len(indices))
    return {index: rank for rank, index in enumerate(indices[:size])}


def earlier_runs(plan: Plan) -> list[Path]:
    """Return the folders of the latest successful runs of the same job on the same host, newest first."""
    same = (
        Path(entry.folder)
        for entry in reversed(list(history.entries()))
        if (entry.host, entry.name) == (plan["host"]["name"], plan["job"]["name"]) and entry.run_id != plan["run_id"]
    )
    return list(islice((folder for folder in same if _succeeded(folder)), EARLIER_RUNS))


def usual_seconds(folders: Iterable[Path], plan: Plan | None = None) -> dict[str, float]:
    """Return the median seconds of each stage, step and phase by name, over recorded runs.

    What takes as long as there are samples is only told by runs of as many as `plan` is of (None: of any), and what
    takes as long as there are samples to capture only by those that captured all.
    """
    seconds: dict[str, list[float]] = {}
    for folder in folders:
        unlike: tuple[str, ...] = CAPTURING if _resumed(folder / "events" / "driver.jsonl") else ()
        if plan is not None and _amount(folder) != _amount_of(plan):
            unlike = (*CAPTURING, *_READ)
        for path in (folder / "events").glob("*.jsonl"):
            with open(path, "rb") as stream:
                for line in stream:
                    # Most lines are samples: parsing them all would take longer than the rest of a start.
                    timed = _timed(line) if b'"seconds"' in line and b'"done"' in line else None
                    if timed is not None and timed[0] not in unlike:
                        seconds.setdefault(timed[0], []).append(timed[1])
    return {name: statistics.median(each) for name, each in seconds.items()}


def _amount_of(plan: Mapping[str, Any]) -> list[Any]:
    spec = plan.get("extract") or {}
    return [spec.get(key) for key in _AMOUNT]


def _amount(folder: Path) -> list[Any] | None:
    try:
        return _amount_of(RunFolder(folder).read("plan.json") or {})
    except ValueError:  # cut by a full disk: nobody knows of how many it was
        return None


def _resumed(driver: Path) -> bool:
    """Whether an extraction began with samples of an earlier run: its first report says so."""
    if not driver.is_file():
        return False
    with open(driver, "rb") as stream:
        reports = (parse_event(line) for line in stream if b'"progress"' in line)
        first = next((event for event in reports if event is not None and event.type == "progress"), None)
    return first is not None and bool(first.get("done"))


def usual_ending(folders: Iterable[Path]) -> float | None:
    """Return the median seconds from the last sample of recorded extractions to their end; None where none tells."""
    spans = []
    for folder in folders:
        written = _times(folder / "events" / "driver.jsonl", "phase", "capture", "drain")
        ended = _times(folder / "events" / "supervisor.jsonl", "end")
        if written and ended:
            spans.append(max(0.0, ended[-1] - written[-1]))
    return statistics.median(spans) if spans else None


def written_at(folder: RunFolder) -> dict[int, float]:
    """Return when each rank wrote its last sample, by the host's clock in seconds since the epoch.

    Where the end of a ledger does not say, as of an earlier version, it is the time at which it grew here.
    """
    times = {}
    for path in (folder.path / "ledger").glob("rank-*.jsonl"):
        rank = path.stem.removeprefix("rank-")
        if rank.isdecimal():
            t = _last_time(path)
            times[int(rank)] = path.stat().st_mtime if t is None else t
    return times


def printed_at(folder: RunFolder) -> float | None:
    """Return when the host noted the last byte of the log that is here, by its clock; None of an earlier version."""
    return _last_time(folder.path / "log" / LOG_TIMES)


def _last_time(path: Path) -> float | None:
    """Return `t` of the last whole line of a file of JSON objects, None if it has none."""
    *lines, _ = tail_bytes(str(path), LAST_BYTES).split(b"\n")
    record = parse_line(lines[-1]) if lines else None
    return finite(record.get("t")) if record is not None else None


def _earlier(folder: RunFolder) -> tuple[Event, ...]:
    path = folder.path / "events" / LOCAL_EVENTS
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return tuple(event for event in map(parse_event, lines) if event is not None)


def _times(path: Path, event_type: str, *names: str) -> list[float]:
    """Return when the phases of `names` were done, or the event came, in the host's seconds since the epoch."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    events = (parse_event(line) for line in lines if f'"{event_type}"'.encode() in line)  # most are samples
    return [
        event.t
        for event in events
        if event is not None
        and event.type == event_type
        and (not names or (event.get("name") in names and event.get("status") == "done"))
    ]


def _timed(line: bytes) -> tuple[str, float] | None:
    try:
        record: dict[str, Any] = json.loads(line)
        if record["type"] in _TIMED and record["status"] == "done":
            return str(record["name"]), float(record["seconds"])
    except (ValueError, KeyError, TypeError):
        pass  # cut off, or of a newer version: it counts for nothing
    return None


def _succeeded(folder: Path) -> bool:
    result = RunFolder(folder).read("result.json") or {}
    return result.get("end_reason") == EndReason.SUCCEEDED.value


def _diagnosed(folder: RunFolder) -> Diagnosed:
    found = diagnosis.diagnose_run(folder)
    if found.triage is None:
        return Diagnosed(failures=found.failures)
    cause, failures = found.triage, found.failures
    if cause.traceback and not any(cause.traceback in each.first.traceback for each in failures):
        # The events hold what the parent was told; what happened is in the log.
        exc_type, _, message = cause.exception.partition(": ")
        root = Failure(
            source=cause.source, rank=cause.rank, exc_type=exc_type, message=message, traceback=cause.traceback,
            where=cause.where,
        )  # fmt: skip
        failures = (FoldedFailure(first=root), *failures)
    return Diagnosed(cause=cause.record(), failures=failures)

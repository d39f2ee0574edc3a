"""Failures of remote processes: which one came first, and which say the same.

With tensor parallelism one mistake fails on every rank, is logged twice by vLLM, and is then repeated by each parent
that noticed its child die. What a person needs is the first failing rank's traceback, whole, once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SAME_FRAMES = 5
"""Failures are the same if their type and this many innermost frames agree. The outer frames differ between the
traceback that a process logs and the one it dies with; the message may name a file, an address or a device."""

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)
_WORKER = re.compile(r"(?:VllmWorker|Worker|rank)(?![a-z])")


_HOOKED = re.compile(r"py-(?P<pid>\d+)-[0-9a-f]+")
"""The writer of a Python process of a command, as `remote_payload.hook` names it."""


def process_label(source: str, rank: int | None) -> str:
    """Return a process in words: `rank 3`, `EngineCore`, `driver`, `process 25907`."""
    if rank is not None:
        return f"rank {rank}"
    hooked = _HOOKED.fullmatch(source)
    return f"process {hooked['pid']}" if hooked else source or "main process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One exception of one process, `traceback` whole and including its last line.

    `source` is the process as the log names it, or the writer of the event; `t` is seconds since the epoch by the
    host's clock where it is known.
    """

    source: str
    rank: int | None
    exc_type: str
    message: str
    traceback: str
    where: str = ""
    t: float | None = None

    @property
    def summary(self) -> str:
        """The last line of a traceback: `TYPE: MESSAGE`, or `TYPE` alone where the message is empty."""
        return f"{self.exc_type}: {self.message}" if self.message else self.exc_type

    @property
    def label(self) -> str:
        """The process in words; see `process_label`."""
        return process_label(self.source, self.rank)

    @property
    def distance(self) -> int:
        """How far from the cause: 0 a worker, 1 the engine core, 2 a parent, which only reports what it was told."""
        if self.rank is not None or _WORKER.match(self.source):
            return 0
        return 1 if self.source.startswith("EngineCore") else 2

    @property
    def cause(self) -> tuple[object, ...]:
        """Equal for failures that are the same; see SAME_FRAMES."""
        frames = _FRAME.findall(self.traceback)[-SAME_FRAMES:]
        return (self.exc_type, *frames) if frames else (self.exc_type, self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedFailure:
    """A failure and the later ones that are the same, one per process."""

    first: Failure
    same: tuple[Failure, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that failed like this, ascending."""
        return tuple(sorted({each.rank for each in (self.first, *self.same) if each.rank is not None}))

    @property
    def same_text(self) -> str:
        """`same on ranks 1-7`, and the other processes by name; empty if it happened once."""
        others = {each.rank for each in self.same if each.rank is not None}
        ranks = range_text(others)
        parts = [f"rank{'s' if len(others) > 1 else ''} {ranks}"] if ranks else []
        parts += [each.label for each in self.same if each.rank is None]
        return f"same on {', '.join(parts)}" if parts else ""

    @property
    def different_messages(self) -> tuple[Failure, ...]:
        """Of those that are the same, the ones whose message is not that of the first."""
        return tuple(each for each in self.same if each.message != self.first.message)


def fold(failures: Iterable[Failure]) -> tuple[FoldedFailure, ...]:
    """Return failures nearest the cause first, then in time order, equal ones folded into the first.

    Failures without a time keep their order. A process that reports one failure twice is counted once.
    """
    ordered = sorted(failures, key=lambda each: (each.distance, each.t if each.t is not None else 0.0))
    groups: dict[tuple[object, ...], list[Failure]] = {}
    for failure in ordered:
        group = groups.setdefault(failure.cause, [])
        if all((failure.source, failure.rank) != (each.source, each.rank) for each in group):
            group.append(failure)
    return tuple(FoldedFailure(first=group[0], same=tuple(group[1:])) for group in groups.values())


def range_text(numbers: Iterable[int]) -> str:
    """Return integers as ranges: `0-3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


_START = re.compile(r"Traceback \(most recent call last\):\s*$")
_LAST_LINE = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?::\s?(?P<message>.*))?$", re.DOTALL)
_VALIDATION = re.compile(r"[\w.]*ValidationError: \d+ validation errors? for ")
"""pydantic's: each place stands on a line of its own, and what is wrong with it, indented, below."""
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def collect(lines: Sequence[str], source: str, rank: int | None, *, multi_line: bool) -> list[Failure]:
    """Find every traceback among the lines of one process, in their order.

    `lines` have no log prefix left. With `multi_line` the lines are one log record, so what follows the last line
    belongs to the message; otherwise only indented lines do, and the places that pydantic lists, because anything
    may follow.
    """
    failures = []
    position = 0
    while position < len(lines):
        if not _START.match(lines[position]):
            position += 1
            continue
        end, last = _end(lines, position, multi_line)
        text = "\n".join(lines[position:end]).rstrip()
        match = _LAST_LINE.match("\n".join(lines[last:end]).rstrip()) if last is not None else None
        failures.append(
            Failure(
                source=source,
                rank=rank,
                exc_type=match["type"] if match else "",
                message=(match["message"] or "").rstrip() if match else "",
                traceback=text,
                where=_where(text),
            )
        )
        position = end
    return failures


def _end(lines: Sequence[str], start: int, multi_line: bool) -> tuple[int, int | None]:
    """Return where the traceback from `start` ends (exclusive) and where its last exception's line is.

    The second is None if the process died, or the log ends, in the middle of the frames.
    """
    position = start + 1
    while position < len(lines) and lines[position][:1].isspace():
        position += 1
    if position == len(lines) or not _LAST_LINE.match(lines[position]):
        return position, None
    last = position
    position += 1
    while position < len(lines) and not _START.match(lines[position]):
        chained = _chained(lines, position)
        if chained is not None:
            return _end(lines, chained, multi_line)
        listed = _VALIDATION.match(lines[last]) and lines[position + 1 : position + 2] != []
        if not (multi_line or lines[position][:1].isspace() or (listed and lines[position + 1].startswith("  "))):
            break
        position += 1
    return position, last


def _chained(lines: Sequence[str], position: int) -> int | None:
    """Return where the next traceback of a chain starts, if blank lines and the linking sentence lead to it."""
    following = [index for index in range(position, min(position + 4, len(lines))) if lines[index].strip()]
    linked = len(following) >= 2 and lines[following[0]] in _CHAIN and _START.match(lines[following[1]])
    return following[1] if linked else None


def _where(traceback: str) -> str:
    """Return `FILE:LINE in FUNCTION` of the innermost frame."""
    frames = _FRAME.findall(traceback)
    return "{}:{} in {}".format(*frames[-1]) if frames else ""

"""Name the cause of a failed run: from its exceptions first, from raw log lines where there are none.

A cause is named only where the catalogue has an entry whose evidence is there; otherwise the answer is the first
failure itself: its exception and the place of it. Being silent is better than sending somebody the wrong way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.core.logs import LINE_CAP, LogFolder, LogLine, lone_exceptions, parse_line, rank_of, worker_tracebacks
from controller.core.tracebacks import Failure, FoldedFailure
from controller.core.triage_catalogue import CATALOGUE
from controller.core.triage_entry import CONTEXT, KERNEL, Entry, is_told
from controller.core.triage_host import KILLED, OOM_KILLED
from controller.core.triage_time import failure_moment, is_around

UNKNOWN = "unknown"

PARTLY_WHY = "only a parent's words are here: what its worker failed of was printed by the worker, earlier"
PARTLY_FIX = (
    "give `ctl triage` the whole log from the start of vLLM, of each node where there are several: the worker's "
    "lines stand above these, most often as (Worker... pid=N) or (EngineCore... pid=N)"
)
"""Of a failure that only tells of another one, which is not in what was read."""

EVIDENCE_LIMIT = 4
"""Lines quoted for a cause, and as many of its context; more would hide the first."""

QUOTE_LIMIT = 300
"""Characters of a quoted line; vLLM logs whole configurations on one."""

_TIMESTAMP = re.compile(
    rb"(?:\S+ +\| +)?\[?(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)\]? ?"
)
"""What container runtimes put before each line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLine:
    """A line, and the file and line number (from 1) where it ended."""

    line: LogLine
    segment: str
    number: int
    stamp: str = ""
    """What a container runtime or journald put before the line; no part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A quoted line. `line` is 0 where the text comes from an event and not from a log."""

    text: str
    segment: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """Why a run failed. `code` is the entry of the catalogue, "unknown" if none fits.

    `rank` is the first that failed with it (None: not a rank), `ranks` all of them; `source` is empty where only the
    end itself tells. `others` are failures that only
    followed, `context` is what the machine said: signals, exit codes, the kernel's messages.
    """

    code: str
    what: str
    why: str
    fix: str
    rank: int | None
    ranks: tuple[int, ...]
    source: str
    exception: str
    where: str
    evidence: tuple[Evidence, ...]
    context: tuple[Evidence, ...]
    others: tuple[str, ...]
    traceback: str

    @property
    def known(self) -> bool:
        return self.code != UNKNOWN

    def record(self) -> dict[str, Any]:
        """Return it as JSON data, as `summary.json` carries it under `triage`."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"known": self.known, **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the supervisor saw the job end; empty for a log that ctl did not make."""

    end_reason: str = ""
    signal: int | None = None
    message: str = ""
    oom_killed: bool = False


def place_lines(segments: Iterable[tuple[str, bytes]], first: int = 1) -> list[PlacedLine]:
    """Split one stream, given as its (name, bytes) segments in order, into lines with their places.

    `first` is the number of the first line of the first segment.
    """
    folder = LogFolder()
    placed: list[PlacedLine] = []
    name, number, begun, stamp = "", first, False, ""
    for count, (segment, data) in enumerate(segments):
        name, number = segment, first if count == 0 else 1
        *whole, rest = data.split(b"\n")
        for piece in whole:
            if not begun:
                stamp, piece = _unstamped(piece)
            if begun or b"\r" in piece or len(piece) > LINE_CAP:
                lines = folder.feed(piece + b"\n")
            else:  # most lines, at a fifth of the cost
                lines = [parse_line(piece.decode(errors="replace"))]
            placed += [PlacedLine(line=line, segment=name, number=number, stamp=stamp) for line in lines]
            number += 1
            begun = False
        if rest:
            if not begun:
                stamp, rest = _unstamped(rest)
            folder.feed(rest)
            begun = True
    return placed + [PlacedLine(line=line, segment=name, number=number, stamp=stamp) for line in folder.close()]


def _unstamped(line: bytes) -> tuple[str, bytes]:
    found = _TIMESTAMP.match(line)
    if found is None:
        return "", line
    return found["stamp"].decode(), line[found.end() :]


def _of_this_failure(lines: Sequence[PlacedLine]) -> Sequence[PlacedLine]:
    """Leave out what the kernel said at another time, about something else."""
    if not any(KERNEL.search(placed.line.text) for placed in lines):
        return lines
    failed = failure_moment((placed.line, placed.stamp) for placed in lines)
    pids = frozenset(placed.line.pid for placed in lines if placed.line.pid is not None)
    return [
        placed
        for placed in lines
        if not KERNEL.search(placed.line.text) or is_around(placed.line, placed.stamp, failed, pids)
    ]


def triage(
    lines: Sequence[PlacedLine],
    failures: Sequence[FoldedFailure] = (),
    ending: Ending | None = None,
    *,
    catalogue: Sequence[Entry] = CATALOGUE,
) -> Triage | None:
    """Return the cause of a failure, None if there is no sign of one.

    `failures` are those of the run's events, nearest the cause first; without any they are taken from the log.
    """
    ending = ending or Ending()
    lines = _of_this_failure(lines)
    found = tuple(failures) or worker_tracebacks(placed.line for placed in lines)
    roots = [each for each in found if not is_told(each.first)]
    by_end = next((entry for entry in catalogue if ending.end_reason in entry.ends), None)
    if by_end is not None:
        return _from_end(by_end, ending, lines)
    for group in roots[:1]:
        for entry in catalogue:
            match = _match_failure(entry, group, lines)
            if match is not None:
                return _from_failure(entry, group, found, lines, match)
    if not roots:
        for entry in catalogue:
            result = _match_lines(entry, lines, found) or _match_told(entry, found, lines)
            if result is not None:
                return result
        if ending.signal is not None:
            return _from_end(OOM_KILLED if ending.oom_killed else KILLED, ending, lines)
        if found and (lone := [each for each in lone_exceptions(p.line for p in lines) if not is_told(each.first)]):
            return triage(lines, (*lone, *found), ending, catalogue=catalogue)
    return _from_failure(None, (roots or list(found))[0], found, lines, None) if found else None


def _match_failure(entry: Entry, group: FoldedFailure, lines: Sequence[PlacedLine]) -> re.Match[str] | None:
    """Match an exception by its own words; of a chain only the last exception, then the one that caused it."""
    if entry.exception is None or len(group.ranks) < entry.least_ranks:
        return None
    failure = group.first
    if entry.frames is not None and not entry.frames.search(failure.traceback):
        return None
    if entry.beside is not None and not any(entry.beside.search(placed.line.text) for placed in lines):
        return None
    for summary in (failure.summary, *_causes(failure.traceback)):
        match = entry.exception.search(summary)
        if match is not None:
            return match
    return None


_DIRECT = "The above exception was the direct cause of the following exception:"


def _causes(traceback: str) -> Iterator[str]:
    """Yield the last line of each exception that a chain names as the direct cause of a later one, latest first."""
    parts = traceback.split(_DIRECT)
    for part in reversed(parts[:-1]):
        words = [line for line in part.strip().splitlines() if line.strip()]
        if words and not words[-1][:1].isspace():
            yield words[-1]


def _match_lines(entry: Entry, lines: Sequence[PlacedLine], found: Sequence[FoldedFailure]) -> Triage | None:
    """Match an entry that shows in plain lines: what kills a process leaves no exception in it."""
    if entry.line is None:
        return None
    for placed in lines:
        match = entry.line.search(placed.line.text)
        if match is not None:
            source = match.groupdict().get("source") or placed.line.source
            rank = rank_of(source)
            return _result(
                entry, match, lines, rank=rank, ranks=() if rank is None else (rank,), source=source, group=None,
                evidence=[_quote(placed)], others=[_line_of(each) for each in found],
            )  # fmt: skip
    return None


def _match_told(entry: Entry, found: Sequence[FoldedFailure], lines: Sequence[PlacedLine]) -> Triage | None:
    """Match what a parent was told, where the worker's own log is not there."""
    for group in found:
        match = _match_failure(entry, group, lines)
        if match is not None:
            return _from_failure(entry, group, found, lines, match)
    return None


def _from_failure(
    entry: Entry | None,
    group: FoldedFailure,
    found: Sequence[FoldedFailure],
    lines: Sequence[PlacedLine],
    match: re.Match[str] | None,
) -> Triage:
    others = [_line_of(each) for each in found if each is not group]
    return _result(
        entry, match, lines, rank=group.first.rank, ranks=group.ranks, source=group.first.source, group=group,
        evidence=_located(group.first, match, lines), others=others,
    )  # fmt: skip


def _from_end(entry: Entry, ending: Ending, lines: Sequence[PlacedLine]) -> Triage:
    message = ending.message
    if ending.signal is not None and not _KILLED_BY.search(message):  # result.json is not here yet
        message = f"the job was killed by signal {ending.signal}"
    evidence = [Evidence(text=message[:QUOTE_LIMIT], segment="result.json", line=0)]
    match = _KILLED_BY.search(message) or _WHOLE.match(message)
    return _result(
        entry, match, lines, rank=None, ranks=(), source="", group=None, evidence=evidence, others=[],
    )  # fmt: skip


_WHOLE = re.compile(r"(?P<detail>.*)", re.DOTALL)
_KILLED_BY = re.compile(r"was killed by (?P<source>\S+( \d+)?)")
"""How the supervisor says by which signal a step's program died; `Step was killed by SIGKILL`."""


def _result(
    entry: Entry | None,
    match: re.Match[str] | None,
    lines: Sequence[PlacedLine],
    *,
    rank: int | None,
    ranks: tuple[int, ...],
    source: str,
    group: FoldedFailure | None,
    evidence: list[Evidence],
    others: list[str],
) -> Triage:
    first = group.first if group else None
    partly = first is not None and is_told(first)
    words = {name: value or "?" for name, value in match.groupdict().items()} if match else {}
    words = {**dict.fromkeys(("name", "source", "detail", "wanted"), "?"), **words}
    if words["name"] == "?":  # of an entry whose patterns tell it under one or the other name
        words["name"] = words["detail"]
    if entry:
        own = f"{words['owner']}.{words['name']}" if "owner" in words else words["name"]
        words["name"] = entry.renamed.get(own, words["name"])
    beside = [each for each in (entry.beside, entry.also) if each is not None] if entry else []
    evidence += [_quote(placed) for each in beside for placed in lines if each.search(placed.line.text)]
    context = [_quote(placed) for placed in lines if CONTEXT.search(placed.line.text)]
    return Triage(
        code=entry.code if entry else UNKNOWN,
        what=entry.what.format(**words) if entry else _unmatched(first),
        why=entry.why.format(**words) if entry else PARTLY_WHY if partly else "",
        fix=entry.fix.format(**words) if entry else PARTLY_FIX if partly else "",
        rank=rank,
        ranks=ranks,
        source=source,
        exception=first.summary if first else "",
        where=first.where if first else "",
        evidence=tuple(dict.fromkeys(evidence))[:EVIDENCE_LIMIT],
        context=tuple(each for each in dict.fromkeys(context) if each not in evidence)[:EVIDENCE_LIMIT],
        others=tuple(others),
        traceback=first.traceback if first else "",
    )


def _unmatched(failure: Failure | None) -> str:
    """Return the words for what no entry knows, and the exception with its place."""
    if failure is None:
        return "unknown cause"
    summary = failure.summary.partition("\n")[0][:QUOTE_LIMIT]
    return f"unknown cause: {summary}" + (f", at {failure.where}" if failure.where else "")


def _located(failure: Failure, match: re.Match[str] | None, lines: Sequence[PlacedLine]) -> list[Evidence]:
    """Quote the exception's line, and where its message is long the line that tells: from the log, else the event."""
    words = match.string if match else failure.summary
    telling = words[words.rfind("\n", 0, match.end()) + 1 :].partition("\n")[0] if match else ""
    quotes = []
    for wanted in dict.fromkeys(text.strip() for text in (words.partition("\n")[0], telling)):
        same = [placed for placed in lines if wanted and placed.line.text.strip() == wanted]
        mine = [p for p in same if (p.line.source, p.line.rank) == (failure.source, failure.rank)]
        if same:
            quotes.append(_quote((mine or same)[0]))
        elif wanted:
            event = f"events/{failure.source or 'driver'}.jsonl"
            quotes.append(Evidence(text=wanted[:QUOTE_LIMIT], segment=event, line=0))
    return quotes


def _quote(placed: PlacedLine) -> Evidence:
    return Evidence(text=placed.line.text.strip()[:QUOTE_LIMIT], segment=placed.segment, line=placed.number)


def _line_of(group: FoldedFailure) -> str:
    return f"{group.first.label}: {group.first.summary.partition(chr(10))[0][:QUOTE_LIMIT]}"

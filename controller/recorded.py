"""All that is held here of a run, read for somebody who looks at it whole: a report, a notebook, a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from controller import diagnosis
from controller.core.events import Event, parse_event
from controller.core.ledger import Fate, LedgerLine, latest, parse_line, truncated_indexes
from controller.core.runview import ProgressView, RunView
from controller.core.shares import counted
from controller.core.state import reduce, replay
from controller.core.usage import usage
from controller.runfolder import RunFolder
from remote_payload.host.protocol import Plan


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run's documents, events and ledgers; what was never copied here is None or empty."""

    folder: RunFolder
    plan: Plan | None
    summary: dict[str, Any] | None
    """summary.json with `triage` (see `diagnosis`) and `gpu_hours` added."""
    result: dict[str, Any] | None
    events: tuple[Event, ...]
    """Of all writers, by time."""
    lines: dict[int, LedgerLine]
    """The ledger line that counts, by sample."""
    truncated: frozenset[int]

    @cached_property
    def view(self) -> RunView:
        """The state that the events lead to, without the samples of devices: `reduce` keeps few of them."""
        return replay(RunView(), (event for event in self.events if event.type != "sample"))

    @cached_property
    def progress(self) -> list[ProgressView]:
        """Every report of the driver, in order."""
        reports = (reduce(RunView(), event).progress for event in self.events if event.type == "progress")
        return [report for report in reports if report is not None]

    @property
    def playbook_file(self) -> str | None:
        found = (self.folder.read("local.json") or {}).get("playbook_file")
        return None if found is None else str(found)

    @property
    def indexes(self) -> range:
        """The samples that the run was to write, as far as that is known: this host's share of the data set."""
        spec = (self.plan["extract"] if self.plan else None) or {}
        number, count = shard = spec.get("shard") or (1, 1)
        data = (self.summary or {}).get("data") or {}
        records = data.get("records") if isinstance(data, dict) else None
        if not isinstance(records, int):
            _, reported = counted(self.progress[-1] if self.progress else None, shard)
            records = max([reported, *(index + 1 for index in self.lines)])
        return range(number - 1, records, count)

    @property
    def bad(self) -> set[int]:
        """Samples that verify did not find as the ledger describes them; it lists the first 10,000."""
        missing = (self.summary or {}).get("missing")
        listed = {index for index in missing if isinstance(index, int)} if isinstance(missing, list) else set()
        return {index for index in listed if (line := self.lines.get(index)) and line.fate is Fate.WRITTEN}


def load(folder: RunFolder) -> Recorded:
    """Read a run folder of this workstation. Lines that are cut off or foreign are passed over."""
    summary = folder.read("summary.json")
    plan: Any = folder.read("plan.json")
    result = folder.read("result.json")
    # Read twice: the records of half a million samples would take 1.5 GB beside what is made of them.
    parsed = (parse_line(record, rank) for record, rank in ledger_records(folder))
    return Recorded(
        folder=folder,
        plan=plan,
        summary={**diagnosis.with_triage(summary, folder), **usage(plan, result, None)} if summary else None,
        result=result,
        events=tuple(events(folder)),
        lines=latest(line for line in parsed if line is not None),
        truncated=frozenset(truncated_indexes(record for record, _ in ledger_records(folder))),
    )


def last_progress(folder: RunFolder) -> ProgressView | None:
    """Return the driver's latest report of an extraction, None before it has counted its data set."""
    path = folder.path / "events" / "driver.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    told = (event for event in map(parse_event, reversed(lines)) if event is not None and event.type == "progress")
    last = next(told, None)
    return reduce(RunView(), last).progress if last is not None else None


def events(folder: RunFolder) -> list[Event]:
    """Return the events of all writers by time; each writer's own order is kept where its clock was set back."""
    keyed: list[tuple[float, str, int, Event]] = []
    for path in sorted((folder.path / "events").glob("*.jsonl")):
        latest_t = float("-inf")
        for event in filter(None, map(parse_event, path.read_bytes().splitlines())):
            latest_t = max(latest_t, event.t)
            keyed.append((latest_t, event.writer, event.seq, event))
    return [event for *_, event in sorted(keyed, key=lambda each: each[:3])]


def ledger_records(folder: RunFolder) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Yield each whole line of the ledgers with the rank that wrote it, None for the driver's."""
    for path in sorted((folder.path / "ledger").glob("*.jsonl")):
        rank = int(path.stem[5:]) if path.stem.startswith("rank-") and path.stem[5:].isdecimal() else None
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    continue  # the last may not be copied whole yet
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # cut by a full disk; its writer put the same record on the next line
                if isinstance(record, dict):
                    yield record, rank

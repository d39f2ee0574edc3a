"""Checks of a data set's records: the lines that will give no sample, before anything is loaded for the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.finding import Finding, section, warned
from remote_payload.host.codes import BLANK
from remote_payload.host.protocol import Plan


def check_records(report: Mapping[str, Any], plan: Plan, name: str | None = None) -> Iterator[Finding]:
    """Warn of broken and blank lines of a JSONL data set; `name` is what its user calls it, else its path.

    A host whose payload does not look for them tells nothing, and so does a data set of rows.
    """
    spec, found = plan["extract"], section(report, "data")
    broken = found.get("broken") if found is not None else None
    if spec is None or not broken or not broken["faults"]:
        return
    count = sum(fault["count"] for fault in broken["faults"])
    lines = f"{broken['lines']:,} line{'' if broken['lines'] == 1 else 's'}"
    of = lines if broken["whole"] else f"the first {lines}"
    yield warned(
        "data-broken",
        f"{count:,} of {of} of {name or spec['data']} give{'s' if count == 1 else ''} no sample",
        why="; ".join(map(_told, broken["faults"])),
        fix="mend these lines, or leave them: they are skipped and counted, and no other is affected",
    )


def _told(fault: Mapping[str, Any]) -> str:
    lines, count = fault["lines"], fault["count"]
    where = f"line{'s' if count > 1 else ''} {', '.join(map(str, lines))}" + (
        " and more" if count > len(lines) else ""
    )
    if fault["code"] == BLANK:
        return f"{count:,} blank: {where}"
    first = f"line {lines[0]}: " if count > 1 else ""
    return f"{count:,} {fault['code']}: {where} ({first}{fault['why']})"

"""Lines of a JSONL data set that give no record: counted before the launch, by the job's own judgement."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

from remote_payload.host.codes import BLANK
from remote_payload.host.textdata import LINE_LIMIT, Fault, parse_record, record_fault

SCAN_S = 4.0
"""Hundreds of megabytes from a warm disk; the rest of a larger file is the job's to read."""

NAMED = 8
"""Lines named of each kind."""


class Faults:
    """Counts lines by code, the first of each with their numbers and the first reason."""

    def __init__(self) -> None:
        self.found: Dict[str, Dict[str, Any]] = {}

    def add(self, number: int, fault: Fault) -> None:
        known = self.found.setdefault(fault.code, {"code": fault.code, "count": 0, "lines": [], "why": fault.why})
        known["count"] += 1
        if len(known["lines"]) < NAMED:
            known["lines"].append(number)

    @property
    def count(self) -> int:
        return sum(each["count"] for each in self.found.values())

    def records(self) -> List[Dict[str, Any]]:
        """Return them by code."""
        return [self.found[code] for code in sorted(self.found)]


def probe_broken(path: str, kind: str, max_samples: Optional[int], seconds: float = SCAN_S) -> Dict[str, Any]:
    """Return {"lines", "whole", "faults": [{"code", "count", "lines", "why"}]} of a JSONL file.

    `lines` were looked at: as many as the job reads for `max_samples` records (None: all), or as `seconds` allow, in
    which case `whole` is False. What a tokenizer would refuse is not known here. Raises OSError.
    """
    deadline = time.monotonic() + seconds
    faults, number, good, whole = Faults(), 0, 0, True
    with open(path, "rb") as file:
        while whole and (max_samples is None or good < max_samples):
            if time.monotonic() > deadline:  # asked for each line: one may have megabytes
                whole = False
                break
            line = file.readline(LINE_LIMIT + 1)
            if not line:
                break
            number += 1
            if len(line) > LINE_LIMIT:
                while whole and line and not line.endswith(b"\n"):
                    whole = time.monotonic() <= deadline
                    line = file.readline(LINE_LIMIT)
                faults.add(number, Fault("over-long", "the line is longer than %d bytes" % LINE_LIMIT))
            elif not line.strip():
                faults.add(number, Fault(BLANK, ""))
            else:
                record = parse_record(line)
                fault = record if isinstance(record, Fault) else record_fault(record, kind)
                if fault is None:
                    good += 1
                else:
                    faults.add(number, fault)
    return {"lines": number, "whole": whole, "faults": faults.records()}

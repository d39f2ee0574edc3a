"""The records about which something is to be said: counted by code, the first of each with its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from remote_payload.extract.dataset import NOTICES, Skip
from remote_payload.host.broken import NAMED

NOTED = {
    "truncated": "cut to max_seq_len",
    "split": "split where the template alters earlier turns",
    "no-loss": "kept although no token of theirs counts",
}


class Refused:
    """The records that gave no sample, and those that gave one all the same (codes in NOTICES), kept apart."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lines: dict[str, list[int]] = {}

    def add(self, record: Skip) -> None:
        self._counts[record.code] += 1
        lines = self._lines.setdefault(record.code, [])
        if len(lines) <= NAMED and record.line not in lines:  # parts of one chat share it
            lines.append(record.line)

    @property
    def skipped(self) -> int:
        """How many gave no sample."""
        return sum(count for code, count in self._counts.items() if code not in NOTICES)

    def document(self) -> dict[str, Any]:
        """Return {"skipped", "skipped_lines", "noted", "noted_lines"}: fields of the summary, see docs/inputs.md.

        Both are {code: records}, and of each code the first NAMED lines, or rows; the ledger has them all.
        """
        skipped = [code for code in self._counts if code not in NOTICES]
        noted = [code for code in self._counts if code in NOTICES]
        return {
            "skipped": {code: self._counts[code] for code in skipped},
            "skipped_lines": {code: self._lines[code][:NAMED] for code in skipped},
            "noted": {code: self._counts[code] for code in noted},
            "noted_lines": {code: self._lines[code][:NAMED] for code in noted},
        }

    def notices(self, container: str) -> Iterator[tuple[str, str]]:
        """Yield (code, text) of each code; `container` decides whether a record has a line or a row."""
        place = "line" if container in ("jsonl", "json") else "row"
        for code, count in sorted(self._counts.items()):
            lines = self._lines[code]
            where = f"{place}{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:NAMED]))}"
            if len(lines) > NAMED:
                where += " and more"
            records = "1 record was" if count == 1 else f"{count:,} records were"
            yield code, f"{records} {NOTED.get(code, f'skipped ({code})')}: {where}; see ledger/driver.jsonl"

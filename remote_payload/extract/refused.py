"""The records about which something is to be said: counted by code, the first of each with its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from remote_payload.extract.dataset import NOTICES, Skip
from remote_payload.host.broken import NAMED

NOTED = {
    "truncated": "cut to max_seq_len",
    "split": "split where the template alters earlier turns",
    "no-loss": "kept although no token of theirs counts",
}


class Refused:
    """`counts` has every code, those of NOTICES too."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lines: dict[str, list[int]] = {}

    def add(self, record: Skip) -> None:
        self.counts[record.code] += 1
        lines = self._lines.setdefault(record.code, [])
        if len(lines) <= NAMED and record.line not in lines:  # parts of one chat share it
            lines.append(record.line)

    @property
    def skipped(self) -> int:
        """How many gave no sample."""
        return sum(count for code, count in self.counts.items() if code not in NOTICES)

    @property
    def lines(self) -> dict[str, list[int]]:
        """The first NAMED lines, or rows, of each code; the ledger has them all."""
        return {code: lines[:NAMED] for code, lines in self._lines.items()}

    def notices(self, container: str) -> Iterator[tuple[str, str]]:
        """Yield (code, text) of each code; `container` decides whether a record has a line or a row."""
        place = "line" if container in ("jsonl", "json") else "row"
        for code, count in sorted(self.counts.items()):
            lines = self._lines[code]
            where = f"{place}{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:NAMED]))}"
            if len(lines) > NAMED:
                where += " and more"
            records = "1 record was" if count == 1 else f"{count:,} records were"
            yield code, f"{records} {NOTED.get(code, f'skipped ({code})')}: {where}; see ledger/driver.jsonl"

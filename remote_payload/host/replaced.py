"""Whether files that a run wrote into an output folder may still be there, once later runs have written there too.

Samples have the same names in every run, so a name proves nothing. What proves that a run's file is gone is that the
name is not there any more, or that the ledger of a later run says of it what lies there now. All else is doubt, and
the answer is what the doubt is.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from remote_payload.host.files import each_line, read_json, sha256_of
from remote_payload.host.layout import OUTPUT_LEDGER, OWNER_MARKER, RUN_ID, Layout

PROVED = 4
"""Files of a folder that are read whole, spread over all: what was copied back over a later run's files, with sizes
and times that fit, is seen by its contents."""

_HALF = 64
"""Bits of a checksum that are kept of each file: half a million whole lines would take gigabytes."""


class LaterRuns:
    """What runs say of the files in output folders. The last folder's ledgers stay read, unless they have changed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: Tuple[Any, Dict[str, int]] = (None, {})

    def why_there(self, ledger: str, output: str) -> Optional[str]:
        """Return which file, named by the run's own `ledger` (a folder), may still be in `output`, and why.

        None if each is gone or is a later run's. `output` is a folder that is there. Raises OSError, ValueError for
        a damaged owner marker.
        """
        claims: Optional[Dict[str, int]] = None
        there = _Names(output)
        replaced: List[str] = []
        for path in _files(ledger):
            written = os.stat(path).st_mtime
            for line in each_line(path):
                if "file" not in line:
                    continue
                if claims is None:
                    claims = self._claims(output)
                    if claims is None:
                        return "it bears no mark of a run that cleared it"
                name = str(line["file"])
                if name in there:
                    doubt = _doubt(os.path.join(output, name), line, claims.get(name), written)
                    if doubt:
                        return "%s %s" % (name, doubt)
                    replaced.append(name)
        for name in replaced[:: max(1, len(replaced) // PROVED)][:PROVED]:
            if claims is None or _mark(*sha256_of([os.path.join(output, name)])) != claims[name]:
                return "%s is not what the ledger of a later run says" % name
        return None

    def _claims(self, output: str) -> Optional[Dict[str, int]]:
        """Return the mark of each file that a ledger names, the latest run's; None if no run marked the folder.

        An extraction leaves its ledger in the output; of a conversion there is only that in its run's folder.
        """
        owner = str((read_json(os.path.join(output, OWNER_MARKER)) or {}).get("run_id"))
        if not RUN_ID.fullmatch(owner):
            return None
        paths = [*_files(self._layout.run(owner).ledger), *_files(os.path.join(output, OUTPUT_LEDGER))]
        key = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
        if self._known[0] != key:
            lines = (line for path in paths for line in each_line(path) if "file" in line and "sha256" in line)
            self._known = (key, {str(line["file"]): _mark(line["bytes"], line["sha256"]) for line in lines})
        return self._known[1]


class _Names:
    """The files of an output folder by their paths below it; a folder is listed when it is first asked for."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._listed: Dict[str, Set[str]] = {}

    def __contains__(self, name: str) -> bool:
        folder, file = os.path.split(name)
        if folder not in self._listed:
            try:
                self._listed[folder] = set(os.listdir(os.path.join(self._output, folder)))
            except (FileNotFoundError, NotADirectoryError):
                self._listed[folder] = set()
        return file in self._listed[folder]


def _doubt(path: str, line: Mapping[str, Any], claimed: Optional[int], written: float) -> Optional[str]:
    """Return why a file may be the one of a run's ledger `line`; `written` is when that ended (epoch seconds)."""
    if claimed is None:
        return "is there, and no later run says that it wrote it"
    if "sha256" not in line or _mark(line["bytes"], line["sha256"]) == claimed:
        return "is there, and may be the same"
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None  # deleted at this very moment
    if not stat.S_ISREG(status.st_mode) or status.st_size != claimed >> _HALF:
        return "is not what the ledger of a later run says"
    return "is older than any later run" if status.st_mtime <= written else None


def _mark(size: int, sha256: str) -> int:
    return int(size) << _HALF | int(sha256[: _HALF // 4], 16)


def _files(folder: str) -> Iterator[str]:
    """Yield the ledgers of a folder, those of later runs last; none of one that is not there."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    yield from (os.path.join(folder, name) for name in names if name.endswith(".jsonl"))

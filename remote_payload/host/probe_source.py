"""The `source` section: the run whose samples are to be converted, and whether they are still where it wrote them."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from remote_payload.host.files import each_line, read_json
from remote_payload.host.layout import OWNER_MARKER, RunPaths
from remote_payload.host.ps import judge_run
from remote_payload.host.sections import Note

LOOKED_AT = 64
"""Samples, spread over all, whose size is compared: on a cold network disk each costs milliseconds."""

Written = Tuple[str, Optional[int]]
"""A sample's file, by its path below the output, and its bytes."""


def probe_source(note: Note, run: str) -> Dict[str, Any]:
    """Return what is left of the run folder `run` and its samples.

    {run_id, found, over, state, output, written, present, changed, marker}: `written` counts the samples of its
    ledgers, `present` those whose file is in `output`, `changed` those of the ones looked at whose size is another;
    `marker` is the run id that the folder's owner marker names.
    """
    note(run)
    paths = RunPaths(run)
    plan = read_json(paths.plan)
    found: Dict[str, Any] = {
        "run_id": os.path.basename(run), "found": plan is not None, "over": True, "state": None,
        "output": None, "written": 0, "present": 0, "changed": 0, "marker": None,
    }  # fmt: skip
    if plan is None:
        return found
    standing = judge_run(paths)
    spec = plan.get("extract") or {}
    output = spec.get("output")
    found.update(over=standing.is_over, state=standing.state.value, output=output)
    if output is None:
        return found
    note(output)
    files = {line["index"]: (line["file"], line.get("bytes")) for line in _lines(paths)}
    names = _names(output, {os.path.dirname(file) for file, _ in files.values()})
    there = [written for written in files.values() if written[0] in names]
    found.update(
        written=len(files),
        present=len(there),
        changed=sum(not _as_written(output, *written) for written in _spread(there)),
        marker=(_marker(output) or {}).get("run_id"),
    )
    return found


def written_samples(paths: RunPaths) -> Dict[int, Dict[str, Any]]:
    """Return the line of each sample that a run wrote or kept, by index, from all of its ledgers."""
    return {line["index"]: line for line in _lines(paths)}


def _lines(paths: RunPaths) -> Iterator[Dict[str, Any]]:
    """Yield the lines of samples one by one: those of a large run, with their figures, fill a small host's memory."""
    for name in sorted(os.listdir(paths.ledger)) if os.path.isdir(paths.ledger) else []:
        for line in each_line(os.path.join(paths.ledger, name)):
            if "file" in line:
                yield line


def _names(output: str, folders: Iterable[str]) -> Set[str]:
    """Return the files of `folders` by their paths below `output`: some formats group their files in folders."""
    names: Set[str] = set()
    for folder in folders:
        path = os.path.join(output, folder)
        if os.path.isdir(path):
            names.update(os.path.join(folder, name) for name in os.listdir(path))
    return names


def _spread(files: Sequence[Written]) -> List[Written]:
    step = max(1, len(files) // LOOKED_AT)
    return list(files[::step][:LOOKED_AT])


def _as_written(folder: str, file: str, size: Optional[int]) -> bool:
    try:
        return os.stat(os.path.join(folder, file)).st_size == size
    except FileNotFoundError:  # deleted at this very moment
        return False


def _marker(output: str) -> Any:
    try:
        return read_json(os.path.join(output, OWNER_MARKER))
    except (OSError, ValueError):  # it only says who wrote there since
        return None

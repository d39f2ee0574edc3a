"""The verify step of a command: read what it wrote, hold it against what its playbook expects, write verify.json.

    python -m remote_payload.survey

The run is named by CTL_RUN_DIR; what to look at is `survey` of its plan's job. Nothing but this summary of a few
kilobytes leaves the host.
"""

from __future__ import annotations

import glob
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remote_payload.host.files import read_json, write_json
from remote_payload.host.layout import OUTPUT_LEDGER, RunPaths
from remote_payload.survey.child import Reader
from remote_payload.survey.expect import compare
from remote_payload.survey.facts import KINDS
from remote_payload.survey.groups import MAX_GROUPS, Group, Key, Unread, key_of, spread

TELL_S = 5.0
"""Between two lines about how far it is: the silence limit holds for this step too."""

LISTED = 20
"""Damaged files that are named."""


def survey(request: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """Return {"survey", "problems"} of the files that a plan's `survey` names; `run_id` is for what is to be done."""
    groups: dict[Key, Group] = {}
    damaged: list[dict[str, str]] = []
    unread = Unread()
    others = 0
    total_bytes = 0
    folder = _common(request["paths"])
    with Reader() as reader:
        paths = list(files_of(request["paths"]))
        for path in _told(paths, "files are read"):
            kind = KINDS.get(os.path.splitext(path)[1])
            try:
                size = os.path.getsize(path)
                answer = reader.ask(path, nan=False) if kind else {}
            except OSError as error:  # a link to nothing
                answer = {"damaged": error.strerror or str(error)}
            if "damaged" in answer:
                damaged.append({"path": path, "why": answer["damaged"]})
                continue
            total_bytes += size
            if kind is None:
                others += 1
            elif "facts" in answer:
                facts = answer["facts"]
                groups.setdefault(key_of(kind, facts), Group(kind)).add(path, size, facts)
            else:
                unread.add(kind, answer["unreadable"])
        order = sorted(groups.values(), key=lambda group: -len(group.paths))
        nan, unsearched = _nan(order, request["sample_files"], reader)
    totals = {
        "files": len(paths) - len(damaged),
        "bytes": total_bytes,
        "records": sum(group.records or 0 for group in order),
    }
    nan["of_files"] += unread.files
    problems = [
        *_damaged(damaged),
        *_missing(request["files"], run_id),
        *compare(request["expect"], order, totals, nan, unread=unread, unsearched=unsearched),
    ]
    document = {
        **totals, "folder": folder, "other_files": others, "damaged": damaged[:LISTED],
        "unread": [*unread.records(), *unsearched.records("values not looked at: ")],
        "groups": [group.record(folder) for group in order[:MAX_GROUPS]],
        "groups_left_out": max(0, len(order) - MAX_GROUPS), "nan": nan,
    }  # fmt: skip
    return {"survey": document, "problems": problems}


def files_of(paths: Sequence[str]) -> Iterator[str]:
    """Yield the files that paths, folders and globs name, each once, in order; hidden ones are not output."""
    seen: set[str] = set()
    for path in paths:
        for found in sorted(glob.glob(path, recursive=True)):
            for file in _below(found):
                if file not in seen:
                    seen.add(file)
                    yield file


def _below(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != OUTPUT_LEDGER)
        yield from (
            os.path.join(folder, name)
            for name in sorted(names)
            if not name.startswith(".") and not os.path.islink(os.path.join(folder, name))
        )


def _nan(groups: Sequence[Group], sample_files: int, reader: Reader) -> tuple[dict[str, Any], Unread]:
    """Look for NaN in a sample of each group's files; return how large it was, and what could not be searched."""
    unsearched = Unread()
    total: dict[str, Any] = {"files": 0, "of_files": 0, "values": 0, "nan": 0, "inf": 0, "first": None}
    chosen = [path for group in groups for path in spread(group.paths, sample_files)]
    total["of_files"] = sum(len(group.paths) for group in groups)
    for path in _told(chosen, "sampled files are searched for NaN"):
        answer = reader.ask(path, nan=True)
        if "facts" not in answer:  # no library for its values, or it changed since it was read
            reason = answer.get("unreadable") or answer["damaged"]
            unsearched.add(KINDS[os.path.splitext(path)[1]], reason)
            continue
        found = answer["facts"]["nan"]
        total["files"] += 1
        for name in ("values", "nan", "inf"):
            total[name] += found[name]
        if found["nan"] and total["first"] is None:
            total["first"] = path
    return total, unsearched


def _damaged(damaged: Sequence[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    if damaged:
        first = damaged[0]
        what = "%s files cannot be read, the first is %s" % (format(len(damaged), ","), first["path"])
        yield {"code": "damaged-files", "what": what, "why": first["why"], "fix": "have the job write them again"}


def _missing(patterns: Sequence[str], run_id: str) -> Iterator[dict[str, str]]:
    for pattern in patterns:
        if not glob.glob(pattern, recursive=True):
            what = "%s was not written" % pattern
            why = "[success] of the playbook says that it must exist"
            fix = "read the end of its log with `ctl logs %s --tail 50`" % run_id
            yield {"code": "missing-file", "what": what, "why": why, "fix": fix}


def _told(paths: Sequence[str], what: str) -> Iterator[str]:
    told = time.monotonic()
    for number, path in enumerate(paths):
        if time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            print("ctl: %s of %s %s" % (format(number, ","), format(len(paths), ","), what), flush=True)
        yield path


def _common(paths: Sequence[str]) -> str:
    return os.path.commonpath(paths) if paths else ""


def main() -> int:
    """Write verify.json of the run; return 0 if nothing is wrong, else 1."""
    paths = RunPaths(os.environ["CTL_RUN_DIR"])
    plan = read_json(paths.plan) or {}
    document = survey(plan["job"]["survey"], plan["run_id"])
    write_json(paths.verify, {**document, "versions": {"python": platform.python_version()}})
    for problem in document["problems"]:
        print("ctl: %(code)s: %(what)s" % problem, file=sys.stderr)
    return 1 if document["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Which runs write into an output folder, and whether runs that are over left it without a sample."""

from __future__ import annotations

import os
import re
from typing import Set

from remote_payload.host.files import read_json
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST, RUN_ID, Layout
from remote_payload.host.listing import Listing
from remote_payload.host.liveness import user_name
from remote_payload.host.ps import judge_run

_LEDGER = re.compile(r"%s/(%s)\.rank-[0-9]+\.jsonl" % (re.escape(OUTPUT_LEDGER), RUN_ID.pattern))
_UNFINISHED = "%s/%s." % (OUTPUT_LEDGER, OUTPUT_MANIFEST)
"""How the path of a manifest begins that is being written; see `extract.output`."""


def runs_under_way(workdir: str, path: str) -> Set[str]:
    """Return the runs of this workdir that are not over and own `path`, a folder above it or one below it."""
    layout = Layout(workdir)
    found: Set[str] = set()
    for name in os.listdir(layout.runs) if os.path.isdir(layout.runs) else []:
        if not RUN_ID.fullmatch(name):
            continue
        try:
            outputs = ((read_json(layout.run(name).plan) or {}).get("job") or {}).get("outputs") or []
            if any(_overlap(path, output["path"]) for output in outputs) and not judge_run(layout.run(name)).is_over:
                found.add(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            found.add(name)  # of a run whose records cannot be read, nobody can say that it is over
    return found


def is_spent(workdir: str, path: str, listing: Listing, run_id: str = "") -> bool:
    """Whether a folder holds nothing but the records of runs that are over and vouched for no sample.

    Only a folder that our marker calls our own counts, whose runs are all known to this workdir: another host may be
    loading for it. `run_id` is the run that asks, which does not stand in its own way.
    """
    marker, examples = listing["marker"], listing["examples"]
    if not examples or len(examples) != listing["entries"] or listing["problems"] or listing["not_ours"]["entries"]:
        return False  # what somebody put beside the records says that the folder is worth a question
    if marker is None or marker.get("owner") != user_name(os.getuid()):
        return False
    runs = {str(marker["run_id"])}
    for example in examples:
        name, kind = example["path"], example["type"]
        ledger = _LEDGER.fullmatch(name)
        if ledger and kind == "file" and not example["size"]:
            runs.add(ledger.group(1))
        elif (name, kind) not in ((OUTPUT_LEDGER, "folder"), (OUTPUT_MANIFEST, "file")) and not (
            name.startswith(_UNFINISHED) and kind == "file"
        ):
            return False
    return all(_is_over(workdir, run) for run in runs) and not runs_under_way(workdir, path) - {run_id}


def _is_over(workdir: str, run_id: str) -> bool:
    if not RUN_ID.fullmatch(run_id) or not os.path.isdir(Layout(workdir).run(run_id).folder):
        return False
    try:
        return judge_run(Layout(workdir).run(run_id)).is_over
    except (OSError, ValueError, KeyError):  # damaged records prove nothing
        return False


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(other.rstrip("/") + "/") or other.startswith(one.rstrip("/") + "/")

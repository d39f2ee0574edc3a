"""Delete the folders of runs that are over, for a person: verb `prune`. First a list; what goes then is that list.

A run's folder is looked at through descriptors that follow no link, and stays where it may still be needed: see
`_why_kept`. An output folder is never touched; what it holds is resumed from by its own records.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import time
from typing import Any, BinaryIO, Collection, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from remote_payload.host.clear import delete
from remote_payload.host.errors import HostError
from remote_payload.host.files import read_json
from remote_payload.host.guard import Place, Refused, open_output
from remote_payload.host.layout import OUTPUT_LEDGER, RUN_ID, Layout, RunPaths
from remote_payload.host.listing import Fingerprint, snapshot
from remote_payload.host.liveness import judge, read_readings, user_name
from remote_payload.host.protocol import WIRE, Liveness, RunState, check_record
from remote_payload.host.ps import Standing, judge_run
from remote_payload.host.start import hold_start_lock
from remote_payload.host.tidy import leased_runs, left_by_run

LOCK_WAIT_S = 2.0
"""For a start or a stop of the run to end: nobody begins one of a run that is long over."""

PROOFS = ("plan.json", "run.json", "cancelled")
"""Of which a run's folder has at least one. It is deleted last: half a folder is still known for what it is."""


class Chosen(NamedTuple):
    """A folder that may go. `row` is what a person is shown of it."""

    row: Dict[str, Any]
    found: Dict[str, Fingerprint]


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `prune`: {"workdir", "lease_dir", "older_than_s", "keep", "copied", "all", "confirmed"}.

    Chosen are the runs that ended more than `older_than_s` ago (null: any time), less the newest `keep`. Without
    `all` those stay whose samples are in their output, or that are not among `copied`. `confirmed` null: nothing is
    changed; else {run_id: digest} as it was shown, and these folders are deleted.

    Answers {"runs": [{"run_id", "name", "kind", "state", "end_reason", "ended", "entries", "bytes", "digest"}],
    "kept": [{"run_id", "why"}], "deleted": [{"run_id", "entries", "bytes"}], "failed": [{"run_id", "why"}],
    "remaining": ids of `confirmed` that are still there}. Raises HostError (`prune-changed`) if a confirmed folder is
    not what was shown; nothing is deleted then.
    """
    check_record(request, {"workdir": str, "keep": int, "copied": list, "all": bool}, "prune request")
    layout, confirmed = Layout(request["workdir"]), request.get("confirmed")
    chosen, kept = _choose(layout, request)
    answer: Dict[str, Any] = {
        "wire": WIRE, "runs": [each.row for each in chosen.values()], "kept": kept,
        "deleted": [], "failed": [], "remaining": [],
    }  # fmt: skip
    if confirmed is not None:
        _require_as_shown(confirmed, chosen)
        for run_id in sorted(confirmed):
            try:
                entries, size = _delete(layout, run_id, chosen[run_id].found)
                answer["deleted"].append({"run_id": run_id, "entries": entries, "bytes": size})
            except (HostError, Refused, OSError) as error:  # told; the others do not depend on it
                answer["failed"].append({"run_id": run_id, "why": str(error)})
        answer["remaining"] = [run_id for run_id in sorted(confirmed) if os.path.lexists(layout.run(run_id).folder)]
    out.write(json.dumps(answer).encode() + b"\n")
    return 0


def _choose(layout: Layout, request: Dict[str, Any]) -> Tuple[Dict[str, Chosen], List[Dict[str, str]]]:
    """Return what may go by its run id, the oldest first, and what of the rest is kept for a reason of its own."""
    names = sorted(os.listdir(layout.runs)) if os.path.isdir(layout.runs) else []
    runs = [name for name in names if RUN_ID.fullmatch(name)]
    leased = leased_runs(request.get("lease_dir"))
    copied: Optional[Set[str]] = None if request["all"] else set(request["copied"])
    limit = request.get("older_than_s")
    chosen: Dict[str, Chosen] = {}
    kept: List[Dict[str, str]] = []
    for run_id in runs[: max(0, len(runs) - max(0, request["keep"]))]:
        paths = layout.run(run_id)
        try:
            standing = judge_run(paths)
            if limit is not None and time.time() - _ended_at(run_id, standing) <= limit:
                continue
            why = _why_kept(run_id, paths, standing, leased, copied)
            if why is None:
                with _opened(layout, run_id) as place:
                    listing, found = snapshot(place)
                    why = _why_stays(place, listing["problems"])
                if why is None:
                    chosen[run_id] = Chosen(_row(run_id, paths, standing, listing), found)
                    continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = "its records cannot be read: %s: %s" % (type(error).__name__, error)
        except Refused as refused:
            why = refused.problem["what"]
        kept.append({"run_id": run_id, "why": why})
    return chosen, kept


def _why_kept(
    run_id: str, paths: RunPaths, standing: Standing, leased: Set[str], copied: Optional[Collection[str]]
) -> Optional[str]:
    """Return what a run's records are still needed for, None if nothing. `copied` None: samples and copies aside."""
    plan = read_json(paths.plan) or {}
    known = {
        plan.get("run_id"),
        (standing.run or {}).get("run_id"),
        run_id if os.path.exists(paths.cancelled) else None,
    }
    if known - {None} != {run_id}:
        return "nothing in it says that it is of this run"
    if not standing.is_over:
        return "it is %s: %s" % (standing.state.value, standing.evidence)
    if standing.run is not None and judge(standing.run["supervisor"], read_readings())[0] is Liveness.ALIVE:
        return "its supervisor has not left yet"
    user = (standing.run or {}).get("user", user_name(os.getuid()))
    if user != user_name(os.getuid()):
        return "it is of user %s" % user
    if run_id in leased:
        return "its lease was not given back: `ctl stop %s` proves the GPUs free" % run_id
    if standing.state is RunState.FINISHED and left_by_run(run_id, paths, standing, leased):
        return "it left processes or shared memory: `ctl preflight --fix` clears them up"
    if copied is None:
        return None
    for output in (plan.get("job") or {}).get("outputs") or []:
        if _has_samples(output["path"], run_id):
            return "its samples are in %s, and `ctl convert` reads its records" % output["path"]
    if run_id not in copied:
        return "its records have not been copied to this workstation: `ctl attach %s`" % run_id
    return None


def _has_samples(output: str, run_id: str) -> bool:
    """Say whether an output folder's own ledger names samples that the run wrote."""
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(os.path.join(output, OUTPUT_LEDGER)) as it,
    ):
        return any(entry.name.startswith(run_id + ".") and entry.stat().st_size > 0 for entry in it)
    return False


def _why_stays(place: Place, problems: List[Dict[str, str]]) -> Optional[str]:
    if os.fstat(place.folder).st_uid != os.geteuid():
        return "the folder is another user's"
    return problems[0]["what"] if problems else None


def _row(run_id: str, paths: RunPaths, standing: Standing, listing: Any) -> Dict[str, Any]:
    run, job = standing.run or {}, (read_json(paths.plan) or {}).get("job") or {}
    return {
        "run_id": run_id,
        "name": run.get("name") or job.get("name"),
        "kind": run.get("kind") or job.get("kind"),
        "state": standing.state.value,
        "end_reason": standing.end_reason,
        "ended": (standing.result or {}).get("ended"),
        "entries": listing["entries"],
        "bytes": listing["bytes"],
        "digest": listing["digest"],
    }


def _ended_at(run_id: str, standing: Standing) -> float:
    """Return when a run ended, in seconds since the epoch; when it was made, where nobody wrote that down."""
    ended = (standing.result or {}).get("ended")
    if ended is not None:
        return float(calendar.timegm(time.strptime(ended[:19], "%Y-%m-%dT%H:%M:%S")))
    return float(calendar.timegm(time.strptime(run_id[:15], "%Y%m%d-%H%M%S")))


def _require_as_shown(confirmed: Dict[str, str], chosen: Dict[str, Chosen]) -> None:
    changed = [
        run_id
        for run_id, digest in sorted(confirmed.items())
        if run_id not in chosen or chosen[run_id].row["digest"] != digest
    ]
    if changed:
        raise HostError(
            "prune-changed",
            "the folder of run %s is no longer what was shown, or no longer to be deleted" % ", ".join(changed[:5]),
            "nothing was deleted",
            "run `ctl prune` again to see the new list",
        )


@contextlib.contextmanager
def _opened(layout: Layout, run_id: str) -> Iterator[Place]:
    place = open_output(layout.run(run_id).folder, layout.runs)
    try:
        if place.folder < 0:
            raise FileNotFoundError(2, "it is gone", layout.run(run_id).folder)
        yield place
    finally:
        place.close()


def _delete(layout: Layout, run_id: str, found: Dict[str, Fingerprint]) -> Tuple[int, int]:
    """Delete a run's folder as it was found; return (entries, bytes). Raises HostError, Refused, OSError."""
    paths = layout.run(run_id)
    proof = next(name for name in PROOFS if name in found)
    with contextlib.ExitStack() as stack:
        if os.path.exists(paths.start_lock):
            stack.enter_context(hold_start_lock(paths, LOCK_WAIT_S))
        place = stack.enter_context(_opened(layout, run_id))
        done = delete(place, {path: each for path, each in found.items() if path != proof}, spared=proof)
        left = [*done.failures, *("%r appeared or changed meanwhile" % name for name in done.newcomers)]
        if left:
            raise HostError("prune-incomplete", "%d entries stay" % len(left), "; ".join(left[:5]))
        os.unlink(proof, dir_fd=place.folder)
        os.rmdir(place.name, dir_fd=place.parent)
        os.fsync(place.parent)
    return done.entries + 1, done.bytes + found[proof].size

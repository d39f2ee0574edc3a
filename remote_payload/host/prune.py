"""Delete the folders of runs that are over, for a person: verb `prune`. First a list; what goes then is that list.

A run's folder is looked at through descriptors that follow no link, and stays where it may still be needed: see
`needed`. One that goes is first renamed, under the run's lock: whoever reads runs finds it whole or not at all. An
output folder is never touched; what it holds is resumed from by its own records.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import re
import time
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

from remote_payload.host.clear import delete
from remote_payload.host.errors import HostError, ProtocolError
from remote_payload.host.files import read_json
from remote_payload.host.guard import Place, Refused, open_output
from remote_payload.host.layout import RUN_ID, Layout
from remote_payload.host.needed import Contents, Needs, read_contents
from remote_payload.host.protocol import WIRE, check_record
from remote_payload.host.ps import Standing, judge_run
from remote_payload.host.start import hold_start_lock

LOCK_WAIT_S = 2.0
"""For a start or a stop of the run to end: nobody begins one of a run that is long over."""

ASIDE = ".pruned-"
"""Before the run id, the name of a folder that is being deleted: no name of a run, so nobody reads half a run."""

_ASIDE = re.compile(re.escape(ASIDE) + "(%s)" % RUN_ID.pattern)


class Chosen(NamedTuple):
    """A folder that may go. `row` is what a person is shown of it."""

    row: Dict[str, Any]
    contents: Contents


class Kept(NamedTuple):
    """Why a folder stays, and how large it is; None where it cannot be listed."""

    why: str
    bytes: Optional[int]


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `prune`: {"workdir", "lease_dir", "older_than_s", "keep"}, body {"copied", "confirmed"}.

    Chosen are the runs that ended more than `older_than_s` seconds ago (null: any time), less the newest `keep`, as
    far as nothing needs them, and every folder whose deletion was cut off. `copied` is {run_id: {relative path:
    bytes}} of what the workstation holds. `confirmed` null: nothing is changed; else {folder: digest} as it was
    shown, and these folders are deleted.

    Answers {"runs": [{"run_id", "folder", "unfinished", "name", "kind", "state", "end_reason", "ended", "entries",
    "bytes", "digest"}], "kept": [{"run_id", "why", "bytes"}], "deleted": [{"run_id", "entries", "bytes"}], "failed":
    [{"run_id", "why"}], "remaining": ids of `confirmed` of which something is still there}. Raises HostError
    (`prune-changed`) if a confirmed folder is not what was shown; nothing is deleted then.
    """
    check_record(request, {"workdir": str, "keep": int}, "prune request")
    try:
        content = check_record(json.loads(body), {"copied": dict}, "prune request's body")
    except ValueError as error:
        raise ProtocolError("the prune request's body is not JSON: %s" % error) from error
    layout, confirmed = Layout(request["workdir"]), content.get("confirmed")
    needs = Needs(layout, request.get("lease_dir"), content["copied"])
    chosen, kept = _choose(layout, request, needs)
    answer: Dict[str, Any] = {
        "wire": WIRE, "runs": [each.row for each in chosen.values()], "kept": kept,
        "deleted": [], "failed": [], "remaining": [],
    }  # fmt: skip
    if confirmed is not None:
        _require_as_shown(confirmed, chosen)
        for folder in sorted(confirmed):  # what was cut off comes first by its name
            row, contents = chosen[folder]
            try:
                if not row["unfinished"]:
                    _put_aside(layout, row["run_id"], contents, needs)
                _delete(layout, ASIDE + row["run_id"], contents)
                answer["deleted"].append({key: row[key] for key in ("run_id", "entries", "bytes")})
            except (
                HostError,
                Refused,
                OSError,
                ValueError,
                KeyError,
            ) as error:  # told; the others do not depend on it
                answer["failed"].append({"run_id": row["run_id"], "why": str(error)})
        answer["remaining"] = sorted(
            {chosen[folder].row["run_id"] for folder in confirmed if _is_left(layout, folder)}
        )
    out.write(json.dumps(answer).encode() + b"\n")
    return 0


def _choose(
    layout: Layout, request: Mapping[str, Any], needs: Needs
) -> Tuple[Dict[str, Chosen], List[Dict[str, Any]]]:
    """Return what may go by the name of its folder, the oldest first, and what of the rest is kept for a reason."""
    names = sorted(os.listdir(layout.runs)) if os.path.isdir(layout.runs) else []
    runs = [name for name in names if RUN_ID.fullmatch(name)]
    old = runs[: max(0, len(runs) - max(0, request["keep"]))]
    chosen: Dict[str, Chosen] = {}
    kept: List[Dict[str, Any]] = []
    for name in [name for name in names if _ASIDE.fullmatch(name)] + old:
        run_id = name[len(ASIDE) :] if name.startswith(ASIDE) else name
        try:
            found = _look(layout, name, run_id, request.get("older_than_s"), needs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = Kept("its records cannot be read: %s: %s" % (type(error).__name__, error), None)
        except Refused as refused:
            found = Kept(refused.problem["what"], None)
        if isinstance(found, Chosen):
            chosen[name] = found
        elif found:
            kept.append({"run_id": run_id, "why": found.why, "bytes": found.bytes})
    return chosen, kept


def _look(
    layout: Layout, name: str, run_id: str, older_than_s: Optional[float], needs: Needs
) -> Union[Chosen, Kept, None]:
    """Return the folder as it may go, or why it stays; None if it is only too young."""
    with _opened(layout, name) as place:
        if name != run_id:
            contents = read_contents(place)
            if contents.why_not:
                return Kept(contents.why_not, contents.bytes)
            return Chosen(_row(run_id, name, {}, None, contents), contents)
        standing = judge_run(layout.run(run_id))
        contents = read_contents(place)
        if older_than_s is not None and time.time() - _ended_at(standing, contents) <= older_than_s:
            return None
        why = needs.why(run_id, standing, contents)
        if why:
            return Kept(why, contents.bytes)
        plan = read_json(layout.run(run_id).plan) or {}
        return Chosen(_row(run_id, name, plan, standing, contents), contents)


def _row(
    run_id: str, folder: str, plan: Mapping[str, Any], standing: Optional[Standing], contents: Contents
) -> Dict[str, Any]:
    run = (standing.run if standing else None) or {}
    job = plan.get("job") or {}
    return {
        "run_id": run_id,
        "folder": folder,
        "unfinished": standing is None,
        "name": run.get("name") or job.get("name"),
        "kind": run.get("kind") or job.get("kind"),
        "state": standing.state.value if standing else None,
        "end_reason": standing.end_reason if standing else None,
        "ended": (standing.result or {}).get("ended") if standing else None,
        "entries": len(contents.entries),
        "bytes": contents.bytes,
        "digest": contents.digest,
    }


def _ended_at(standing: Standing, contents: Contents) -> float:
    """Return when a run ended, in seconds since the epoch; where nobody noted that, when it last wrote at all."""
    ended = (standing.result or {}).get("ended")
    if ended is None:
        return contents.newest
    return float(calendar.timegm(time.strptime(ended[:19], "%Y-%m-%dT%H:%M:%S")))


def _require_as_shown(confirmed: Mapping[str, Any], chosen: Mapping[str, Chosen]) -> None:
    changed = [
        folder
        for folder, digest in sorted(confirmed.items())
        if folder not in chosen or chosen[folder].row["digest"] != digest
    ]
    if changed:
        raise HostError(
            "prune-changed",
            "the folder of run %s is no longer what was shown, or no longer to be deleted" % ", ".join(changed[:5]),
            "nothing was deleted",
            "run `ctl prune` again to see the new list",
        )


@contextlib.contextmanager
def _opened(layout: Layout, name: str) -> Iterator[Place]:
    path = os.path.join(layout.runs, name)
    place = open_output(path, layout.runs)
    try:
        if place.folder < 0:
            raise FileNotFoundError(2, "it is gone", path)
        yield place
    finally:
        place.close()


def _put_aside(layout: Layout, run_id: str, shown: Contents, needs: Needs) -> None:
    """Rename a run's folder, if under its lock it is still what was shown and needed for nothing.

    Raises HostError, Refused, OSError, ValueError, KeyError; the folder is then where it was.
    """
    paths = layout.run(run_id)
    with hold_start_lock(paths, LOCK_WAIT_S), _opened(layout, run_id) as place:
        contents = read_contents(place)
        changed = None if contents.entries == shown.entries else "it is no longer what was shown"
        why = changed or needs.why(run_id, judge_run(paths, lock_is_ours=True), contents)
        aside = ASIDE + run_id
        if why is None and os.path.lexists(os.path.join(layout.runs, aside)):
            why = "%s is there already" % aside
        if why is not None:
            raise HostError("prune-kept", "the folder stays", why)
        os.rename(place.name, aside, src_dir_fd=place.parent, dst_dir_fd=place.parent)
        os.fsync(place.parent)


def _delete(layout: Layout, name: str, confirmed: Contents) -> None:
    """Delete a folder that was put aside, as it was confirmed. Nobody holds its lock any more.

    On a network disk a file that is open here keeps a name in the folder, so that this would not become empty.
    Raises HostError, Refused, OSError.
    """
    with _opened(layout, name) as place:
        done = delete(place, confirmed.entries, spared=())
        left = [*done.failures, *("%r appeared or changed meanwhile" % name for name in done.newcomers)]
        if left:
            raise HostError("prune-incomplete", "%s entries stay" % format(len(left), ","), "; ".join(left[:5]))
        os.rmdir(place.name, dir_fd=place.parent)
        os.fsync(place.parent)


def _is_left(layout: Layout, folder: str) -> bool:
    aside = folder if folder.startswith(ASIDE) else ASIDE + folder
    return any(os.path.lexists(os.path.join(layout.runs, name)) for name in {folder, aside})

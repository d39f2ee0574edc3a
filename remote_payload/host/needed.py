"""Why the folder of a run that is over has to stay: what `prune` asks of each, and once more before it deletes one.

Where anything is in doubt the folder stays, and the answer says what the doubt is.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set

from remote_payload.host.errors import HostError
from remote_payload.host.files import read_json, sha256_of
from remote_payload.host.finish import BASELINE
from remote_payload.host.follow import STOP
from remote_payload.host.guard import Place
from remote_payload.host.layout import (
    HASH,
    MIRRORED_DOCUMENTS,
    MIRRORED_STREAMS,
    OUTPUT_LEDGER,
    OWNER_MARKER,
    RUN_ID,
    Layout,
    RunPaths,
)
from remote_payload.host.lease import is_of, lease_folder, list_leases
from remote_payload.host.listing import Fingerprint, is_emptied, snapshot
from remote_payload.host.liveness import judge, read_readings, user_name
from remote_payload.host.protocol import Liveness, RunState
from remote_payload.host.ps import Standing, judge_run
from remote_payload.host.pump import PumpKeeper
from remote_payload.host.replaced import LaterRuns
from remote_payload.host.supervisor import STOP_REQUEST
from remote_payload.host.tidy import left_by_run

LAUNCH_WINDOW_S = 3600.0
"""A start that comes late must find what became of the first. A controller asks again for two minutes; a host that
hung may do what it was asked much later."""

RECORDS = frozenset(
    (
        "plan.json", "start.lock", "cancelled", "run.json", "tree.jsonl", "supervisor.log", "log", "events", "ledger",
        "work", "faults", "verify.json", "summary.json", "result.json", "left.json", "reserve", BASELINE, STOP,
        STOP_REQUEST, "extract.json", "canary.json", "rehearsal.json", "rehearsal",
    )
)  # fmt: skip
"""What ctl writes into a run's folder. A job knows where that is (CTL_RUN_DIR), and may add to it."""

_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}")
"""A record that was being written when its writer was killed; see `files.atomic_write`."""

_COMPILED = re.compile(r"((?:.*/)?)__pycache__/([^/.]+)\.cpython-[0-9]+(?:\.opt-[12])?\.pyc")
"""What Python makes of an uploaded module, and would make again."""

WORK = "work/"


class Contents(NamedTuple):
    """What a run's folder holds, without following a link."""

    entries: Dict[str, Fingerprint]  # by relative path
    bytes: int
    digest: Optional[str]
    why_not: Optional[str]  # a reason not to delete that the folder itself shows
    newest: float  # of the folder and everything in it, in seconds since the epoch

    def changed(self, names: Iterable[str]) -> float:
        """Return when the last of these entries was written, in seconds since the epoch; 0 if there is none."""
        return max((self.entries[name].mtime_ns / 1e9 for name in names if name in self.entries), default=0.0)


def read_contents(place: Place) -> Contents:
    """List an open run folder. Raises Refused if the tree is moved meanwhile, OSError."""
    listing, found, _ = snapshot(place)
    status = os.fstat(place.folder)
    why = listing["problems"][0]["what"] if listing["problems"] else None
    if status.st_uid != os.geteuid():
        why = "the folder is another user's"
    elif listing["marker"] is not None:
        why = "it holds %s: it is an output folder" % OWNER_MARKER
    newest = max([status.st_mtime_ns, *(each.mtime_ns for each in found.values())]) / 1e9
    return Contents(found, listing["bytes"], listing["digest"], why, newest)


class Needs:
    """What runs of one workdir are needed for; `copied` is {run_id: {relative path: bytes}} of a workstation."""

    def __init__(self, layout: Layout, lease_dir: Optional[str], copied: Mapping[str, Mapping[str, int]]) -> None:
        self._layout = layout
        self._lease_dir = lease_dir
        self._copied = copied
        self._later = LaterRuns(layout)
        self._over: Set[str] = set()  # what is over stays so, and need not be judged for every candidate

    def why(self, run_id: str, standing: Standing, contents: Contents) -> Optional[str]:
        """Return why the folder of a run stays, None if it may go. Raises OSError, ValueError for damaged records."""
        paths = self._layout.run(run_id)
        plan = read_json(paths.plan) or {}
        return (
            contents.why_not
            or _why_not_ours(run_id, paths, plan, standing)
            or _why_not_over(standing)
            or _why_young(standing, contents)
            or self._why_leased(run_id, plan)
            or self._why_left(run_id, paths, standing)
            or self._why_read(run_id)
            or _why_foreign(contents)
            or _why_work(self._layout, paths, plan, contents)
            or self._why_output(run_id, paths, plan)
            or _why_uncopied(run_id, standing, contents, self._copied.get(run_id))
        )

    def _why_leased(self, run_id: str, plan: Mapping[str, Any]) -> Optional[str]:
        for wanted in {self._lease_dir, (plan.get("host") or {}).get("lease_dir")}:
            try:
                leases = list_leases(lease_folder(wanted, create=False))
            except (HostError, OSError, KeyError) as error:
                return "the leases cannot be read: %s" % error
            for lease in leases:
                if lease["state"] == "unknown":
                    return "the lease of %(resource)s cannot be read: %(evidence)s" % lease
                if is_of(lease, run_id, self._layout.workdir):
                    return "its lease was not given back: `ctl stop %s` proves the GPUs free" % run_id
        return None

    def _why_left(self, run_id: str, paths: RunPaths, standing: Standing) -> Optional[str]:
        if left_by_run(run_id, paths, standing, leased=False):
            return "it left processes or shared memory: `ctl preflight --fix` clears them up"
        if PumpKeeper(self._layout.workdir, run_id).is_running():
            return "a process still writes its log"
        return None

    def _why_read(self, run_id: str) -> Optional[str]:
        """Look for a run that is not over and has this one's folder in its plan, as `ctl convert` has."""
        for name in sorted(os.listdir(self._layout.runs)):
            if name == run_id or name in self._over or not RUN_ID.fullmatch(name):
                continue
            paths = self._layout.run(name)
            try:
                if judge_run(paths).is_over:
                    self._over.add(name)
                    continue
            except (OSError, ValueError, KeyError, TypeError):
                pass  # of a run whose records cannot be read, nobody can say that it is over
            try:
                with open(paths.plan, "rb") as file:
                    if run_id.encode() in file.read():
                        return "run %s, which is not over, names it" % name
            except FileNotFoundError:
                continue
            except OSError as error:
                return "nobody can say whether run %s reads it: %s" % (name, error)
        return None

    def _why_output(self, run_id: str, paths: RunPaths, plan: Mapping[str, Any]) -> Optional[str]:
        for output in (plan.get("job") or {}).get("outputs") or []:
            path = output["path"]
            if not _names(output["root"]):
                words = (
                    "whether its output %s is there cannot be seen: %s is empty or gone, as if it were not mounted"
                )
                return words % (path, output["root"])
            try:
                os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if is_emptied(path):
                continue  # emptied by ctl: whoever writes next claims it, whatever is known of the run that was there
            if (read_json(os.path.join(path, OWNER_MARKER)) or {}).get("run_id") == run_id:
                return "%s is marked as its output, and is judged by its records until it is cleared" % path
            if any(name.startswith(run_id + ".") for name in _names(os.path.join(path, OUTPUT_LEDGER))):
                return "the ledger of %s names it, and is judged by its records until it is cleared" % path
            try:
                doubt = self._later.why_there(paths.ledger, path)
            except (KeyError, TypeError) as error:
                doubt = "a ledger cannot be read: %s: %s" % (type(error).__name__, error)
            if doubt:
                words = "its samples may be in %s, and `ctl convert` reads its records until that is cleared: %s"
                return words % (path, doubt)
        return None


def _why_not_ours(run_id: str, paths: RunPaths, plan: Mapping[str, Any], standing: Standing) -> Optional[str]:
    given_up = run_id if os.path.exists(paths.cancelled) else None
    if {plan.get("run_id"), (standing.run or {}).get("run_id"), given_up} - {None} != {run_id}:
        return "nothing in it says that it is of this run"
    if not os.path.exists(paths.start_lock):
        return "it has no start.lock, which every start and stop takes: nothing would keep one away"
    user = (standing.run or {}).get("user", user_name(os.getuid()))
    return None if user == user_name(os.getuid()) else "it is of user %s" % user


def _why_not_over(standing: Standing) -> Optional[str]:
    if not standing.is_over:
        return "it is %s: %s" % (standing.state.value, standing.evidence)
    if standing.run is None:
        return None  # nothing was started
    # A result says that the run has ended; whether its processes are gone only its own machine can tell.
    alive, evidence = judge(standing.run["supervisor"], read_readings())
    if alive is Liveness.ALIVE:
        return "its supervisor has not left yet: %s" % evidence
    return None if alive is Liveness.DEAD else "it cannot be judged from here: %s" % evidence


def _why_young(standing: Standing, contents: Contents) -> Optional[str]:
    if standing.state is RunState.LOST or standing.run is None:
        when = contents.newest
    else:
        when = contents.changed(("start.lock", "plan.json"))
    if time.time() - when >= LAUNCH_WINDOW_S:
        return None
    return "it was launched or given up less than %g min ago: a late start must find it" % (LAUNCH_WINDOW_S / 60)


def _why_foreign(contents: Contents) -> Optional[str]:
    for name in sorted({path.split("/", 1)[0] for path in contents.entries}):
        temporary = _TEMPORARY.fullmatch(name)
        if (temporary.group(1) if temporary else name) not in RECORDS:
            return "it holds %r, which is no record of ctl's" % name
    return None


def _why_work(layout: Layout, paths: RunPaths, plan: Mapping[str, Any], contents: Contents) -> Optional[str]:
    """Return what a command may have written into its `work` folder, and is nowhere else."""
    files = sorted(path for path, each in contents.entries.items() if path.startswith(WORK) and each.type != "folder")
    if not files:
        return None
    digest = str((plan.get("job") or {}).get("upload"))
    tree = read_json(os.path.join(layout.files, "trees", "%s.json" % digest)) if HASH.fullmatch(digest) else None
    if tree is None:
        words = "its work folder holds %s files, among them %r, and what was uploaded for it is not known (any more)"
        return words % (format(len(files), ","), files[0])
    placed = {WORK + entry["path"]: entry for entry in tree["files"]}
    for path in files:
        if not _is_placed(paths, path, contents.entries[path], placed):
            return "its work folder holds %r, which is not as it was uploaded: move it away if it is of use" % path
    return None


def _is_placed(paths: RunPaths, path: str, found: Fingerprint, placed: Mapping[str, Mapping[str, Any]]) -> bool:
    compiled = _COMPILED.fullmatch(path)
    if compiled and found.type == "file" and "%s%s.py" % compiled.groups() in placed:
        return True
    entry = placed.get(path)
    if entry is None or found.type != "file" or found.size != entry["size"]:
        return False
    _, sha256 = sha256_of([os.path.join(paths.folder, path)])
    return sha256 == str(entry["sha256"])


def _why_uncopied(
    run_id: str, standing: Standing, contents: Contents, held: Optional[Mapping[str, int]]
) -> Optional[str]:
    if standing.run is None and standing.result is None:
        return None  # nothing ran, so that there is nothing to be copied
    if held is None:
        return "its records have not been copied to this workstation: `ctl attach %s`" % run_id
    for path, found in sorted(contents.entries.items()):
        if path in MIRRORED_DOCUMENTS:
            whole = path in held  # a workstation adds to its copies of some
        elif path.startswith(tuple(stream + "/" for stream in MIRRORED_STREAMS)) and path.endswith(
            (".log", ".jsonl")
        ):
            whole = held.get(path, 0) == found.size
        else:
            continue
        if not whole:
            return "%s has not been copied to this workstation to its end: `ctl attach %s`" % (path, run_id)
    return None


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []

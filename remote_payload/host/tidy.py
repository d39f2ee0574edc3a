"""Clear up what dead runs of this workdir left on the host: processes, shared memory, leases, unfinished output.

Only what is ours by the same proof as everywhere: a process belongs to a run by descent, journal or environment, a
file of /dev/shm is ours, younger than the run and in no use, an output folder carries our marker and is emptied by
its shown listing only. First a plan is made; what is done then is that plan or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any, BinaryIO, Dict, List, Optional, Set

from remote_payload.host.children import reap_adopted
from remote_payload.host.clear import clear
from remote_payload.host.errors import HostError
from remote_payload.host.files import read_json
from remote_payload.host.finish import read_baseline
from remote_payload.host.layout import OUTPUT_LEDGER, RUN_ID, Layout, RunPaths
from remote_payload.host.lease import is_of, lease_folder, list_leases
from remote_payload.host.leftovers import delete_shm, find_shm
from remote_payload.host.listing import scan
from remote_payload.host.liveness import boot_seconds, read_readings, user_name
from remote_payload.host.members import Key, find_members, recorded, stop_members
from remote_payload.host.protocol import EndReason, RunState, Stale, check_record
from remote_payload.host.ps import Standing, judge_run
from remote_payload.host.stop import stop_run
from remote_payload.host.writers import runs_under_way

GRACE_S = 10.0
"""Between TERM and KILL: a worker whose driver process is dead has nothing left to save."""

Action = Dict[str, Any]
"""{"kind", "run_id", "why", "processes": [{pid, comm, start_ticks}], "files": [path], "path", "root",
"digest", "entries", "bytes", "examples": [relative path]}; what a kind has no use for is empty.

Kinds: "stop" a run whose supervisor is dead (its processes, shared memory and lease), "kill" processes that a run
left when it ended, "shm" delete its files in /dev/shm, "output" delete the samples of runs none of which
succeeded.
"""


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `tidy`: {"workdir", "lease_dir", "outputs": [{path, root, stale, adopt}], "confirmed": digest or null}.

    Answers {"actions", "digest", "done": [{"kind", "run_id", "text"}], "failed": [same], "remaining"}. Without
    `confirmed` nothing is changed. Raises HostError if the actions are no longer those that were confirmed.
    """
    check_record(request, {"workdir": str, "outputs": list}, "tidy request")
    workdir, outputs = request["workdir"], request["outputs"]
    for number, output in enumerate(outputs):
        check_record(output, {"path": str, "root": str, "stale": str, "adopt": bool}, "outputs[%d]" % number)
    actions = make_plan(workdir, request.get("lease_dir"), outputs)
    answer: Dict[str, Any] = {
        "actions": actions, "digest": digest_of(actions), "done": [], "failed": [], "remaining": actions,
    }  # fmt: skip
    confirmed = request.get("confirmed")
    if confirmed is not None:
        if confirmed != answer["digest"]:
            raise HostError(
                "tidy-changed",
                "what is left on the host is no longer what was shown",
                "nothing was stopped or deleted",
                "run `ctl preflight --fix` again",
            )
        for action in actions:
            told = {"kind": action["kind"], "run_id": action["run_id"]}
            try:
                answer["done"].append({**told, "text": perform(action, workdir)})
            except (HostError, OSError) as error:  # told; the other actions do not depend on it
                answer["failed"].append({**told, "text": str(error)})
        answer["remaining"] = make_plan(workdir, request.get("lease_dir"), outputs)
    out.write(json.dumps(answer).encode() + b"\n")
    return 0


def make_plan(workdir: str, lease_dir: Optional[str], outputs: List[Dict[str, Any]]) -> List[Action]:
    """Return what can be cleared up, the processes before the files that they may hold."""
    layout = Layout(workdir)
    names = sorted(os.listdir(layout.runs)) if os.path.isdir(layout.runs) else []
    leases = list_leases(lease_folder(lease_dir, create=False))
    actions: List[Action] = []
    standings: Dict[str, Standing] = {}
    for run_id in (name for name in names if RUN_ID.fullmatch(name)):
        paths = layout.run(run_id)
        try:
            standings[run_id] = judge_run(paths)
            leased = any(is_of(lease, run_id, workdir) for lease in leases)
            actions += left_by_run(run_id, paths, standings[run_id], leased=leased)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged records prove nothing, so nothing of such a run is touched; `ps` shows it
    actions += [found for output in outputs for found in _of_output(output, workdir, standings)]
    return actions


def digest_of(actions: List[Action]) -> str:
    """Return the sha256 of what actions touch, the words about it left out."""
    touched = [{key: value for key, value in action.items() if key != "why"} for action in actions]
    return hashlib.sha256(json.dumps(touched, sort_keys=True).encode()).hexdigest()


def perform(action: Action, workdir: str) -> str:
    """Do one action and return what became of it. Raises HostError, OSError."""
    paths = Layout(workdir).run(action["run_id"])
    if action["kind"] == "stop":
        done = stop_run(workdir, paths, GRACE_S)
        killed = "%d processes ended" % len({item["pid"] for item in done["killed"]})
        return "run %s is %s: %s; GPUs clean: %s" % (action["run_id"], done["state"], killed, done["gpus_clean"])
    if action["kind"] == "kill":
        known = _known(paths)
        report = stop_members(lambda: find_members(paths.folder, known), GRACE_S, reap_adopted)
        if report.leftovers:
            reasons = ", ".join("%(pid)d: %(reason)s" % item for item in report.leftovers)
            raise HostError("not-killed", "%d processes live on" % len(report.leftovers), reasons)
        return "%d processes ended" % len({item["pid"] for item in report.killed})
    if action["kind"] == "shm":
        kept = delete_shm(action["files"])
        if kept:
            raise HostError(
                "shm-kept", "%d files stay" % len(kept), "; ".join("%(path)s: %(reason)s" % k for k in kept)
            )
        return "%d files deleted" % len(action["files"])
    cleared = clear(
        {
            "path": action["path"], "root": action["root"], "stale": Stale.CLEAR.value, "adopt": False,
            "digest": action["digest"], "entries": action["entries"], "bytes": action["bytes"],
        },
        action["run_id"],
    )  # fmt: skip
    return "%(deleted_entries)d entries deleted from %(path)s, %(remaining)d left" % cleared


def _action(kind: str, run_id: str, why: str, **fields: Any) -> Action:
    blank: Action = {
        "kind": kind, "run_id": run_id, "why": why, "processes": [], "files": [], "path": None, "root": None,
        "digest": None, "entries": 0, "bytes": 0, "examples": [],
    }  # fmt: skip
    return {**blank, **fields}


def left_by_run(run_id: str, paths: RunPaths, standing: Standing, leased: bool) -> List[Action]:
    """Return what clears up the processes and shared memory that a run left, and its lease, if it is `leased`."""
    run = standing.run
    if run is None or standing.state not in (RunState.ORPHANED, RunState.LOST, RunState.FINISHED):
        return []
    if user_name(os.getuid()) != run["user"]:
        return []
    members = [
        {"pid": member.pid, "comm": member.comm, "start_ticks": member.start_ticks}
        for member in find_members(paths.folder, _known(paths))
    ]
    files = _shm_of(paths, run)
    if standing.state is not RunState.FINISHED:
        if members or files or leased:
            return [_action("stop", run_id, standing.evidence, processes=members, files=files)]
        return []
    actions = []
    if members:
        why = "it ended (%s), and these were left" % standing.end_reason
        actions.append(_action("kill", run_id, why, processes=members))
    if files:
        why = "it ended (%s), and no process uses them" % standing.end_reason
        actions.append(_action("shm", run_id, why, files=files))
    return actions


def _shm_of(paths: RunPaths, run: Dict[str, Any]) -> List[str]:
    """Return the files of /dev/shm that a run left: for one whose end was looked at, only those that are named there.

    That is result.json, and of a lost run left.json.
    """
    baseline = read_baseline(paths)
    if baseline is None or run["supervisor"]["boot"] != read_readings().boot:
        return []
    started = time.time() - max(0.0, boot_seconds() - run["boot_s"])
    found, _ = find_shm(baseline.shm, started)
    left = judge_run(paths).result or read_json(paths.left)
    if left is not None:
        # Others may have made files of the same names since it ended.
        named = {str(item.get("path")) for item in left["leftovers"]}
        found = [path for path in found if path in named]
    return found


def _of_output(output: Dict[str, Any], workdir: str, standings: Dict[str, Standing]) -> List[Action]:
    listing = scan(output["path"], output["root"])
    marker = listing["marker"] or {}
    run_id = str(marker.get("run_id"))
    standing = standings.get(run_id)
    if output["stale"] == Stale.RESUME.value or not listing["entries"] or listing["digest"] is None:
        return []  # what is resumed is worth something; what is empty or cannot be listed is not to be cleared
    if standing is None or marker.get("owner") != user_name(os.getuid()) or listing["others"]:
        return []
    # The marker names the last run that claimed the folder. Those that it resumed wrote the rest of it, and another
    # share may be writing at this moment.
    if not all(_is_worthless(standings.get(each)) for each in {run_id, *_writers_in_ledger(output["path"])}):
        return []
    if runs_under_way(workdir, output["path"]):
        return []
    why = "of a run that did not succeed (%s)" % (standing.end_reason or standing.state.value)
    examples = [example["path"] for example in listing["examples"][:5]]
    return [
        _action(
            "output", run_id, why, path=output["path"], root=output["root"], digest=listing["digest"],
            entries=listing["entries"], bytes=listing["bytes"], examples=examples,
        )
    ]  # fmt: skip


def _is_worthless(standing: Optional[Standing]) -> bool:
    """Say whether a run is known to be over and not to have succeeded."""
    return standing is not None and standing.is_over and standing.end_reason != EndReason.SUCCEEDED.value


def _writers_in_ledger(path: str) -> Set[str]:
    """Return the runs, of any host, that have a ledger in an output folder."""
    folder = os.path.join(path, OUTPUT_LEDGER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {name.split(".", 1)[0] for name in names if name.endswith(".jsonl")}


def _known(paths: RunPaths) -> Set[Key]:
    """Return the recorded descendants; none after a reboot, when the same pids may be anybody's."""
    run = judge_run(paths).run
    return recorded(paths.tree) if run and run["supervisor"]["boot"] == read_readings().boot else set()

"""Where every run of a workdir stands, judged from its files and the processes, each verdict with its evidence."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any, BinaryIO, Dict, List, NamedTuple, Optional, Set

from remote_payload.host.errors import HostError
from remote_payload.host.files import read_json
from remote_payload.host.layout import RUN_ID, Layout, RunPaths
from remote_payload.host.lease import lease_folder, list_leases
from remote_payload.host.liveness import Readings, judge, read_readings
from remote_payload.host.members import find_members, recorded
from remote_payload.host.pause import paused_by
from remote_payload.host.protocol import WIRE, EndReason, Liveness, RunState, check_record


class Standing(NamedTuple):
    """The verdict on one run. `run` and `result` are the records it rests on, where they exist."""

    state: RunState
    evidence: str
    end_reason: Optional[str] = None
    run: Optional[Dict[str, Any]] = None
    result: Optional[Dict[str, Any]] = None

    @property
    def step(self) -> Optional[str]:
        record = self.result or self.run or {}
        return record.get("step")

    @property
    def is_over(self) -> bool:
        return self.state in (RunState.FINISHED, RunState.LOST)


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `ps`: {"workdir", "lease_dir"}; answers {"wire", "runs": [...], "leases": [...]}, the newest run first."""
    check_record(request, {"workdir": str}, "ps request")
    layout = Layout(request["workdir"])
    names = os.listdir(layout.runs) if os.path.isdir(layout.runs) else []
    rows: List[Dict[str, Any]] = []
    lease_dirs: Set[Optional[str]] = {None, request.get("lease_dir")}
    for run_id in sorted((name for name in names if RUN_ID.fullmatch(name)), reverse=True):
        try:
            plan = read_json(layout.run(run_id).plan) or {}
            lease_dirs.add((plan.get("host") or {}).get("lease_dir"))
            standing = judge_run(layout.run(run_id))
            waits = paused_by(layout.run(run_id).events) if standing.state is RunState.RUNNING else None
            rows.append(_row(run_id, plan, standing, waits))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # One damaged folder must not hide the others, nor pass for a run that ended well.
            evidence = "its records cannot be read: %s: %s" % (type(error).__name__, error)
            rows.append(_row(run_id, {}, Standing(RunState.LOST, evidence)))
    document = {"wire": WIRE, "runs": rows, "leases": _leases(lease_dirs)}
    out.write(json.dumps(document).encode() + b"\n")
    return 0


def judge_run(paths: RunPaths, readings: Optional[Readings] = None, lock_is_ours: bool = False) -> Standing:
    """Say where a run stands. Raises OSError, ValueError or KeyError if its records are damaged.

    `lock_is_ours`: the caller holds the run's start.lock, so that no start or stop of it is under way.
    """
    over = _finished(paths)
    if over is not None:
        return over
    run = read_json(paths.run)
    if run is None:
        return _without_record(paths, lock_is_ours)
    here = readings or read_readings()
    recorded_state = RunState(run["state"])
    verdict, evidence = judge(run["supervisor"], here)
    if verdict is Liveness.ALIVE:
        return Standing(recorded_state, "supervisor: %s" % evidence, run=run)
    if verdict is Liveness.UNKNOWN:
        text = "last recorded as %s; not to be judged from here: %s" % (recorded_state.value, evidence)
        return Standing(recorded_state, text, run=run)
    # It may have ended in order between the first look and the verdict.
    over = _finished(paths)
    if over is not None:
        return over
    evidence = "supervisor: %s" % evidence
    if run["supervisor"]["boot"] != here.boot:
        return Standing(RunState.LOST, evidence, run=run)
    members = find_members(paths.folder, recorded(paths.tree), proc=here.proc, cgroup=run.get("cgroup"))
    if members:
        names = ", ".join("%d (%s)" % (m.pid, m.comm) for m in members[:8])
        text = "%s; %d processes of the job live: %s" % (evidence, len(members), names)
        return Standing(RunState.ORPHANED, text, run=run)
    if not lock_is_ours and _start_lock_is_held(paths):
        # Whoever ended the last of them in the supervisor's place has the result still to write.
        return Standing(RunState.STOPPING, "%s; a stop in its place is under way" % evidence, run=run)
    over = _finished(paths)  # written before the lock was given up
    return over or Standing(RunState.LOST, "%s; no process of the job lives" % evidence, run=run)


def _finished(paths: RunPaths) -> Optional[Standing]:
    result = read_json(paths.result)
    if result is None:
        return None
    text = "result.json: %s" % result["message"]
    return Standing(RunState.FINISHED, text, result["end_reason"], run=read_json(paths.run), result=result)


def _without_record(paths: RunPaths, lock_is_ours: bool) -> Standing:
    if os.path.exists(paths.cancelled):
        return Standing(RunState.FINISHED, "it was given up before it was launched", EndReason.CANCELLED.value)
    held = False if lock_is_ours else _start_lock_is_held(paths)
    if held is None:
        return Standing(RunState.LOST, "there is no record of a launch")
    if held:
        return Standing(RunState.LAUNCHING, "start.lock is held")
    # Launched between the two looks, perhaps: whoever gave up the lock wrote one of these first.
    over = _finished(paths)
    run = read_json(paths.run)
    if over is not None or run is not None:
        return over or Standing(RunState(run["state"] if run else RunState.LAUNCHING), "just launched", run=run)
    return Standing(RunState.LOST, "its launch ended before a supervisor held it; nothing was started")


def _start_lock_is_held(paths: RunPaths) -> Optional[bool]:
    """Say whether a start or a stop of the run is under way; None if none ever was."""
    try:
        descriptor = os.open(paths.start_lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not see each other
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _row(run_id: str, plan: Dict[str, Any], standing: Standing, waits: Optional[str] = None) -> Dict[str, Any]:
    run, job = standing.run or {}, plan.get("job") or {}
    return {
        "run_id": run_id,
        "name": run.get("name") or job.get("name"),
        "kind": run.get("kind") or job.get("kind"),
        "payload": run.get("payload") or plan.get("payload"),  # what operates the run from anywhere
        "user": run.get("user"),
        "state": standing.state.value,
        "paused": waits,
        "step": standing.step,
        "end_reason": standing.end_reason,
        "started": run.get("started"),
        "ended": (standing.result or {}).get("ended"),
        "evidence": standing.evidence,
    }


def _leases(folders: Set[Optional[str]]) -> List[Dict[str, Any]]:
    found = {}
    for folder in folders:
        try:
            path = lease_folder(folder, create=False)
            found[path] = list_leases(path)
        except (HostError, OSError) as error:
            found[str(folder)] = [{"resource": str(folder), "state": "unknown", "evidence": str(error)}]
    return [lease for path in sorted(found) for lease in found[path]]

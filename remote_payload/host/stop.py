"""Stop a run and prove that it is gone: through its supervisor while that lives, in its place when it is dead."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, NamedTuple, Optional

from remote_payload.host import container
from remote_payload.host.cgroup import Cgroup
from remote_payload.host.children import reap_adopted
from remote_payload.host.codes import STOPPING
from remote_payload.host.errors import HostError
from remote_payload.host.files import read_json, write_json
from remote_payload.host.finish import Cleanup, Ending, clean_up, prove_end, read_baseline, write_result
from remote_payload.host.follow import collect_faults
from remote_payload.host.journal import EventWriter
from remote_payload.host.lastcount import tell_last_count
from remote_payload.host.layout import Layout, RunPaths, check_run_id
from remote_payload.host.lease import clear_record
from remote_payload.host.leftovers import SHM, Baseline, delete_shm
from remote_payload.host.liveness import Stat, boot_seconds, judge, read_readings, send_signal, user_name
from remote_payload.host.members import Tree, find_members, recorded, stop_members
from remote_payload.host.protocol import (
    EndReason,
    Liveness,
    ProcessIdentity,
    RunState,
    check_plan,
    check_record,
)
from remote_payload.host.ps import Standing, judge_run
from remote_payload.host.pump import PumpKeeper, open_pipe
from remote_payload.host.start import hold_start_lock
from remote_payload.host.supervisor import STOP_REQUEST

FINISH_S = 30.0
"""Beyond the grace: killing, draining the log, and the driver freeing the memory."""

LOCK_WAIT_S = 30.0


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `stop`: {"workdir", "run_id", "grace_s", "force"}; with `force` there is no grace, and no hung supervisor.

    With `tell` true, lines {"doing": TEXT} for people come before the answer, as it goes on.

    Answers {"state", "end_reason", "gpus_clean", "killed", "leftovers", "message", "was", "was_over"}: `was` is its
    state before anybody asked, `was_over` that it had ended by then, or was lost. Of a run that is over nothing is
    changed but what it left on the host: that is ended and looked at again, and the answer says how it is now; a lost
    one stays lost, as nobody knows how or when it ended. Raises HostError if the run was never launched or cannot be
    judged from here.
    """
    check_record(request, {"workdir": str, "run_id": str, "grace_s": (int, float), "force": bool}, "stop request")
    paths = Layout(request["workdir"]).run(check_run_id(request["run_id"]))
    if not os.path.isdir(paths.folder):
        raise HostError("no-such-run", "this host has no run %s" % request["run_id"], "", "ctl ps lists its runs")
    grace_s = 0.0 if request["force"] else float(request["grace_s"])
    tell = _Teller(out) if request.get("tell") is True else _nobody
    answer = stop_run(request["workdir"], paths, grace_s, bool(request["force"]), tell)
    out.write(json.dumps(answer).encode() + b"\n")
    return 0


Tell = Callable[[str], None]


def _nobody(text: str) -> None:
    """Tell nobody."""


class _Teller:
    """Sends a line at once. Who asked may have left: the stop goes on, and its answer finds nobody either."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def __call__(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._out.write(json.dumps({"doing": text}).encode() + b"\n")
            self._out.flush()


def stop_run(
    workdir: str, paths: RunPaths, grace_s: float, force: bool = False, tell: Tell = _nobody
) -> Dict[str, Any]:
    """Stop a run and return the verb's answer. Raises HostError if it cannot be judged from here."""
    standing = judge_run(paths)
    answer = _stop(workdir, paths, standing, grace_s, force, tell)
    return dict(answer, was=standing.state.value, was_over=standing.is_over)


def _stop(
    workdir: str, paths: RunPaths, standing: Standing, grace_s: float, force: bool, tell: Tell
) -> Dict[str, Any]:
    run = standing.run
    if standing.state is RunState.FINISHED:
        tell("it has ended before; looking whether it left anything")
        return _stop_what_it_left(workdir, paths, standing, standing.result, grace_s, tell)
    if run is None:
        raise HostError(
            "not-launched", "the run was not launched", standing.evidence, "start it, or give it up with cancel"
        )
    supervisor: ProcessIdentity = run["supervisor"]
    alive, evidence = judge(supervisor)
    if alive is Liveness.UNKNOWN:
        raise HostError(
            "not-ours-to-judge", "the run cannot be stopped from here", evidence, "log in where it was started"
        )
    if alive is Liveness.ALIVE:
        if _ask_supervisor(paths, standing, grace_s, force, tell):
            return _answer(judge_run(paths))
        if not force:
            text = "the supervisor is still stopping it after %g s" % (grace_s + FINISH_S)
            return dict(_answer(judge_run(paths)), message=text)
        tell("its supervisor does not answer and is killed")
        send_signal(supervisor["pid"], supervisor["start_ticks"], signal.SIGKILL)
        _wait_dead(supervisor)
    with hold_start_lock(paths, LOCK_WAIT_S):
        if os.path.exists(paths.result):  # another stop was faster
            return _answer(judge_run(paths))
        # Asked for while its supervisor lived, the end is a stop's, whatever is left by now.
        standing = judge_run(paths, lock_is_ours=True) if alive is Liveness.DEAD else standing
        if standing.state is not RunState.LOST:
            tell("its supervisor is dead: stopping it in its place")
            return _stop_in_its_place(workdir, paths, run, grace_s, tell)
        left = read_json(paths.left)
        if left is None:
            tell("it is lost, neither supervisor nor job lives; looking what it left")
            return _clean_up_lost(workdir, paths, standing, run, grace_s, tell)
    tell("it is lost, and was looked at before; looking whether it left anything")
    return _stop_what_it_left(workdir, paths, standing, left, grace_s, tell)


def _ask_supervisor(paths: RunPaths, standing: Standing, grace_s: float, force: bool, tell: Tell) -> bool:
    """Send the request and wait, telling what the supervisor tells; return whether the run ended in order."""
    supervisor: ProcessIdentity = (standing.run or {})["supervisor"]
    told = _Notices(os.path.join(paths.events, "supervisor.jsonl"))
    write_json(os.path.join(paths.folder, STOP_REQUEST), {"grace_s": grace_s, "by": user_name(os.getuid())})
    send_signal(supervisor["pid"], supervisor["start_ticks"], signal.SIGTERM)
    if standing.state is RunState.QUEUED:
        tell("it waits in the queue, and has been asked to leave it")
    else:
        tell("its supervisor has been asked to stop it")
    deadline = time.monotonic() + grace_s + FINISH_S
    while time.monotonic() < deadline:
        over = os.path.exists(paths.result) or judge(supervisor)[0] is Liveness.DEAD
        for text in told.new():  # after that look: of what it said before its end nothing is left out
            tell(text)
        if over:
            return os.path.exists(paths.result)  # written in its last moment, perhaps
        time.sleep(0.1)
    return False


class _Notices:
    """What a supervisor says of a stop from now on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = os.path.getsize(path) if os.path.exists(path) else 0

    def new(self) -> Iterator[str]:
        """Yield the texts that have come since the last call."""
        if not os.path.exists(self._path):
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with contextlib.suppress(ValueError):  # cut by a full disk
                    event = json.loads(line)
                    if event.get("type") == "notice" and event.get("code") == STOPPING:
                        yield str(event.get("text"))


def _wait_dead(supervisor: ProcessIdentity) -> None:
    deadline = time.monotonic() + 5.0
    while judge(supervisor)[0] is Liveness.ALIVE:
        if time.monotonic() >= deadline:
            raise HostError(
                "supervisor-unkillable", "the supervisor does not die", judge(supervisor)[1], "reboot the host"
            )
        time.sleep(0.05)


class _Cleared(NamedTuple):
    """What a stop found and did where no supervisor lives."""

    done: Cleanup
    leftovers: List[Dict[str, Any]]
    baseline: Optional[Baseline]


def _stop_in_its_place(
    workdir: str, paths: RunPaths, run: Dict[str, Any], grace_s: float, tell: Tell
) -> Dict[str, Any]:
    """End the job of a run whose supervisor is dead, and write how it ended."""
    plan = check_plan(read_json(paths.plan))
    events = EventWriter(paths.events, "stop", plan["run_id"], plan["host"]["name"])
    events.emit("state", state=RunState.STOPPING.value, text="stopped without its supervisor, which is dead")
    cleared = _clear_up(workdir, paths, plan, run, grace_s, tell)
    tell_last_count(paths, plan, events.emit)
    done = cleared.done
    message = "stopped; its supervisor had died before (%s)" % done.evidence
    ending = Ending(EndReason.STOPPED, message, run.get("step"))
    events.emit(
        "end",
        end_reason=ending.end_reason.value,
        exit_code=None,
        signal=None,
        message=message,
        gpus_clean=done.clean,
    )
    write_result(
        paths,
        plan,
        ending,
        clean=done.clean,
        leftovers=cleared.leftovers,
        boot_s=run["boot_s"],
        baseline=cleared.baseline,
        killed=done.stopped.killed,
        oom_kills=done.oom_kills,
    )
    return _answer(judge_run(paths))


def _clean_up_lost(
    workdir: str, paths: RunPaths, standing: Standing, run: Dict[str, Any], grace_s: float, tell: Tell
) -> Dict[str, Any]:
    """Clear up after a run that is lost, give its lease back, and note in left.json what is left.

    No result is written and no event: that would be an end, with a reason and a time that nobody has seen.
    """
    cleared = _clear_up(workdir, paths, check_plan(read_json(paths.plan)), run, grace_s, tell)
    done = cleared.done
    left = {
        "gpus_clean": done.clean,
        "killed": done.stopped.killed,
        "leftovers": cleared.leftovers,
        "message": "it was over before, and stays lost; what it left was looked at: %s" % done.evidence,
    }
    write_json(paths.left, left)
    return dict(_answer(standing), **left)


def _clear_up(
    workdir: str, paths: RunPaths, plan: Dict[str, Any], run: Dict[str, Any], grace_s: float, tell: Tell
) -> _Cleared:
    """End the members that live, drain the log, sweep shared memory, and mark the lease free, or dirty."""
    run_id = plan["run_id"]
    tree = Tree(paths.tree)
    # Recorded pids are of the supervisor's boot; after a reboot they may belong to anybody.
    known = tree.known if _same_boot(run["supervisor"]) else set()

    # After a reboot the same path may be another's.
    cgroup = Cgroup(run["cgroup"]) if run.get("cgroup") and _same_boot(run["supervisor"]) else None

    def find() -> List[Stat]:
        found = find_members(paths.folder, known, cgroup=cgroup.path if cgroup else None)
        tree.note(found)
        return found

    keeper = PumpKeeper(workdir, run_id)
    # Held open while the members die: what they printed last would otherwise vanish with the last of them.
    pipe = open_pipe(paths) if os.path.exists(paths.pipe) else None
    keeper.ensure()
    baseline = read_baseline(paths)
    done = clean_up(
        paths,
        find=find,
        reap=reap_adopted,
        known=lambda: known,
        grace_s=grace_s,
        baseline=baseline,
        started=time.time() - max(0.0, boot_seconds() - run["boot_s"]),
        pipe=pipe,
        keeper=keeper,
        cgroup=cgroup,
        tell=tell,
    )
    leftovers = list(done.leftovers)
    try:
        collect_faults(paths, run_id, plan["host"]["name"])
    except OSError as error:  # the job's own folder may hold anything, and the run has to end all the same
        leftovers.append({"path": paths.faults, "reason": "fatal signals are not told: %s" % error})
    for path in baseline.leases if baseline else []:
        problem = clear_record(path, run_id, workdir, done.clean is True)
        if problem:
            leftovers.append({"path": path, "reason": problem})
    return _Cleared(done, leftovers, baseline)


def _stop_what_it_left(
    workdir: str,
    paths: RunPaths,
    standing: Standing,
    left: Optional[Dict[str, Any]],
    grace_s: float,
    tell: Tell,
) -> Dict[str, Any]:
    """Try once more to end what outlived a run, and say how it is now.

    `left` is what was noted of it: its result.json, of a lost one left.json. Both stay as they are.
    """
    answer = _answer(standing) if standing.result or not left else dict(_answer(standing), **left)
    run, run_id = standing.run, os.path.basename(paths.folder)
    baseline = read_baseline(paths)
    if run is None or left is None or baseline is None or not _same_boot(run["supervisor"]):
        return answer
    cgroup = Cgroup(run["cgroup"]) if run.get("cgroup") else None
    known = recorded(paths.tree)

    def find() -> List[Stat]:
        return find_members(paths.folder, known, cgroup=cgroup.path if cgroup else None)

    if left["gpus_clean"] is True and not find():
        return answer
    with hold_start_lock(paths, LOCK_WAIT_S):
        kill_all = cgroup.kill if cgroup else lambda: None
        stopped = stop_members(find, grace_s, reap_adopted, kill_all=kill_all, tell=tell)
        leftovers = list(stopped.leftovers)
        hidden, unremoved = container.end(paths)
        if unremoved:
            leftovers.append({"path": paths.folder, "reason": unremoved})
        # Others may have made files of the same names since it ended, so that only those are looked at again.
        named = [str(item.get("path")) for item in left["leftovers"] if item.get("ours")]
        survivors = [each["pid"] for each in stopped.leftovers]
        kept = delete_shm([path for path in named if os.path.dirname(path) == SHM])
        leftovers += [{"ours": each.get("pid") in survivors, **each} for each in kept]
        problem = cgroup.remove() if cgroup is not None else None
        if problem:
            leftovers.append({"path": run["cgroup"], "reason": problem})
        clean, evidence = prove_end(baseline, known, len(stopped.leftovers), unremoved or hidden)
        for path in baseline.leases:
            problem = clear_record(path, run_id, workdir, clean is True)
            if problem:
                leftovers.append({"path": path, "reason": problem})
    message = "%s; what it had left was looked at again: %s" % (left["message"], evidence)
    return dict(answer, gpus_clean=clean, killed=stopped.killed, leftovers=leftovers, message=message)


def _answer(standing: Standing) -> Dict[str, Any]:
    result = standing.result or {}
    return {
        "state": standing.state.value,
        "end_reason": standing.end_reason,
        "gpus_clean": result.get("gpus_clean", "unknown"),
        "killed": result.get("killed", []),
        "leftovers": result.get("leftovers", []),
        "message": result.get("message", standing.evidence),
    }


def _same_boot(process: ProcessIdentity) -> bool:
    return process["boot"] == read_readings().boot

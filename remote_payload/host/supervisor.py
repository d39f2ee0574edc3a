"""The supervisor: holds the lease, runs the steps one by one, and leaves the host as it found it.

It is started by `start` in a session of its own and from then on depends on nobody: not on the connection, not on
the workstation. SIGTERM is the request to stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, BinaryIO, Dict, List, Optional

from remote_payload.host.cgroup import Cgroup
from remote_payload.host.cgroup import make as make_cgroup
from remote_payload.host.children import CommandFailed, reap_adopted
from remote_payload.host.codes import STOPPING
from remote_payload.host.errors import HostError, described
from remote_payload.host.files import read_json, write_all, write_json
from remote_payload.host.finish import (
    DEFAULT_GRACE_S,
    Cleanup,
    Ending,
    baseline_path,
    clean_up,
    reserve_space,
    write_result,
)
from remote_payload.host.follow import FollowKeeper
from remote_payload.host.gpus import Sampler, list_gpus, select_gpus
from remote_payload.host.journal import EventWriter, complain
from remote_payload.host.kernel_notes import kernel_notes
from remote_payload.host.lastcount import tell_last_count
from remote_payload.host.layout import Layout
from remote_payload.host.lease import Claim, Lease, LeaseRefused, lease_folder, take
from remote_payload.host.leftovers import Baseline, busy_gpus, measure
from remote_payload.host.liveness import boot_seconds, identity, user_name
from remote_payload.host.members import StopReport, Tree, become_subreaper, find_members
from remote_payload.host.protocol import WIRE, Accelerator, EndReason, RunRecord, RunState, check_plan
from remote_payload.host.pump import PumpKeeper, open_pipe
from remote_payload.host.queue import Turn
from remote_payload.host.steps import FOREIGN_MEMORY_LIMIT, Run, StepEnded, job_environment, perform

STOP_REQUEST = "stop.json"
"""Written by `stop` before its SIGTERM: {"grace_s", "by"}."""


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `supervise`, started by `start`: {"workdir", "run_id", "lock_fd", "word_fd"}, secrets as JSON in the body.

    Its word to the starter is one JSON line on `word_fd`: {"outcome": "launched", "run"} or {"outcome": "refused",
    "result", "detail"}. `lock_fd` holds start.lock and is closed with it.
    """
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), sys.stdin.fileno())  # let go of the pipe that brought the secrets
    for descriptor in (request["lock_fd"], request["word_fd"]):
        os.set_inheritable(descriptor, False)
    return Supervisor(request, json.loads(body)).run()


BEAT_S = 5.0
"""How often the lease's record gets a fresh heartbeat."""

QUEUE_S = 0.5
"""How soon the first in the queue notices that the lease is free, and anybody in it a request to stop."""


class LeftQueue(Exception):
    """Stopped on request while it waited for the lease."""


class Supervisor:
    """One run, from lease to result. `run` is called once."""

    def __init__(self, request: Dict[str, Any], secrets: Dict[str, str]) -> None:
        self._workdir: str = request["workdir"]
        self._paths = Layout(self._workdir).run(request["run_id"])
        self._plan = check_plan(read_json(self._paths.plan))
        self._secrets = secrets
        self._lock_fd: int = request["lock_fd"]
        self._word_fd: int = request["word_fd"]
        self._word_given = False
        self._beaten = 0.0
        self._stop = False
        self._started = time.time()
        self._boot_s = boot_seconds()
        self._uuids: List[str] = []
        self._cgroup: Optional[Cgroup] = None
        self._lease: Optional[Lease] = None
        self._baseline: Optional[Baseline] = None
        self._pipe: Optional[int] = None
        self._record: Optional[RunRecord] = None
        for folder in (self._paths.events, self._paths.ledger, self._paths.log):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        if self._plan["job"].get("tracebacks"):
            os.makedirs(self._paths.faults, mode=0o700, exist_ok=True)
        self._follower = FollowKeeper(self._workdir, self._plan)
        self._keeper = PumpKeeper(self._workdir, self._plan["run_id"])
        self._tree = Tree(self._paths.tree)
        self._events = EventWriter(self._paths.events, "supervisor", self._plan["run_id"], self._plan["host"]["name"])

    def run(self) -> int:
        os.chdir(self._workdir)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        become_subreaper()
        outputs = self._plan["job"]["outputs"]
        sampler = Sampler(
            self._emit,
            self._plan["host"]["accelerator"] == Accelerator.CUDA.value,
            outputs[0]["path"] if outputs else None,
        )
        try:
            reserve_space(self._paths)
            self._launch()
        except LeaseRefused as refused:
            ending = Ending(EndReason(refused.end_reason), str(refused))
            return self._refuse(ending, {"holder": refused.holder})
        except LeftQueue:
            return self._refuse(Ending(EndReason.STOPPED, "stopped while it was queued; nothing was started"), None)
        except Exception as error:  # noqa: BLE001 - reported: in result.json, to the starter, and in supervisor.log
            traceback.print_exc()
            detail = error.to_dict() if isinstance(error, HostError) else None
            return self._refuse(Ending(EndReason.SUPERVISOR_FAILED, described(error)), detail)
        sampler.start()
        try:
            ending = self._run_steps()
        except Exception as error:  # noqa: BLE001 - reported: in result.json and in supervisor.log
            traceback.print_exc()
            ending = Ending(EndReason.SUPERVISOR_FAILED, described(error), self._step)
        self._finish(ending, sampler)
        return 0

    # ------------------------------------------------------------------------------------ launch

    def _launch(self) -> None:
        """Take the lease, put run.json on disk, and only then confirm."""
        plan = self._plan
        resources = ["host"]
        if plan["host"]["accelerator"] == Accelerator.CUDA.value:
            visible = plan["job"]["env"].get("CUDA_VISIBLE_DEVICES")
            resources = self._uuids = [gpu.uuid for gpu in select_gpus(list_gpus(), plan["host"]["gpus"], visible)]
        self._lease = self._take(resources)
        self._baseline = measure(self._lease.paths, self._uuids)
        write_json(baseline_path(self._paths), self._baseline.to_dict())
        self._cgroup = make_cgroup(plan["run_id"])
        self._record = self._make_record(RunState.LAUNCHING)
        write_json(self._paths.run, self._record)
        self._give_word({"outcome": "launched", "run": self._record})
        self._emit("state", state=RunState.LAUNCHING.value, text="the lease is held")

    def _take(self, resources: List[str]) -> Lease:
        """Take the lease, in a queue if the plan wants to wait. Raises LeaseRefused, LeftQueue."""
        plan = self._plan
        folder = lease_folder(plan["host"].get("lease_dir"))
        claim = Claim(
            run_id=plan["run_id"],
            name=plan["job"]["name"][:200],
            workdir=self._workdir,
            process=identity(os.getpid()),
        )
        try:
            return take(folder, resources, claim, self._why_not_free)
        except LeaseRefused as refused:
            if not plan["job"]["limits"].get("wait_for_lease"):
                raise
            why, holder = str(refused), refused.holder
        self._record = self._make_record(RunState.QUEUED)
        write_json(self._paths.run, self._record)
        self._give_word({"outcome": "launched", "run": self._record, "detail": {"why": why, "holder": holder}})
        self._emit("state", state=RunState.QUEUED.value, text=why)
        turn = Turn(folder, resources)
        try:
            while not self._stop:
                if not turn.wait(QUEUE_S):
                    continue
                try:
                    lease = take(folder, resources, claim, self._why_not_free)
                except LeaseRefused as refused:
                    # An unclean end is waited for too: its owner may clear it up at any time.
                    if str(refused) != why:
                        why = str(refused)
                        self._emit("state", state=RunState.QUEUED.value, text=why)
                    continue
                # Time spent waiting is not the run's.
                self._started, self._boot_s = time.time(), boot_seconds()
                return lease
        finally:
            turn.close()
        raise LeftQueue

    def _make_record(self, state: RunState) -> RunRecord:
        plan = self._plan
        return RunRecord(
            wire=WIRE,
            run_id=plan["run_id"],
            payload=plan["payload"],
            name=plan["job"]["name"],
            kind=plan["job"]["kind"],
            user=user_name(os.getuid()),
            supervisor=identity(os.getpid()),
            job=None,
            cgroup=self._cgroup.path if self._cgroup else None,
            state=state.value,
            step=None,
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            boot_s=self._boot_s,
        )

    def _why_not_free(self) -> Optional[str]:
        if not self._uuids:
            return None
        try:
            return busy_gpus(self._uuids, FOREIGN_MEMORY_LIMIT)
        except CommandFailed as error:
            return str(error)

    def _refuse(self, ending: Ending, detail: Optional[Dict[str, Any]]) -> int:
        """End before anything was used. The starter learns it from our word, everybody else from result.json."""
        if self._cgroup is not None:
            self._cgroup.remove()
        if self._lease is not None:
            self._lease.release(clean=True)
        self._emit(
            "end",
            end_reason=ending.end_reason.value,
            exit_code=None,
            signal=None,
            message=ending.message,
            gpus_clean="unknown",
        )
        result = write_result(
            self._paths,
            self._plan,
            ending,
            clean="unknown",
            leftovers=[],
            # While it only queued it had nothing of the host: no time there, and no GPU-hours.
            boot_s=None if self._lease is None else self._boot_s,
            baseline=self._baseline,
        )
        self._give_word({"outcome": "refused", "result": result, "detail": detail})
        return 0

    def _give_word(self, word: Dict[str, Any]) -> None:
        if self._word_given:  # it was queued: the starter has gone long since
            return
        self._word_given = True
        with contextlib.suppress(BrokenPipeError):  # the starter was killed; the files say the same
            write_all(self._word_fd, json.dumps(word).encode() + b"\n")
        os.close(self._word_fd)
        os.close(self._lock_fd)

    # ------------------------------------------------------------------------------------- steps

    @property
    def _step(self) -> Optional[str]:
        return self._record["step"] if self._record else None

    def _run_steps(self) -> Ending:
        self._pipe = open_pipe(self._paths)
        self._keeper.ensure()
        run = Run(
            paths=self._paths,
            plan=self._plan,
            environ=job_environment(self._plan, self._workdir, self._secrets),
            uuids=self._uuids,
            lease_fds=self._lease.descriptors if self._lease else [],
            pipe=self._pipe,
            keeper=self._keeper,
            follower=self._follower,
            tree=self._tree,
            find=self._find,
            emit=self._emit,
            beat=self._beat,
            stop_requested=lambda: self._stop,
            cgroup=self._cgroup,
            note_job=lambda job: self._update(job=job),
            boot_s=self._boot_s,
            grace_s=self._grace_s(),
        )
        self._update(state=RunState.RUNNING.value)
        self._emit("state", state=RunState.RUNNING.value, text="")
        for step in self._plan["job"]["steps"]:
            self._update(step=step["name"])
            if self._stop:
                return Ending(EndReason.STOPPED, "stopped on request", step["name"])
            begun = boot_seconds()
            self._emit("step", name=step["name"], status="started", text="", seconds=None)
            try:
                perform(step, run)
            except StepEnded as ended:
                seconds = round(boot_seconds() - begun, 3)
                self._emit("step", name=step["name"], status="failed", text=str(ended), seconds=seconds)
                return ended.ending
            seconds = round(boot_seconds() - begun, 3)
            self._emit("step", name=step["name"], status="done", text="", seconds=seconds)
        return Ending(EndReason.SUCCEEDED, "all steps succeeded", self._step, exit_code=0)

    def _beat(self) -> None:
        if self._lease is not None and boot_seconds() - self._beaten >= BEAT_S:
            self._beaten = boot_seconds()
            try:
                self._lease.beat()
            except OSError as error:  # the lock is what counts; the heartbeat is for readers
                complain("the lease's heartbeat is not written: %s" % error)

    def _find(self) -> List[Any]:
        cgroup = self._cgroup.path if self._cgroup else None
        found = find_members(self._paths.folder, self._tree.known, os.getpid(), cgroup=cgroup)
        self._tree.note(found)
        return found

    # --------------------------------------------------------------------------------------- end

    def _finish(self, ending: Ending, sampler: Sampler) -> None:
        self._update(state=RunState.STOPPING.value)
        self._emit("state", state=RunState.STOPPING.value, text=ending.message)
        try:
            done = clean_up(
                self._paths,
                find=self._find,
                reap=reap_adopted,
                known=lambda: self._tree.known,
                grace_s=self._grace_s(),
                baseline=self._baseline,
                started=self._started,
                pipe=self._pipe,
                keeper=self._keeper,
                cgroup=self._cgroup,
                tell=lambda text: self._emit("notice", level="info", code=STOPPING, text=text),
            )
        except Exception as error:  # noqa: BLE001 - reported in result.json, which has to be written in any case
            traceback.print_exc()
            reason = {"reason": "the cleaning up failed: %s" % described(error)}
            done = Cleanup(stopped=StopReport([], []), clean="unknown", evidence=reason["reason"], leftovers=[reason])
        try:
            self._follower.finish()  # after the log is whole, before the summary is made
            tell_last_count(self._paths, self._plan, self._emit)
        except Exception:  # noqa: BLE001 - told in supervisor.log; lease and result.json must not depend on it
            traceback.print_exc()
        sampler.stop()
        self._update(job=None)
        if self._lease is not None:
            self._lease.release(clean=done.clean is True)
        self._emit("notice", level="info" if done.clean is True else "warn", code="gpus-clean", text=done.evidence)
        if ending.end_reason not in (EndReason.SUCCEEDED, EndReason.STOPPED):
            for text in kernel_notes(boot_seconds() - self._boot_s):
                self._emit("notice", level="warn", code="kernel", text=text)
        self._emit(
            "end",
            end_reason=ending.end_reason.value,
            exit_code=ending.exit_code,
            signal=ending.signal,
            message=ending.message,
            gpus_clean=done.clean,
        )
        write_result(
            self._paths,
            self._plan,
            ending,
            clean=done.clean,
            leftovers=done.leftovers,
            boot_s=self._boot_s,
            baseline=self._baseline,
            killed=done.stopped.killed,
            oom_kills=done.oom_kills,
        )

    def _grace_s(self) -> float:
        """Return the grace of a stop request, else the plan's."""
        if self._stop:
            request = read_json(os.path.join(self._paths.folder, STOP_REQUEST))
            if request is not None:
                return float(request["grace_s"])
        grace = self._plan["job"]["limits"].get("stop_grace_s")
        return DEFAULT_GRACE_S if grace is None else float(grace)

    def _on_term(self, number: int, frame: object) -> None:
        self._stop = True

    def _update(self, **changes: Any) -> None:
        if self._record is not None:
            self._record.update(changes)  # type: ignore[typeddict-item]
            try:
                write_json(self._paths.run, self._record)
            except OSError as error:  # as for events; the record on disk is then older, not wrong about who runs it
                complain("run.json is not updated: %s" % error)

    def _emit(self, type: str, **fields: Any) -> None:  # noqa: A002 - the field's name on the wire
        try:
            self._events.emit(type, **fields)
        except OSError as error:
            # A full disk must not keep a run from ending in order; result.json has its own reserve.
            complain("event %s %s lost: %s" % (type, fields, error))

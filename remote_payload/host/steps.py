"""The steps of a job: look at the GPUs again, make the outputs ready, run a program under limits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from remote_payload.host import container, stacks
from remote_payload.host.cgroup import Cgroup
from remote_payload.host.children import CommandFailed, reap_adopted, registering
from remote_payload.host.envfile import read_env_file, with_python_first
from remote_payload.host.errors import HostError
from remote_payload.host.finish import Ending
from remote_payload.host.follow import FollowKeeper
from remote_payload.host.layout import Layout, RunPaths
from remote_payload.host.leftovers import busy_gpus
from remote_payload.host.liveness import Stat, identity, read_stat
from remote_payload.host.members import (
    FOLDER_ENV,
    HELPER_ENV,
    RUN_ENV,
    Tree,
    find_descendants,
    snapshot,
    stop_members,
)
from remote_payload.host.protocol import EndReason, ProcessIdentity
from remote_payload.host.pump import PumpKeeper, write_within
from remote_payload.host.titles import TITLE_ENV, title_prefix
from remote_payload.host.uploads import place
from remote_payload.host.usage import OutputLimit
from remote_payload.host.watchdog import Watchdog

FOREIGN_MEMORY_LIMIT = 1 << 30
"""Bytes in use on a GPU at recheck that count as occupied; display servers and driver contexts stay below."""

TICK_S = 0.1
"""How soon the end of the job, or a request to stop, is noticed."""

LOOK_S = 1.0
"""How often log pump and limits are looked at."""

TREE_S = 2.0
"""How often the process tree is recorded; a pass over /proc takes some 20 ms on a busy host."""

STACKS_BYTES = 256 << 10
"""Of stacks that go into the log: a quarter of the pipe, which is empty when a job has been silent."""

STACKS_WRITE_S = 5.0
"""For one process's stacks. Where pipe memory is short, the pipe is smaller than they are; the pump may be late."""

SETTLE_S = 3.0
"""For what a program leaves to end by itself, as Python's resource tracker does once its pipe is closed."""


class Run(NamedTuple):
    """What a step needs to know of the run that it is part of."""

    paths: RunPaths
    plan: Dict[str, Any]
    environ: Dict[str, str]  # of exec and verify steps, secrets included
    uuids: List[str]  # of the leased GPUs, [] on a CPU host
    lease_fds: List[int]
    pipe: int
    keeper: PumpKeeper
    follower: FollowKeeper
    tree: Tree
    find: Callable[[], List[Stat]]
    emit: Callable[..., None]
    beat: Callable[[], None]
    stop_requested: Callable[[], bool]
    cgroup: Optional[Cgroup]
    note_job: Callable[[Optional[ProcessIdentity]], None]
    boot_s: float
    grace_s: float


class StepEnded(Exception):
    """The run ends with this step."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.message)
        self.ending = ending


def job_environment(plan: Dict[str, Any], workdir: str, secrets: Dict[str, str]) -> Dict[str, str]:
    """Return the environment of exec and verify steps.

    The login's, the host's `env_file`, the plan's, the secrets, and ours on top; first in PATH is the folder of the
    host's Python. Raises HostError if the `env_file` cannot be read.
    """
    run_id = plan["run_id"]
    environ = {name: value for name, value in os.environ.items() if name != HELPER_ENV}
    if plan["host"].get("env_file"):
        environ.update(read_env_file(plan["host"]["env_file"]))
    environ.update(plan["job"]["env"])
    environ.update(secrets)
    environ = with_python_first(environ, plan["host"].get("python", ""))
    payload = Layout(workdir).payload(plan["payload"])
    hook = os.path.join(payload, "remote_payload", "hook") if plan["job"].get("tracebacks") else None
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (hook, payload, environ.get("PYTHONPATH"))))
    environ["PYTHONUNBUFFERED"] = "1"
    # setproctitle, which vLLM calls, otherwise overwrites the very memory that /proc/PID/environ shows.
    environ["SPT_NOENV"] = "1"
    environ[TITLE_ENV] = title_prefix(plan["job"]["kind"], run_id)
    environ[RUN_ENV] = run_id
    environ[FOLDER_ENV] = Layout(workdir).run(run_id).folder
    environ["CTL_HOST"] = plan["host"]["name"]
    return environ


def perform(step: Dict[str, Any], run: Run) -> None:
    """Do one step. Raises StepEnded if the run ends with it."""
    if step["kind"] == "recheck":
        _recheck(step, run)
    elif step["kind"] == "place":
        _place(step, run)
    elif step["kind"] == "clear":
        _clear(step, run)
    else:
        _execute(step, run)


def _recheck(step: Dict[str, Any], run: Run) -> None:
    if not run.uuids:
        return
    try:
        busy = busy_gpus(run.uuids, FOREIGN_MEMORY_LIMIT)
    except CommandFailed as error:
        busy = str(error)
    if busy:
        message = "the GPUs are no longer free: %s" % busy
        raise StepEnded(Ending(EndReason.RECHECK_FAILED, message, step["name"]))


def _place(step: Dict[str, Any], run: Run) -> None:
    try:
        count = place(run.plan["host"]["workdir"], run.plan["job"]["upload"], run.paths.work)
    except HostError as error:
        raise StepEnded(Ending(EndReason.JOB_FAILED, str(error), step["name"])) from error
    run.emit("notice", level="info", code="placed", text="%s files are in %s" % (format(count, ","), run.paths.work))


def _clear(step: Dict[str, Any], run: Run) -> None:
    # Imported here: only runs with outputs need what it brings along.
    from remote_payload.host.clear import ClearError, claim, clear

    for output in run.plan["job"]["outputs"]:
        try:
            report = clear(output, run.plan["run_id"], run.plan["host"]["workdir"])
            claim(output, run.plan["run_id"], run.plan["job"]["kind"])
        except ClearError as error:
            raise StepEnded(Ending(error.end_reason, str(error), step["name"])) from error
        run.emit(
            "notice",
            level="info",
            code="cleared",
            text="%(path)s is ready (%(stale)s): %(deleted_entries)d entries deleted, %(remaining)d kept" % report
            + (", and %d that are not ctl's" % report["not_ours"] if report["not_ours"] else ""),
        )


def _execute(step: Dict[str, Any], run: Run) -> None:
    # Before the start: a quick job's first event must count.
    limits = run.plan["job"]["limits"]
    watchdog = Watchdog(run.paths, limits, run.boot_s, run.find)
    outputs = OutputLimit([output["path"] for output in run.plan["job"]["outputs"]], limits.get("output_bytes"))
    run.follower.ensure()
    process = _spawn(step, run)
    leader = read_stat(process.pid)
    if leader is not None:
        run.tree.note([leader])  # at once: should the supervisor die now, this is how the job is found
    run.note_job(identity(process.pid))
    look = tree = time.monotonic()
    try:
        while process.poll() is None:
            if run.stop_requested():
                raise StepEnded(Ending(EndReason.STOPPED, "stopped on request", step["name"]))
            now = time.monotonic()
            if now >= look:
                look = now + LOOK_S
                run.beat()
                if run.keeper.ensure():
                    run.emit("notice", level="info", code="pump-started", text="a log pump was started")
                run.follower.ensure()
                broken = watchdog.check() or outputs.check()
                if broken:
                    if broken.startswith("silence_timeout"):
                        _tell_stacks(run)
                    raise StepEnded(Ending(EndReason.LIMIT_EXCEEDED, broken, step["name"]))
            if now >= tree:
                tree = now + TREE_S
                run.tree.note(find_descendants([os.getpid()], snapshot(), run.plan["run_id"]).values())
                reap_adopted()
            time.sleep(TICK_S)
    finally:
        with registering() as own:
            own.discard(process.pid)  # nobody waits for it any more; if it still runs, it is reaped as a member
    _settle(step, run)
    run.note_job(None)
    _judge_exit(step, run, process.returncode)


def _tell_stacks(run: Run) -> None:
    """Record what a silent job is doing before it is ended: in its log, and as one event for each process."""
    spy = stacks.find_spy(run.plan["host"]["python"])
    if spy is None:
        text = "there is no py-spy on the host: what the job was doing is not known"
        run.emit("notice", level="info", code="no-py-spy", text=text)
        return
    room = STACKS_BYTES
    for record in stacks.dump(spy, run.find(), run.paths):
        run.emit("stacks", **record)
        text = "\nctl: %s\n" % stacks.text_of(record)
        data = text.encode("utf-8", "replace")[:room]
        room -= len(data)
        run.keeper.ensure()
        if not write_within(run.pipe, data, STACKS_WRITE_S):
            room = 0  # nobody empties the pipe: the disk is full, or the job still writes
        run.beat()
        if run.stop_requested():
            return  # 64 processes that cannot be read take twenty minutes, and somebody waits


def _spawn(step: Dict[str, Any], run: Run) -> "subprocess.Popen[bytes]":
    argv, environ = step["argv"], run.environ
    if step["kind"] == "exec":
        argv, environ = container.wrap(run.plan, argv, environ, run.paths, run.uuids)
    try:
        with registering() as own, run.cgroup.entered() if run.cgroup else contextlib.nullcontext():
            process = subprocess.Popen(
                argv,
                cwd=run.plan["job"]["cwd"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=run.pipe,
                stderr=run.pipe,
                pass_fds=run.lease_fds,  # the lease is held until the job is dead, even if we die first
                start_new_session=True,
            )
            own.add(process.pid)
    except (OSError, ValueError) as error:
        message = "%s could not be started: %s" % (argv[0], error)
        raise StepEnded(Ending(_failure(step), message, step["name"])) from error
    return process


def _settle(step: Dict[str, Any], run: Run) -> None:
    """End what the program left running: the next step must not race with it."""
    deadline = time.monotonic() + SETTLE_S
    while run.find() and time.monotonic() < deadline:
        reap_adopted()
        time.sleep(TICK_S)
    kill_all = run.cgroup.kill if run.cgroup else lambda: None
    report = stop_members(run.find, run.grace_s, reap_adopted, kill_all=kill_all)
    if report.killed:
        names = sorted({"%(pid)d (%(comm)s)" % item for item in report.killed})
        text = "%s left processes behind, which were ended: %s" % (step["name"], ", ".join(names[:16]))
        run.emit("notice", level="warn", code="processes-left", text=text)


def _judge_exit(step: Dict[str, Any], run: Run, code: int) -> None:
    name = step["name"]
    if code < 0:
        message = "%s was killed by %s" % (name, _signal_name(-code))
        raise StepEnded(Ending(_failure(step, EndReason.JOB_SIGNALED), message, name, signal=-code))
    allowed = run.plan["job"]["success"].get("exit_codes", [0]) if step["kind"] == "exec" else [0]
    if code not in allowed:
        raise StepEnded(Ending(_failure(step), "%s exited with code %d" % (name, code), name, exit_code=code))


def _failure(step: Dict[str, Any], otherwise: EndReason = EndReason.JOB_FAILED) -> EndReason:
    if step["kind"] == "verify":
        return EndReason.VERIFY_FAILED
    return EndReason(step["failure"]) if "failure" in step else otherwise


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time signals have numbers only
        return "signal %d" % number

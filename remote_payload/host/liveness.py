"""Who a process is, and whether it lives: judged from the kernel's own records, never from heartbeats.

A pid alone says nothing (it is reused, and a container has its own), so every decision, above all every signal,
goes by the whole `ProcessIdentity`.
"""

from __future__ import annotations

import os
import pwd
import signal
import time
from typing import Callable, NamedTuple, Optional, Tuple

from remote_payload.host.protocol import Liveness, ProcessIdentity

ZOMBIE_STATES = ("Z", "X", "x")
"""Ended, and only waiting for its parent to read the exit status."""


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that supervision uses; `start_ticks` counts clock ticks since boot."""

    pid: int
    comm: str
    state: str
    ppid: int
    start_ticks: int


def _exists(pid: int) -> bool:
    """Whether any process has `pid`, even one that a hidepid mount keeps out of our /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Readings(NamedTuple):
    """This machine as a judge sees it; tests pass their own."""

    machine: str
    boot: str
    pidns: int
    proc: str = "/proc"
    exists: Callable[[int], bool] = _exists


def read_readings(proc: str = "/proc") -> Readings:
    """Read machine id, boot id and PID namespace. Without /etc/machine-id the boot id stands for the machine."""
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    machine = _first_line("/etc/machine-id") or boot
    return Readings(machine=machine, boot=boot, pidns=os.stat("/proc/self/ns/pid").st_ino, proc=proc)


def read_stat(pid: int, proc: str = "/proc") -> Optional[Stat]:
    """Return the stat of a process, None if there is none of that pid (or it is hidden from us)."""
    try:
        with open("%s/%d/stat" % (proc, pid), "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # A command may itself hold spaces and parentheses, so the fields are counted from the last one.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Stat(
        pid=pid, comm=head.partition("(")[2], state=fields[0], ppid=int(fields[1]), start_ticks=int(fields[19])
    )


def identity(pid: int, readings: Optional[Readings] = None) -> ProcessIdentity:
    """Return the identity of a living process on this machine; raises ProcessLookupError if there is none."""
    here = readings or read_readings()
    stat = read_stat(pid, here.proc)
    if stat is None:
        raise ProcessLookupError("no process %d" % pid)
    return ProcessIdentity(
        machine=here.machine, boot=here.boot, pidns=here.pidns, pid=pid, start_ticks=stat.start_ticks
    )


def judge(process: ProcessIdentity, readings: Optional[Readings] = None) -> Tuple[Liveness, str]:
    """Say whether `process` lives, with the evidence as one sentence.

    Dead is only said on proof: another boot of the same machine, or, in the same boot and PID namespace, no such
    process. What cannot be seen from here is unknown.
    """
    here = readings or read_readings()
    pid = process["pid"]
    if process["machine"] != here.machine:
        return Liveness.UNKNOWN, "process %d belongs to machine %s, this is %s" % (
            pid,
            process["machine"],
            here.machine,
        )
    if process["boot"] != here.boot:
        return Liveness.DEAD, "the machine was rebooted since process %d was started" % pid
    if process["pidns"] != here.pidns:
        return Liveness.UNKNOWN, "process %d lives in another PID namespace (%d, here %d)" % (
            pid,
            process["pidns"],
            here.pidns,
        )
    stat = read_stat(pid, here.proc)
    if stat is None:
        if here.exists(pid):
            return Liveness.UNKNOWN, "process %d is hidden from this user" % pid
        return Liveness.DEAD, "there is no process %d" % pid
    if stat.start_ticks != process["start_ticks"]:
        return Liveness.DEAD, "pid %d now belongs to a later process (%s)" % (pid, stat.comm)
    if stat.state in ZOMBIE_STATES:
        return Liveness.DEAD, "process %d has ended and waits to be reaped" % pid
    return Liveness.ALIVE, "process %d (%s) is alive, state %s" % (pid, stat.comm, stat.state)


def send_signal(pid: int, start_ticks: int, number: int) -> bool:
    """Send a signal to exactly the process that started at `start_ticks`; False if it is gone.

    Raises PermissionError if the process belongs to somebody else.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # a kernel before 5.3 or a filter: the recheck leaves a gap of microseconds
        if not _is_same(pid, start_ticks):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True
    try:
        # The descriptor pins the process, so a check after opening it holds until the signal.
        if not _is_same(pid, start_ticks):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def user_name(uid: int) -> str:
    """Return the login name, or the number of a user without one."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def boot_seconds() -> float:
    """Return seconds since boot, suspended time included: the clock of all durations."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_same(pid: int, start_ticks: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline().strip()
    except FileNotFoundError:
        return ""

"""Which processes belong to a run, and how to end them all.

A process is a member if it is in the job's cgroup (where there is one), was recorded as a descendant of the
supervisor (tree.jsonl), carries the run's id and folder in its environment, or descends from the supervisor, which
adopts its orphans, or from another member. Names are never evidence, and an id alone is none either: a plan may
come with any, so another workdir of the host may have a run of the same one. Helpers that ctl itself starts
(supervisor, log pump, GPU queries) carry `HELPER_ENV` and are no members.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import defaultdict
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from remote_payload.host.cgroup import Cgroup
from remote_payload.host.files import read_lines
from remote_payload.host.journal import Journal, complain
from remote_payload.host.liveness import ZOMBIE_STATES, Stat, read_stat, send_signal

RUN_ENV = "CTL_RUN_ID"
FOLDER_ENV = "CTL_RUN_DIR"
"""The run's folder, or for what a step runs on its own a folder below that (a rehearsal)."""

HELPER_ENV = "CTL_HELPER"

PR_SET_CHILD_SUBREAPER = 36
"""prctl option of Linux 3.4 and later: orphaned descendants become our children instead of init's."""

KILL_WAIT_S = 10.0
"""What SIGKILL leaves after this long sits in the kernel (state D), usually in a driver call."""

RESCAN_S = 0.1
"""A member may fork while it is being stopped; short, so that its children are found at once."""

Key = Tuple[int, int]
"""(pid, start ticks): unique within one boot."""


class StopReport(NamedTuple):
    """`killed`: {pid, comm, signal} of each member signalled; `leftovers`: {pid, comm, reason} of survivors."""

    killed: List[Dict[str, Any]]
    leftovers: List[Dict[str, Any]]


def become_subreaper() -> bool:
    """Adopt orphaned descendants from now on; False where the kernel refuses."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class Tree:
    """tree.jsonl: every descendant that was ever seen, so that it is known after the supervisor's death too."""

    def __init__(self, path: str) -> None:
        self._known = recorded(path)
        self._journal = Journal(path)

    def note(self, members: Iterable[Stat]) -> None:
        for member in members:
            key = (member.pid, member.start_ticks)
            if key not in self._known:
                self._known.add(key)
                fields = ("pid", "start_ticks", "ppid", "comm")
                try:
                    self._journal.append({name: getattr(member, name) for name in fields})
                except OSError as error:
                    # A full disk must not keep the members from being stopped; here they are known all the same.
                    complain("process %d is not recorded: %s" % (member.pid, error))

    @property
    def known(self) -> Set[Key]:
        return self._known


def recorded(path: str) -> Set[Key]:
    """Return the (pid, start ticks) in a tree.jsonl; meaningful only within the boot that wrote it."""
    return {
        (line["pid"], line["start_ticks"])
        for line in read_lines(path)
        if isinstance(line.get("pid"), int) and isinstance(line.get("start_ticks"), int)
    }


def snapshot(proc: str = "/proc") -> Dict[int, Stat]:
    """Return every process that has not ended, by pid."""
    table = {}
    for name in os.listdir(proc):
        if name.isdigit():
            stat = read_stat(int(name), proc)
            if stat is not None and stat.state not in ZOMBIE_STATES:
                table[stat.pid] = stat
    return table


def read_environ(pid: int, proc: str = "/proc") -> Optional[Dict[str, str]]:
    """Return the environment that a process was started with; None if it may not be read or the process is gone."""
    try:
        with open("%s/%d/environ" % (proc, pid), "rb") as file:
            data = file.read()
    except OSError:
        return None
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def is_of_run(environ: Mapping[str, str], folder: str) -> bool:
    """Whether an environment is that of a process of the run in `folder`.

    Where the folder is not named, by a program that passes on only some variables, the id has to do. Paths are
    compared with links resolved: who asks may call the workdir otherwise than who launched.
    """
    if environ.get(RUN_ENV) != os.path.basename(folder):
        return False
    named = environ.get(FOLDER_ENV)
    if not named or named == folder:
        return True
    here = os.path.realpath(folder)
    return os.path.join(os.path.realpath(named), "").startswith(os.path.join(here, ""))


def find_marked(folder: str, table: Dict[int, Stat], proc: str = "/proc") -> List[Stat]:
    """Return the processes of a `snapshot` that are of the run in `folder` by their environment, helpers left out."""
    found = []
    for pid, stat in table.items():
        environ = read_environ(pid, proc)
        if environ and HELPER_ENV not in environ and is_of_run(environ, folder):
            found.append(stat)
    return found


def find_descendants(
    roots: Iterable[int], table: Dict[int, Stat], run_id: str, proc: str = "/proc"
) -> Dict[int, Stat]:
    """Return all below the pids `roots`, by pid, the roots themselves and the helpers' subtrees excluded."""
    children: Dict[int, List[Stat]] = defaultdict(list)
    for stat in table.values():
        children[stat.ppid].append(stat)
    found: Dict[int, Stat] = {}
    waiting = list(roots)
    while waiting:
        for stat in children[waiting.pop()]:
            if stat.pid in found or (read_environ(stat.pid, proc) or {}).get(HELPER_ENV) == run_id:
                continue
            found[stat.pid] = stat
            waiting.append(stat.pid)
    return found


def find_members(
    folder: str,
    known: Set[Key],
    supervisor: Optional[int] = None,
    proc: str = "/proc",
    cgroup: Optional[str] = None,
) -> List[Stat]:
    """Return the living members of the run in `folder`, whatever process group or session they are in.

    `known` holds recorded descendants of this boot; `supervisor` is given only by the supervisor itself, or with
    its pid proved alive. `cgroup` is the path of the job's own, which no process leaves by itself.
    """
    inside = Cgroup(cgroup).pids() if cgroup else []  # before the table: a process that is not in it has ended
    table = snapshot(proc)
    members = {pid: stat for pid, stat in table.items() if (pid, stat.start_ticks) in known}
    members.update((stat.pid, stat) for stat in find_marked(folder, table, proc))
    members.update((pid, table[pid]) for pid in inside if pid in table)
    roots = list(members) + ([supervisor] if supervisor is not None else [])
    members.update(find_descendants(roots, table, os.path.basename(folder), proc))
    for own in (os.getpid(), supervisor):
        if own is not None:
            members.pop(own, None)
    return sorted(members.values())


def stop_members(
    find: Callable[[], List[Stat]],
    grace_s: float,
    reap: Callable[[], None] = lambda: None,
    kill_wait_s: float = KILL_WAIT_S,
    kill_all: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda text: None,
) -> StopReport:
    """End every process that `find` returns: TERM, `grace_s` seconds, KILL, until only unkillable ones are left.

    `find` is asked again all the time, so a member that was forked meanwhile, or left its process group, is met too.
    `reap` collects the exit statuses of adopted children; `kill_all` kills at one stroke where the kernel can.
    `tell` gets a sentence for people with each round that has members to end.
    """
    signalled: Dict[Tuple[Key, int], Dict[str, Any]] = {}
    refused: Dict[Key, str] = {}
    rounds = ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_wait_s)) if grace_s > 0 else (
        (signal.SIGKILL, kill_wait_s),
    )  # fmt: skip
    left: List[Stat] = []
    for number, wait_s in rounds:
        deadline = time.monotonic() + wait_s
        quiet: Optional[int] = None
        while True:
            reap()
            left = find()
            for member in left:
                key = (member.pid, member.start_ticks)
                if (key, number) in signalled or key in refused:
                    continue
                try:
                    sent = send_signal(member.pid, member.start_ticks, number)
                except PermissionError as error:
                    refused[key] = str(error)
                    continue
                if sent:
                    signalled[key, number] = {
                        "pid": member.pid,
                        "comm": member.comm,
                        "signal": signal.Signals(number).name,
                    }
            if left and quiet is None:
                tell(_round_text(number, len(left), grace_s))
            if number == signal.SIGKILL and left:
                kill_all()  # after the single signals, so that each member is in the report
            # One look can miss a member whose parent forked it and ended during that look, two in a row cannot.
            quiet = (quiet or 0) + 1 if all((m.pid, m.start_ticks) in refused for m in left) else 0
            if quiet == 2 or time.monotonic() >= deadline:
                break
            time.sleep(RESCAN_S)
        if quiet == 2:
            break
    return StopReport(
        killed=list(signalled.values()),
        leftovers=[
            {"pid": m.pid, "comm": m.comm, "reason": _why_left(m, refused.get((m.pid, m.start_ticks)))} for m in left
        ],
    )


def _round_text(number: int, count: int, grace_s: float) -> str:
    who = "1 process" if count == 1 else "%d processes" % count
    if number == signal.SIGTERM:
        return "%s asked to end (TERM); KILL after %g s" % (who, grace_s)
    return "%s%s killed (KILL)" % (who, " still there after %g s:" % grace_s if grace_s else "")


def _why_left(member: Stat, refused: Optional[str]) -> str:
    if refused:
        return "may not be signalled by this user (%s)" % refused
    if member.state == "D":
        return "unkillable: it waits inside the kernel (state D)"
    return "still there after SIGKILL, state %s" % member.state

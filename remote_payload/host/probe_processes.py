"""The `processes` section: who holds the GPUs, and what vLLM left behind without holding one.

A leftover is only reported, never ended, because of its name.
"""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from remote_payload.host.layout import RUN_ID, Layout
from remote_payload.host.liveness import Stat, boot_seconds, read_stat, user_name
from remote_payload.host.members import RUN_ENV, is_of_run, read_environ, snapshot
from remote_payload.host.sections import Note
from remote_payload.host.titles import run_of_title

# vLLM names its processes PREFIX::EngineCore_DP0 and so on; the prefix is "VLLM" unless our own or another is set.
_TITLE = re.compile(r"\bVLLM::|::(EngineCore|Worker|APIServer|DPCoordinator)")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_PROGRAM = "vllm"
"""The command that vLLM installs, a script of its environment's Python."""

_MODULE = re.compile(r"vllm(\..+)?|remote_payload\.extract\.(engine|rehearse|canary\w*)")
"""Modules that run vLLM's engine. What else of `remote_payload.extract` is run on its own reads files."""

_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_HELPER = re.compile(r"multiprocessing\.(resource_tracker|spawn|forkserver)")

COMMAND_LIMIT = 4096
"""Characters of a command line that are reported; some hold whole scripts."""

PARENT_LIMIT = 200


class Process(NamedTuple):
    stat: Stat
    uid: Optional[int]  # None: the process is hidden from us or lives in another PID namespace
    argv: List[str]


def probe_processes(
    note: Note, apps: Optional[List[Dict[str, Any]]], probe_pid: int, python: Optional[str], workdir: str
) -> Dict[str, Any]:
    """Return {"compute": [record] or null, "vllm": [record]}.

    A record is {pid, ppid, parent (its command), owner, uid, command, age_s, start_ticks, run_id, run_here}, with
    null for what cannot be seen; `run_here` says whether the run is one of `workdir`, so that it can be stopped from
    here. Compute records add {gpu_uuid, memory_used}. `apps` are nvidia-smi's compute processes, None if it
    could not be asked. The probe, its children and its ancestors are left out of `vllm`. `python` is the interpreter
    of the vLLM environment: multiprocessing's helper processes count as vLLM's if they run under it.
    """
    note("/proc")
    table = snapshot()
    ours = _family(probe_pid, table)
    holders = {app["pid"] for app in apps or []}
    vllm = []
    for pid, stat in sorted(table.items()):
        if pid in ours or pid in holders:
            continue
        note("/proc/%d" % pid)
        process = _read(stat)
        if is_vllm(stat.comm, process.argv, python):
            vllm.append(_record(pid, process, "", workdir))
    compute = None
    if apps is not None:
        compute = [
            {
                **_record(
                    app["pid"], _read(table[app["pid"]]) if app["pid"] in table else None, app["name"] or "", workdir
                ),
                "gpu_uuid": app["gpu_uuid"],
                "memory_used": app["memory_used"],
            }
            for app in apps
        ]
    return {"compute": compute, "vllm": vllm}


def _is_here(run_id: Optional[str], environ: Mapping[str, str], workdir: str) -> Optional[bool]:
    if run_id is None:
        return None
    if RUN_ID.fullmatch(run_id) is None:
        return False  # a process may carry any word in its environment
    folder = Layout(workdir).run(run_id).folder
    # A title names the run alone, and another workdir may have one of the same id.
    return os.path.isdir(folder) and (RUN_ENV not in environ or is_of_run(environ, folder))


def is_vllm(comm: str, argv: List[str], python: Optional[str]) -> bool:
    """Whether a process is one of vLLM's: by its title, its program, or the module that a Python runs.

    A command that merely mentions vllm (an editor, a log reader, the text after `-c`) is not.
    """
    if _TITLE.search(comm) or _TITLE.search(argv[0] if argv else ""):
        return True
    if not argv:
        return False
    name = os.path.basename(argv[0])
    if not _PYTHON.fullmatch(name):
        return name == _PROGRAM
    kind, what = _runs(argv[1:])
    if kind == "code":
        return argv[0] == python and _HELPER.search(what) is not None
    return bool(_MODULE.fullmatch(what)) if kind == "module" else os.path.basename(what) == _PROGRAM


def _runs(words: List[str]) -> Tuple[str, str]:
    """Return what a Python runs by the words behind its name: ("module" or "code" or "script", its value)."""
    position = 0
    while position < len(words):
        word = words[position]
        # Options of one letter may stand together, and -m and -c take what follows them: `-Bm vllm`, `-cpass`.
        found = re.match(r"-[A-Za-z]*?([mc])(.*)", word, re.DOTALL) if word[:2] not in ("-W", "-X", "--") else None
        if found:
            value = found.group(2) or (words[position + 1] if position + 1 < len(words) else "")
            return {"m": "module", "c": "code"}[found.group(1)], value
        if not word.startswith("-"):
            return "script", word
        position += 2 if word in _OPTIONS_WITH_VALUE else 1
    return "script", ""


def _read(stat: Stat) -> Process:
    folder = "/proc/%d" % stat.pid
    try:
        uid: Optional[int] = os.stat(folder).st_uid
        with open(folder + "/cmdline", "rb") as file:
            data = file.read()
    except OSError:  # ended meanwhile, or hidden
        return Process(stat, None, [])
    return Process(stat, uid, [os.fsdecode(word) for word in data.rstrip(b"\0").split(b"\0")] if data else [])


def _record(pid: int, process: Optional[Process], name: str, workdir: str) -> Dict[str, Any]:
    if process is None:
        return {
            "pid": pid, "ppid": None, "parent": None, "owner": None, "uid": None, "command": name,
            "age_s": None, "start_ticks": None, "run_id": None, "run_here": None,
        }  # fmt: skip
    stat = process.stat
    environ = read_environ(pid) or {}
    run_id = environ.get(RUN_ENV) or run_of_title(process.argv)
    return {
        "pid": pid,
        "ppid": stat.ppid,
        "parent": _parent(stat.ppid),
        "owner": None if process.uid is None else user_name(process.uid),
        "uid": process.uid,
        "command": (" ".join(process.argv) or name or "[%s]" % stat.comm)[:COMMAND_LIMIT],
        "age_s": round(boot_seconds() - stat.start_ticks / os.sysconf("SC_CLK_TCK"), 1),
        "start_ticks": stat.start_ticks,
        "run_id": run_id,
        "run_here": _is_here(run_id, environ, workdir),
    }


def _parent(ppid: int) -> Optional[str]:
    """Return the command of a parent in short; the init process says that the real one has ended."""
    parent = read_stat(ppid)
    if parent is None:
        return None
    return (" ".join(_read(parent).argv) or "[%s]" % parent.comm)[:PARENT_LIMIT]


def _family(probe_pid: int, table: Dict[int, Stat]) -> Set[int]:
    """Return the probe, all of its ancestors (the shell and sshd that carry it) and all below it."""
    family = {probe_pid}
    parent = read_stat(probe_pid)
    while parent is not None and parent.ppid not in family and parent.ppid > 0:
        family.add(parent.ppid)
        parent = read_stat(parent.ppid)
    below = {probe_pid}
    while below:
        below = {stat.pid for stat in table.values() if stat.ppid in below}
        family |= below
    return family

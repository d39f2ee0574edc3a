"""What every Python process of a run is doing, by `py-spy dump`, where the host has it.

py-spy reads another process's memory: that needs root, or the same user and no restriction of ptrace
(/proc/sys/kernel/yama/ptrace_scope 0), and is safe while the process works. It is looked for beside the host's
`python` and in PATH.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from typing import Any, BinaryIO, Dict, Iterator, List, Optional

from remote_payload.host.children import Command, CommandFailed
from remote_payload.host.errors import HostError
from remote_payload.host.files import read_json
from remote_payload.host.layout import Layout, RunPaths, check_run_id
from remote_payload.host.liveness import Stat, read_readings
from remote_payload.host.members import find_members, read_environ, recorded
from remote_payload.host.protocol import check_record

DUMP_S = 20.0
"""For one process: py-spy reads symbols of libtorch once, which takes seconds from a cold disk."""

PROCESSES = 64
"""Dumped at most: eight ranks with their data loaders."""

TEXT_BYTES = 1 << 16

_RANK = re.compile(r"(?:_TP|VllmWorker-|Worker_)(\d+)")
_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)*)?$")


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `stacks`: {"workdir", "run_id"}; answers {"processes": [record]} as `dump` yields them.

    Raises HostError if there is no such run, it has ended, there is no py-spy, or no Python process of it.
    """
    check_record(request, {"workdir": str, "run_id": str}, "stacks request")
    paths = Layout(request["workdir"]).run(check_run_id(request["run_id"]))
    plan = read_json(paths.plan)
    if plan is None:
        raise HostError("no-such-run", "this host has no run %s" % request["run_id"], "", "ctl ps lists its runs")
    if read_json(paths.result) is not None:
        run_id = plan["run_id"]
        fix = "see how it ended with `ctl summary %s`" % run_id
        raise HostError("run-ended", "run %s has ended" % run_id, "stacks are those of living processes", fix)
    spy = find_spy(plan["host"]["python"])
    if spy is None:
        raise HostError(
            "no-py-spy",
            "there is no py-spy on the host",
            "it is looked for beside %s and in PATH" % plan["host"]["python"],
            "on the host: `%s -m pip install py-spy`" % plan["host"]["python"],
        )
    processes = list(dump(spy, members_of(paths), paths))
    if not processes:
        raise HostError(
            "no-python", "run %s has no living Python process" % plan["run_id"], "", "see `ctl ps` for its state"
        )
    out.write(json.dumps({"processes": processes}).encode() + b"\n")
    return 0


def find_spy(python: str) -> Optional[str]:
    """Return the path of py-spy, None if the host has none."""
    beside = os.path.join(os.path.dirname(python), "py-spy")
    return beside if os.path.isabs(python) and os.access(beside, os.X_OK) else shutil.which("py-spy")


def members_of(paths: RunPaths) -> List[Stat]:
    """Return the living members of a run, as its supervisor would find them."""
    run = read_json(paths.run) or {}
    supervisor = run.get("supervisor") or {}
    known = recorded(paths.tree) if supervisor.get("boot") == read_readings().boot else set()
    return find_members(paths.folder, known, cgroup=run.get("cgroup"))


def dump(spy: str, members: List[Stat], paths: RunPaths) -> Iterator[Dict[str, Any]]:
    """Yield {"pid", "rank", "process", "stacks"} of each Python process, or "error" in place of its stacks.

    Ranks come first, in their order.
    """
    told = _ranks_told(paths)
    found = [(told.get(member.pid, rank_of(member)), member) for member in members if _is_python(member.pid)]
    found.sort(key=lambda pair: (pair[0] is None, pair[0] or 0, pair[1].pid))
    for rank, member in found[:PROCESSES]:
        record: Dict[str, Any] = {"pid": member.pid, "rank": rank, "process": member.comm}
        try:
            record["stacks"] = Command().run([spy, "dump", "--pid", str(member.pid)], DUMP_S)[:TEXT_BYTES]
        except CommandFailed as error:
            record["error"] = str(error)
        yield record


def rank_of(member: Stat) -> Optional[int]:
    """Return a process's rank from its environment, else from the name that vLLM gives it."""
    environ = read_environ(member.pid) or {}
    for name in ("RANK", "LOCAL_RANK"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    match = _RANK.search(_title(member.pid))
    return int(match[1]) if match else None


def text_of(record: Dict[str, Any]) -> str:
    """Return one process's stacks for a person, headed by whose they are."""
    who = "rank %d" % record["rank"] if record["rank"] is not None else record["process"]
    return "stacks of %s (pid %d):\n%s" % (who, record["pid"], record.get("stacks") or record.get("error"))


def _ranks_told(paths: RunPaths) -> Dict[int, int]:
    """Return the ranks by pid that hooked processes say in their fault files; forked ranks have no other sign."""
    ranks: Dict[int, int] = {}
    for path in glob.glob(os.path.join(glob.escape(paths.faults), "*.txt")):
        try:
            with open(path, "rb") as file:
                record = json.loads(file.readline(4096))
        except (FileNotFoundError, ValueError):
            continue  # just ended, or just started
        if isinstance(record.get("rank"), int):
            ranks[record["pid"]] = record["rank"]
    return ranks


def _title(pid: int) -> str:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return file.read(4096).replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _is_python(pid: int) -> bool:
    try:
        return _PYTHON.match(os.path.basename(os.readlink("/proc/%d/exe" % pid))) is not None
    except OSError:
        return False

"""What is on a host that is not ours to clear up, and whose it is: said beside the plan of what is ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from controller.core.finding import age, section, size

COMMAND_SHOWN = 80


def not_ours(report: Mapping[str, Any], actions: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return {"what", "whose"} of processes on GPUs or of vLLM, shared memory and outputs that no action touches."""
    pids = {process["pid"] for action in actions for process in action["processes"]}
    files = {path for action in actions for path in action["files"]}
    folders = {action["path"] for action in actions if action["path"]}
    return [*_processes(report, pids), *_files(report, files), *_folders(report, folders)]


def _processes(report: Mapping[str, Any], ours: set[int]) -> Iterable[dict[str, str]]:
    found = section(report, "processes") or {"compute": None, "vllm": []}
    seen = set(ours)
    for record in [*(found["compute"] or ()), *found["vllm"]]:
        if record["pid"] in seen:
            continue
        seen.add(record["pid"])
        what = f"process {record['pid']}, {age(record['age_s'])} old: {record['command'][:COMMAND_SHOWN]}"
        yield {"what": what, "whose": _whose(record, report)}


def _whose(record: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    if record["owner"] is None:
        return "nobody that can be seen from here (a container or another PID namespace)"
    if record["run_id"]:
        return f"run {record['run_id']} of {record['owner']}, which is not known to be dead"
    if record["uid"] == report["uid"]:
        return f"{record['owner']} (you), but of no run of ctl"
    return str(record["owner"])


def _files(report: Mapping[str, Any], ours: set[str]) -> Iterable[dict[str, str]]:
    shm = (section(report, "memory") or {}).get("shm") or {}
    for each in shm.get("leftovers", {}).get("examples", ()):
        path = f"/dev/shm/{each['name']}"  # noqa: S108 - named, never opened
        if path not in ours and each.get("used_by") is None:
            mine = " (you), but of no dead run of ctl" if each.get("uid") == report["uid"] else ""
            yield {"what": f"{path}, {size(each['bytes'])}", "whose": f"{each['owner']}{mine}"}


def _folders(report: Mapping[str, Any], ours: set[str]) -> Iterable[dict[str, str]]:
    for listing in (section(report, "outputs") or {"outputs": []})["outputs"]:
        if not listing["entries"] or listing["path"] in ours:
            continue
        what = f"{listing['path']}, {listing['entries']:,} entries"
        if listing["foreign"]:
            yield {"what": what, "whose": "nobody: it has no marker of ctl"}
        elif listing["marker"] and listing["marker"].get("owner") != report["user"]:
            yield {"what": what, "whose": str(listing["marker"].get("owner"))}

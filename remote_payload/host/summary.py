"""summary.json: an envelope that is the same for every kind of run, and what the run's verify step found."""

from __future__ import annotations

import glob
import os
import platform
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from remote_payload.host.files import read_json, read_lines
from remote_payload.host.layout import RunPaths
from remote_payload.host.pause import paused_seconds
from remote_payload.host.protocol import WIRE, EndReason, Result, RunState

SCHEMA_VERSION = 1

PHASE_TIMINGS = {
    "data": "data_s", "load": "load_s", "probe": "probe_s", "canary": "canary_s", "canary-end": "canary_s",
    "capture": "extract_s", "drain": "extract_s",
}  # fmt: skip
"""Phases of the driver whose durations add up to a timing; `verify.json` knows better where it has one."""

STEP_TIMINGS = {
    "rehearse": "rehearse_s", "convert": "convert_s", "fetch": "fetch_s", "install": "install_s",
    "verify": "verify_s",
}  # fmt: skip
"""Steps that are the work itself, or a good part of it; that of an extraction is told by its phases."""

FIXES = {
    EndReason.JOB_FAILED: "read the end of its log with `ctl logs {run_id} --tail 50`",
    EndReason.JOB_SIGNALED: "look for an out-of-memory kill in the host's kernel log",
    EndReason.VERIFY_FAILED: "compare what is missing with the log, `ctl logs {run_id}`; --stale resume keeps the "
    "files that are there",
    EndReason.LIMIT_EXCEEDED: "raise the limit in the playbook if the job was still working",
    EndReason.LEASE_BUSY: "wait for that run, or stop it",
    EndReason.LEASE_DIRTY: "have the run's owner stop it with ctl stop, then launch again",
    EndReason.RECHECK_FAILED: "free the GPUs, then launch again",
    EndReason.CLEAR_CHANGED: "run preflight again and look at the folder",
    EndReason.CLEAR_FAILED: "remove the obstacle by hand, then launch again",
    EndReason.REHEARSAL_FAILED: 'mend what the rehearsal found; rehearse = "never" goes on without it',
    EndReason.SUPERVISOR_FAILED: "read supervisor.log in the run folder",
}


PRINTED_NOTHING = "try the command by hand on the host: the job has printed nothing"
"""Instead of a fix that leads to a log; a program that could not be started has none."""


def build_summary(paths: RunPaths, plan: Dict[str, Any], result: Result) -> Dict[str, Any]:
    """Return the summary of a run that ends with `result`.

    Everything of verify.json is merged in; its `timings` and `versions` are added to ours, its `problems` follow the
    exceptions. A verify.json that cannot be read becomes a problem itself. Of an extraction that came to no verify
    step `samples` is what its ledgers say.
    """
    events = _read_events(paths)
    reason = EndReason(result["end_reason"])
    # A command may survive a process that failed, and say so by its exit code; an extraction never does.
    outlived = reason is EndReason.SUCCEEDED and plan["job"]["kind"] == "command"
    verify, problems = _verified(paths, events, [] if outlived else fold_exceptions(events))
    if reason not in (EndReason.SUCCEEDED, EndReason.STOPPED, EndReason.CANCELLED):
        extracting = reason is not EndReason.VERIFY_FAILED or plan["job"]["kind"] in ("extract", "convert")
        fix = (
            FIXES[reason].format(run_id=plan["run_id"])
            if extracting
            else "see what the verify step found, above; mend it and run again"
        )
        if reason is EndReason.JOB_FAILED and not result["log_bytes"]:
            fix = PRINTED_NOTHING
        problems.append({"code": reason.value, "what": result["message"], "why": "", "fix": fix})
    if result["gpus_clean"] is False:
        problems.append(
            {
                "code": "not-clean",
                "what": "the run left something behind on the host",
                "why": "; ".join(str(item) for item in result["leftovers"]),
                "fix": "have the processes ended by an administrator; the lease stays dirty until then",
            }
        )
    return _document(
        paths,
        plan,
        events,
        verify,
        problems,
        timings={"host_s": result["duration_s"]},
        versions={"wire": WIRE, "bootstrap_python": platform.python_version()},
        ending={
            "state": RunState.FINISHED.value,
            "end_reason": reason.value,
            "gpus_clean": result["gpus_clean"],
        },
    )


def build_lost_summary(paths: RunPaths, plan: Dict[str, Any], run: Dict[str, Any]) -> Dict[str, Any]:
    """Return the summary of a run that is lost, from its folder or a copy of that; `run` is its run.json.

    Nobody saw its end: `end_reason` is None, there is no `host_s`, and `last_seen` (UTC, None if it never said
    anything) is the time of its last event.
    """
    # In a copy there are also those of whoever watched, by another clock and after the end.
    events = [event for event in _read_events(paths) if event.get("writer") != "controller"]
    verify, problems = _verified(paths, events, fold_exceptions(events))
    times = _times(events)
    seen = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(times))) if times else None
    return _document(
        paths,
        plan,
        events,
        verify,
        problems,
        timings={},
        versions={"wire": run.get("wire")},
        ending={"state": RunState.LOST.value, "end_reason": None, "last_seen": seen, "gpus_clean": "unknown"},
    )


def _verified(
    paths: RunPaths, events: List[Dict[str, Any]], problems: List[Dict[str, Any]]
) -> Tuple[Dict[str, Any], List[Dict[str, Any]]]:
    """Return verify.json without its problems, and all problems that are known, those given first."""
    for event in events:
        if event.get("type") == "problem":  # what a job found out itself; no traceback would say more
            problems.append({key: event.get(key, "") for key in ("code", "what", "why", "fix")})
    try:
        verify = read_json(paths.verify) or {}
    except (OSError, ValueError) as error:
        verify = {}
        what = "verify.json cannot be read"
        problems.append({"code": "verify-unreadable", "what": what, "why": str(error), "fix": ""})
    return verify, problems + verify.pop("problems", [])


def _document(
    paths: RunPaths,
    plan: Dict[str, Any],
    events: List[Dict[str, Any]],
    verify: Dict[str, Any],
    problems: List[Dict[str, Any]],
    *,
    timings: Dict[str, Any],
    versions: Dict[str, Any],
    ending: Dict[str, Any],
) -> Dict[str, Any]:
    if plan["job"]["kind"] == "extract" and "samples" not in verify:
        counted = _count_samples(paths, events)
        verify = {**verify, "samples": counted} if counted else verify
    timings = {**plan["timings"], **_measured(events), **verify.pop("timings", {}), **timings}
    versions = {
        "ctl": plan.get("ctl_version"),
        "payload": plan["payload"],
        **versions,
        **verify.pop("versions", {}),
    }
    return {
        **verify,
        "schema_version": SCHEMA_VERSION,
        "kind": plan["job"]["kind"],
        "run_id": plan["run_id"],
        "outputs": [output["path"] for output in plan["job"].get("outputs", [])],
        **ending,
        "hosts": [plan["host"]["name"]],
        "timings": timings,
        "versions": versions,
        "allowed": plan.get("allowed", []),
        "problems": problems,
    }


def fold_exceptions(events: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return one problem for each distinct traceback among the `exception` events, the earliest first.

    `rank` is the rank that failed first with it (None: the driver), `ranks` all of them in that order.
    """
    folded: Dict[str, Dict[str, Any]] = {}
    for event in sorted((e for e in events if e.get("type") == "exception"), key=lambda e: e.get("t") or 0.0):
        traceback = str(event.get("traceback") or "")
        key = traceback or "%s: %s" % (event.get("exc_type"), event.get("message"))
        rank = event.get("rank")
        if key in folded:
            if rank not in folded[key]["ranks"]:
                folded[key]["ranks"].append(rank)
            continue
        folded[key] = {
            "code": "exception",
            # Some exceptions have no text at all; the type alone is then the message.
            "what": ": ".join(str(part) for part in (event.get("exc_type"), event.get("message")) if part),
            "why": "raised in %s" % event["where"] if event.get("where") else "",
            "fix": "",
            "traceback": traceback,
            "where": str(event.get("where") or ""),
            "writer": str(event.get("writer") or ""),
            "rank": rank,
            "ranks": [rank],
        }
    return list(folded.values())


def _read_events(paths: RunPaths) -> List[Dict[str, Any]]:
    files = sorted(glob.glob(os.path.join(glob.escape(paths.events), "*.jsonl")))
    return [event for path in files for event in read_lines(path)]


def _count_samples(paths: RunPaths, events: List[Dict[str, Any]]) -> Optional[Dict[str, int]]:
    """Return how far an extraction came, without a look at its files; None if it never knew of how many samples."""
    totals = [event["total"] for event in events if event.get("type") == "progress" and event.get("total")]
    if not totals:
        return None
    written, skipped = set(), set()
    for path in glob.glob(os.path.join(glob.escape(paths.ledger), "*.jsonl")):
        is_rank = os.path.basename(path).startswith("rank-")
        for line in read_lines(path):
            if is_rank or line.get("kept"):
                written.add(line.get("index"))
            elif "skipped" in line:
                skipped.add(line.get("index"))
    missing = max(0, totals[-1] - len(written))
    return {
        "expected": totals[-1], "written": len(written), "skipped": len(skipped), "failed": 0, "missing": missing,
    }  # fmt: skip


def _measured(events: List[Dict[str, Any]]) -> Dict[str, float]:
    """Return the timings that the events tell, also of what failed, or was cut off by the end."""
    timings: Dict[str, float] = {}
    for event, seconds in _durations(events):
        name = (PHASE_TIMINGS if event["type"] == "phase" else STEP_TIMINGS).get(str(event.get("name")))
        if name:
            timings[name] = round(timings.get(name, 0.0) + seconds, 3)
    if waited := paused_seconds(events):
        timings["paused_s"] = round(waited, 3)
    return {**timings, **_shutdown(events)}


def _durations(events: List[Dict[str, Any]]) -> Iterator[Tuple[Dict[str, Any], float]]:
    """Yield each phase and step with its seconds; of one that never came to its end those to the end of the work.

    That is when the stop began, else the run's end, else its last sign of life.
    """
    begun: Dict[Tuple[str, str, str], Dict[str, Any]] = {}
    for event in events:
        if event.get("type") not in ("phase", "step"):
            continue
        key = (str(event.get("writer")), str(event["type"]), str(event.get("name")))
        if event.get("status") == "started":
            begun[key] = event
        elif event.get("status") in ("done", "failed", "skipped"):
            started, seconds = begun.pop(key, None), event.get("seconds")
            if seconds is None and started is not None and len(_times([started, event])) == 2:
                seconds = max(0.0, event["t"] - started["t"])
            if event["status"] != "skipped" and isinstance(seconds, (int, float)):
                yield event, seconds
    stopping = _times([e for e in events if e.get("type") == "state" and e.get("state") == RunState.STOPPING.value])
    ends = stopping or _times([event for event in events if event.get("type") == "end"])
    over = min(ends) if ends else max(_times(events), default=0.0)
    for event in begun.values():
        if _times([event]):
            yield event, max(0.0, over - event["t"])


def _times(events: List[Dict[str, Any]]) -> List[float]:
    return [event["t"] for event in events if isinstance(event.get("t"), (int, float))]


def _shutdown(events: List[Dict[str, Any]]) -> Dict[str, float]:
    """Return how long the engine took to end: from the driver's last phase to the end of the step that it ran in."""
    done = [event for event in events if event.get("status") == "done" and isinstance(event.get("t"), (int, float))]
    phases = [event["t"] for event in done if event.get("type") == "phase" and event.get("writer") == "driver"]
    steps = [event["t"] for event in done if event.get("type") == "step" and phases and event["t"] >= max(phases)]
    return {"shutdown_s": round(min(steps) - max(phases), 3)} if steps else {}

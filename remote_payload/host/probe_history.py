"""The `history` section: how fast earlier runs of this model went on this host, and what its rehearsals took."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional

from remote_payload.host.files import read_json
from remote_payload.host.layout import RUN_ID, Layout
from remote_payload.host.ps import judge_run
from remote_payload.host.sections import Note

NEWEST = 60
"""Runs that are looked at, the newest first; a run's two documents are read in a millisecond."""

REHEARSALS = 10


def probe_history(note: Note, workdir: str, model: str) -> Dict[str, Any]:
    """Return {"runs": [record], "rehearsals": [{"run_id", "load_s", "first_steps_s"}]}, the newest first.

    A record is {run_id, tensor_parallel_size, accelerator, capture, boundaries, engine, format, store_dtype, samples,
    tokens_per_s, load_s, extract_s, rehearse_s, host_s} of a run that succeeded with the model folder `model`;
    `engine`, `format` and `store_dtype` are its plan's; `host_s` is from the lease to the end. Damaged records are
    left out.
    """
    layout = Layout(workdir)
    runs: List[Dict[str, Any]] = []
    same: List[str] = []
    names = os.listdir(layout.runs) if os.path.isdir(layout.runs) else []
    for run_id in sorted((name for name in names if RUN_ID.fullmatch(name)), reverse=True)[:NEWEST]:
        note(run_id)
        paths = layout.run(run_id)
        plan = _read(paths.plan) or {}
        spec = plan.get("extract") or {}
        if spec.get("model") != model:
            continue
        same.append(run_id)
        summary = _read(paths.summary) or {}
        if summary.get("end_reason") == "succeeded" and summary.get("tokens_per_s"):
            timings = summary.get("timings") or {}
            runs.append(
                {
                    "run_id": run_id,
                    "tensor_parallel_size": (spec.get("engine") or {}).get("tensor_parallel_size"),
                    "accelerator": (plan.get("host") or {}).get("accelerator"),
                    "capture": summary.get("capture_path"),
                    "boundaries": summary.get("boundaries"),
                    "engine": spec.get("engine"),
                    "format": spec.get("format"),
                    "store_dtype": spec.get("store_dtype"),
                    "samples": (summary.get("samples") or {}).get("written"),
                    "tokens_per_s": summary["tokens_per_s"],
                    "load_s": timings.get("load_s"),
                    "extract_s": timings.get("extract_s"),
                    "rehearse_s": timings.get("rehearse_s"),
                    "host_s": (_read(paths.result) or {}).get("duration_s"),
                }
            )
    return {"runs": runs, "rehearsals": _rehearsals(os.path.join(workdir, "rehearsals"), same)}


def run_of(workdir: str, marker: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Return {"run_id", "state", "end_reason", "written", "expected"} of the run that marked an output folder.

    None without a marker, or where this workdir has no such run. `written` and `expected` count samples; null where
    the run left no summary.
    """
    run_id = str((marker or {}).get("run_id"))
    if not RUN_ID.fullmatch(run_id) or not os.path.isdir(Layout(workdir).run(run_id).folder):
        return None
    paths = Layout(workdir).run(run_id)
    try:
        standing = judge_run(paths)
    except (OSError, ValueError, KeyError):  # damaged records: the folder is there, and nothing can be said of it
        return {"run_id": run_id, "state": "lost", "end_reason": None, "written": None, "expected": None}
    samples = (_read(paths.summary) or {}).get("samples") or {}
    return {
        "run_id": run_id,
        "state": standing.state.value,
        "end_reason": standing.end_reason,
        "written": samples.get("written"),
        "expected": samples.get("expected"),
    }


def _rehearsals(folder: str, runs: List[str]) -> List[Dict[str, Any]]:
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        record = _read(os.path.join(folder, name)) or {}
        if record.get("run_id") in runs:
            found.append({key: record.get(key) for key in ("run_id", "load_s", "first_steps_s")})
    return sorted(found, key=lambda record: str(record["run_id"]), reverse=True)[:REHEARSALS]


def _read(path: str) -> Optional[Dict[str, Any]]:
    try:
        document = read_json(path)
    except (OSError, ValueError):  # one damaged folder must not hide the others
        return None
    return document if isinstance(document, dict) else None

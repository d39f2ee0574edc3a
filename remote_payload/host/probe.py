"""One look at a host before a run, as one JSON document. It starts no GPU work and deletes nothing.

Whatever hangs or fails costs its own section only; `controller.core.checks` judges the report.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from typing import Any, BinaryIO, Dict, List, Optional

from remote_payload.host.capability import probe_capability
from remote_payload.host.errors import ProtocolError
from remote_payload.host.lease import lease_folder, list_leases
from remote_payload.host.listing import scan
from remote_payload.host.liveness import read_readings, user_name
from remote_payload.host.probe_gpus import probe_cpu, probe_gpus
from remote_payload.host.probe_inputs import probe_data, probe_model
from remote_payload.host.probe_machine import probe_disk, probe_environment, probe_memory
from remote_payload.host.probe_processes import probe_processes
from remote_payload.host.probe_programs import probe_programs
from remote_payload.host.protocol import WIRE, Accelerator, check_record
from remote_payload.host.sections import Note, Results, Section, run_sections

DEADLINES_S = {
    "gpus": 20.0,  # without persistence mode the driver initialises each GPU first
    "processes": 10.0,
    "memory": 5.0,
    "disk": 10.0,
    "model": 20.0,  # a header of each shard, from a cold network disk
    "data": 20.0,
    "environment": 30.0,  # a cold start of Python from a network disk
    "capability": 10.0,  # a second of reading, after the environment has said where vLLM lies
    "outputs": 30.0,  # a million entries take about 10 s
    "lease": 5.0,
    "programs": 5.0,
}
"""Of each section, seconds; a healthy host needs a fraction of them."""

GPUS_SHARE = 0.6
"""Of the whole deadline, at most, for the section that another waits for."""

ENDING_S = 1.0
"""Kept back of the whole deadline, to stop what hangs and to print the report."""

MIN_DEADLINE_S = 2.0


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Write {"wire", "boot_id", "hostname", "user", "uid", "python", "sections": {name: result}} and return 0.

    A result is {"ok", "seconds", "error" or "data"}; see the `probe_*` modules for the data. Sections that the
    request gives no reason for (no model, no outputs) are absent. Ends within `deadline_s` seconds. Raises
    ProtocolError for a request that is not of this form.
    """
    check_record(
        request,
        {"workdir": str, "accelerator": str, "python": str, "outputs": list, "deadline_s": (int, float)},
        "probe request",
    )
    if request["deadline_s"] < MIN_DEADLINE_S:
        raise ProtocolError("probe request has deadline_s below %g" % MIN_DEADLINE_S)
    for number, output in enumerate(request["outputs"]):
        check_record(output, {"path": str, "root": str, "stale": str, "adopt": bool}, "outputs[%d]" % number)
    report = {
        "wire": WIRE,
        "boot_id": read_readings().boot,
        "hostname": socket.gethostname(),
        "user": user_name(os.getuid()),
        "uid": os.getuid(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "sections": run_sections(plan_sections(request), request["deadline_s"] - ENDING_S),
    }
    out.write(json.dumps(report).encode() + b"\n")
    return 0


def plan_sections(request: Dict[str, Any]) -> List[Section]:
    """Return the sections that a checked request asks for."""
    outputs: List[Dict[str, Any]] = request["outputs"]
    python: str = request["python"]
    model: Optional[str] = request.get("model")
    data: Optional[str] = request.get("data")
    cuda = request["accelerator"] == Accelerator.CUDA.value
    probe_pid = os.getpid()

    def processes(note: Note, results: Results) -> Dict[str, Any]:
        # After the GPUs, so that only one nvidia-smi is ever under way: a hung driver is not asked twice.
        found = results["gpus"].get("data", {})
        return probe_processes(note, found.get("apps") if cuda else [], probe_pid, python)

    def lease(note: Note, results: Results) -> Dict[str, Any]:
        folder = lease_folder(request.get("lease_dir"))
        note(folder)
        return {"folder": folder, "leases": list_leases(folder)}

    def capability(note: Note, results: Results) -> Dict[str, Any]:
        package = results["environment"].get("data", {}).get("vllm_path")
        return probe_capability(note, package, str(model), request["accelerator"])

    runs = {
        "gpus": lambda note, results: probe_gpus(note) if cuda else probe_cpu(note),
        "processes": processes,
        "memory": lambda note, results: probe_memory(note),
        "disk": lambda note, results: probe_disk(note, request["workdir"], [output["root"] for output in outputs]),
        "environment": lambda note, results: probe_environment(note, python),
        "outputs": lambda note, results: {"outputs": [_output(note, output) for output in outputs]},
        "lease": lease,
    }
    if request.get("programs"):
        runs["programs"] = lambda note, results: probe_programs(note, request["programs"])
    if model is not None:
        runs["model"] = lambda note, results: probe_model(note, model)
        runs["capability"] = capability
    if data is not None:
        runs["data"] = lambda note, results: probe_data(note, data)
    deadlines = {**DEADLINES_S, "gpus": min(DEADLINES_S["gpus"], GPUS_SHARE * request["deadline_s"])}
    after = {"processes": "gpus", "capability": "environment"}
    return [Section(name, deadlines[name], runs[name], after.get(name)) for name in deadlines if name in runs]


def _output(note: Note, output: Dict[str, Any]) -> Dict[str, Any]:
    note(output["path"])
    asked = {key: output[key] for key in ("path", "root", "stale", "adopt")}
    return {**asked, **scan(output["path"], output["root"])}

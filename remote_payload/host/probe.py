"""One look at a host before a run, as one JSON document. It deletes nothing, and computes only on GPUs that are free.

Whatever hangs or fails costs its own section only; `controller.core.checks` judges the report.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from typing import Any, BinaryIO, Callable, Dict, List, Optional

from remote_payload.host.broken import probe_broken
from remote_payload.host.capability import probe_capability
from remote_payload.host.envfile import read_env_file, with_python_first
from remote_payload.host.errors import HostError, ProtocolError
from remote_payload.host.lease import lease_folder, lease_folder_path, list_leases
from remote_payload.host.listing import scan
from remote_payload.host.liveness import boot_seconds, read_readings, user_name
from remote_payload.host.probe_data import probe_data
from remote_payload.host.probe_disk import probe_disk
from remote_payload.host.probe_functional import probe_functional
from remote_payload.host.probe_gpus import probe_cpu, probe_gpus
from remote_payload.host.probe_health import probe_health
from remote_payload.host.probe_history import probe_history, run_of
from remote_payload.host.probe_lengths import probe_lengths
from remote_payload.host.probe_login import probe_login
from remote_payload.host.probe_machine import probe_environment, probe_memory
from remote_payload.host.probe_model import probe_model
from remote_payload.host.probe_processes import probe_processes
from remote_payload.host.probe_programs import probe_programs
from remote_payload.host.probe_source import probe_source
from remote_payload.host.probe_toolchain import probe_toolchain
from remote_payload.host.protocol import WIRE, Accelerator, check_record
from remote_payload.host.sections import Note, Results, Section, run_sections
from remote_payload.host.trial_gpus import job_gpus, why_not_tried
from remote_payload.host.writers import is_spent

DEADLINES_S = {
    "gpus": 20.0,  # without persistence mode the driver initialises each GPU first
    "health": 40.0,  # three more questions of nvidia-smi, one after the other
    "processes": 10.0,
    "memory": 5.0,
    "disk": 10.0,
    "model": 20.0,  # a header of each shard, from a cold network disk
    "data": 20.0,
    "environment": 30.0,  # a cold start of Python from a network disk
    "toolchain": 15.0,
    "capability": 30.0,  # half a second of parsing; the source of vLLM may come from a cold network disk
    "lengths": 30.0,  # a start of the environment's Python with transformers, for chats
    "functional": 45.0,  # torch is imported by a process for each GPU, from a cold disk perhaps
    "outputs": 30.0,  # a million entries take about 10 s
    "lease": 5.0,
    "programs": 5.0,
    "login": 5.0,
    "history": 5.0,
    "source": 30.0,  # the names of a million samples, from a cold network disk
}
"""Of each section, seconds; a healthy host needs a fraction of them."""

GPUS_SHARE = 0.6
"""Of the whole deadline, at most, for the section that another waits for."""

ENDING_S = 1.0
"""Kept back of the whole deadline, to stop what hangs and to print the report."""

MIN_DEADLINE_S = 2.0


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Write {"wire", "boot_id", "boot_s", "hostname", "user", "uid", "python", "clock", "sections"} and return 0.

    `sections` maps a name to {"ok", "seconds", "error" or "data"}; see the `probe_*` modules for the data. Sections
    that the request gives no reason for (no model, no outputs) are absent. `clock` is this host's Unix time at the
    beginning and the end. Ends within `deadline_s` seconds. Raises ProtocolError for a request that is not of this
    form.
    """
    begun = time.time()
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
        "boot_s": round(boot_seconds(), 1),
        "hostname": socket.gethostname(),
        "user": user_name(os.getuid()),
        "uid": os.getuid(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "sections": run_sections(plan_sections(request), request["deadline_s"] - ENDING_S),
    }
    report["clock"] = {"begun": begun, "ended": time.time()}
    out.write(json.dumps(report).encode() + b"\n")
    return 0


def plan_sections(request: Dict[str, Any]) -> List[Section]:
    """Return the sections that a checked request asks for."""
    outputs: List[Dict[str, Any]] = request["outputs"]
    python: str = request["python"]
    model: Optional[str] = request.get("model")
    data: Optional[str] = request.get("data")
    spec: Dict[str, Any] = request.get("extract") or {}
    env: Dict[str, str] = request.get("env") or {}
    ranks: int = request.get("ranks") or 1
    cuda = request["accelerator"] == Accelerator.CUDA.value
    probe_pid = os.getpid()

    def processes(note: Note, results: Results) -> Dict[str, Any]:
        # After the GPUs, so that only one nvidia-smi is ever under way: a hung driver is not asked twice.
        found = _data(results, "gpus") or {}
        return probe_processes(note, found.get("apps") if cuda else [], probe_pid, python, request["workdir"])

    def health(note: Note, results: Results) -> Optional[Dict[str, Any]]:
        found = _data(results, "gpus")
        return probe_health(note) if found and found["present"] else None

    def lease(note: Note, results: Results) -> Dict[str, Any]:
        folder = lease_folder_path(request.get("lease_dir"))
        note(folder)
        try:
            return {"folder": lease_folder(folder), "leases": list_leases(folder), "error": None}
        except HostError as error:  # the run would be refused with it
            return {"folder": folder, "leases": [], "error": error.to_dict()}

    def capability(note: Note, results: Results) -> Dict[str, Any]:
        package = (_data(results, "environment") or {}).get("vllm_path")
        gpus = job_gpus(_data(results, "gpus"), env.get("CUDA_VISIBLE_DEVICES"), request.get("gpus", 0))
        compute = next((gpu["compute_cap"] for gpu in gpus if gpu["compute_cap"]), None)
        return probe_capability(note, package, str(model), request["accelerator"], compute)

    def lengths(note: Note, results: Results) -> Optional[Dict[str, Any]]:
        found = _data(results, "data")
        if not found or not found["bytes"] or not found["container"] or found["kind"] == "unknown":
            return None  # the section `data` says why
        usable = _data(results, "environment") or {}
        return probe_lengths(note, spec, found, python if usable.get("packages") else None, _environment(request))

    def functional(note: Note, results: Results) -> Dict[str, Any]:
        gpus = job_gpus(_data(results, "gpus"), env.get("CUDA_VISIBLE_DEVICES"), request.get("gpus", 0))[:ranks]
        why = why_not_tried(
            cuda, ranks, gpus, _data(results, "processes"), _data(results, "lease"), _data(results, "environment")
        )
        if why:
            return {"skipped": why}
        deadline_s = end - time.monotonic()
        return probe_functional(note, python, [gpu["uuid"] for gpu in gpus], ranks, _environment(request), deadline_s)

    runs: Dict[str, Callable[[Note, Results], Any]] = {
        "gpus": lambda note, results: probe_gpus(note) if cuda else probe_cpu(note),
        "processes": processes,
        "memory": lambda note, results: probe_memory(note),
        "disk": lambda note, results: probe_disk(note, request["workdir"], [output["root"] for output in outputs]),
        "environment": lambda note, results: probe_environment(note, python),
        "outputs": lambda note, results: {
            "outputs": [_output(note, output, request["workdir"], spec.get("shard")) for output in outputs]
        },
        "lease": lease,
        "login": lambda note, results: probe_login(note),
    }
    if request.get("source"):
        runs["source"] = lambda note, results: probe_source(note, request["source"])
    if request.get("programs"):
        runs["programs"] = lambda note, results: probe_programs(note, request["programs"])
    if cuda:
        runs["health"] = health
    if model is not None:
        runs["model"] = lambda note, results: probe_model(note, model)
        runs["capability"] = capability
        runs["history"] = lambda note, results: probe_history(note, request["workdir"], model)
        runs["toolchain"] = lambda note, results: probe_toolchain(note, python, env, request.get("env_file"))
    if data is not None:
        runs["data"] = lambda note, results: _with_broken(probe_data(note, data), spec)
    if data is not None and spec:
        runs["lengths"] = lengths
    if spec and (cuda or ranks > 1):  # one rank on the CPU has neither a context nor anybody to talk to
        runs["functional"] = functional
    deadlines = {**DEADLINES_S, "gpus": min(DEADLINES_S["gpus"], GPUS_SHARE * request["deadline_s"])}
    # Before its section's own deadline, so that the answer names each rank's step.
    end = time.monotonic() + min(deadlines["functional"], request["deadline_s"] - ENDING_S) - 1.0
    return [Section(name, deadlines[name], runs[name], AFTER.get(name, ())) for name in deadlines if name in runs]


AFTER = {
    "processes": ("gpus",),
    "health": ("gpus",),
    "capability": ("environment", "gpus"),
    "lengths": ("environment", "data"),
    "functional": ("gpus", "processes", "lease", "environment"),
}
"""What a section needs the results of."""


def _data(results: Results, name: str) -> Optional[Dict[str, Any]]:
    return results[name].get("data") if name in results else None


def _with_broken(found: Dict[str, Any], spec: Dict[str, Any]) -> Dict[str, Any]:
    if not spec or found["container"] != "jsonl" or not found["bytes"]:
        return found
    return {**found, "broken": probe_broken(found["path"], spec["data_kind"], spec["max_samples"])}


def _environment(request: Dict[str, Any]) -> Dict[str, str]:
    """Return what the job's environment has beside the login's: the host's file, then the plan; no secrets."""
    found: Dict[str, str] = {}
    if request.get("env_file"):
        try:
            found = read_env_file(request["env_file"])
        except HostError:
            found = {}  # the section `toolchain` says why
    found.update(request.get("env") or {})
    return with_python_first({"PATH": os.environ.get("PATH", os.defpath), **found}, request["python"])


def _output(note: Note, output: Dict[str, Any], workdir: str, shard: Optional[List[int]]) -> Dict[str, Any]:
    note(output["path"])
    asked = {key: output[key] for key in ("path", "root", "stale", "adopt")}
    number, shares = shard or (1, 1)
    listing = scan(output["path"], output["root"], (number, shares))
    spent = is_spent(workdir, output["path"], listing)
    return {**asked, **listing, "run": run_of(workdir, listing["marker"]), "spent": spent}

"""The `gpus` section: what nvidia-smi says, with every value that it cannot give as null."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any, Dict, List, Optional, Tuple

from remote_payload.host.sections import Note

MIB = 1 << 20

FIELDS = (
    ("index", "index", int),
    ("uuid", "uuid", str),
    ("name", "name", str),
    ("memory_used", "memory.used", MIB),
    ("memory_total", "memory.total", MIB),
    ("driver", "driver_version", str),
    ("utilization_percent", "utilization.gpu", int),
    ("temperature_c", "temperature.gpu", int),
    ("ecc_uncorrected", "ecc.errors.uncorrected.volatile.total", int),
    ("mig", "mig.mode.current", str),
    ("power_w", "power.draw", float),
    ("compute_cap", "compute_cap", str),
)
"""(name here, nvidia-smi's --query-gpu field, type or unit); memory becomes bytes, as everywhere on the wire."""

APP_FIELDS = ("pid", "gpu_uuid", "used_memory", "process_name")

QUERY_TIMEOUT_S = 18.0
"""Without persistence mode the driver initialises every GPU first: a second or two each."""

NO_DEVICES = "No devices were found"

_INVALID_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
_NOT_AVAILABLE = re.compile(r"\[.*\]|N/A|ERR!|")


def probe_gpus(note: Note) -> Dict[str, Any]:
    """Return {"present", "visible", "gpus": [by FIELDS], "apps": [{pid, gpu_uuid, memory_used, name}], "unparsed"}.

    `present` false: there is no nvidia-smi. `visible` is CUDA_VISIBLE_DEVICES of our own environment. `unparsed`
    holds the lines about GPUs that nvidia-smi cannot query. Raises RuntimeError with its message if it fails,
    subprocess.TimeoutExpired.
    """
    program = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None:
        return {"present": False, "visible": visible, "gpus": [], "apps": [], "unparsed": []}
    note("nvidia-smi --query-gpu")
    gpus, unparsed = parse_gpus(*_query_gpus(program))
    apps: List[Dict[str, Any]] = []
    if gpus:
        note("nvidia-smi --query-compute-apps")
        apps = parse_apps(_run([program, "--query-compute-apps=%s" % ",".join(APP_FIELDS), *_CSV]))
    return {"present": True, "visible": visible, "gpus": gpus, "apps": apps, "unparsed": unparsed}


def probe_cpu(note: Note) -> Dict[str, Any]:
    """Return {"cpus": usable by us, "load": [over 1, 5, 15 minutes]}, for a host whose accelerator is its CPU."""
    return {"cpus": len(os.sched_getaffinity(0)), "load": list(os.getloadavg())}


def parse_gpus(output: str, fields: List[str]) -> Tuple[List[Dict[str, Any]], List[str]]:
    """Turn the CSV of the queried `fields` into records of FIELDS; also return the lines that are no rows."""
    gpus, unparsed = [], []
    for line in output.splitlines():
        row = [value.strip() for value in line.split(",")]
        if len(row) == len(fields) and row[0].isdigit():
            values = {field: row[number] for number, field in enumerate(fields)}
            gpus.append({name: _value(values.get(field, ""), kind) for name, field, kind in FIELDS})
        elif line.strip() and line.strip() != NO_DEVICES:
            unparsed.append(line.strip())
    return gpus, unparsed


def parse_apps(output: str) -> List[Dict[str, Any]]:
    """Turn the CSV of APP_FIELDS into records. The process name comes last because it may hold commas."""
    apps = []
    for line in output.splitlines():
        row = [value.strip() for value in line.split(",", len(APP_FIELDS) - 1)]
        if len(row) == len(APP_FIELDS) and row[0].isdigit():
            pid, uuid, used, name = row
            apps.append(
                {"pid": int(pid), "gpu_uuid": uuid, "memory_used": _value(used, MIB), "name": _value(name, str)}
            )
    return apps


_CSV = ("--format=csv,noheader,nounits",)


def _query_gpus(program: str) -> Tuple[str, List[str]]:
    """Query FIELDS without those that this driver does not know; each failure names one."""
    fields = [field for _, field, _ in FIELDS]
    while True:
        try:
            return _run([program, "--query-gpu=%s" % ",".join(fields), *_CSV]), fields
        except RuntimeError as error:
            unknown = _INVALID_FIELD.search(str(error))
            if unknown is None or unknown.group(1) not in fields:
                raise
            fields.remove(unknown.group(1))


def _run(argv: List[str]) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=QUERY_TIMEOUT_S, check=False)
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0 and NO_DEVICES not in output:
        said = (output + done.stderr.decode("utf-8", "replace")).strip()
        raise RuntimeError("nvidia-smi ended with exit code %d: %s" % (done.returncode, said[:2000]))
    return output


def _value(text: str, kind: Any) -> Optional[Any]:
    if _NOT_AVAILABLE.fullmatch(text):
        return None
    try:
        return int(text) * MIB if kind is MIB else kind(text)
    except ValueError:
        return None

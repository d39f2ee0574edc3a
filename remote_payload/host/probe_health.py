"""The `health` section: what may end a run on GPUs that look idle, from `nvidia-smi -q -x` and the kernel's log.

It is a section of its own, after `gpus`, so that a driver that hangs in its longest answer does not hide the short
one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any, Dict, List, Optional
from xml.etree import ElementTree

from remote_payload.host.kernel_log import read_kernel_log
from remote_payload.host.sections import Note

QUERY_TIMEOUT_S = 15.0
"""Eight GPUs answer the whole query in about 2 s; without persistence mode each is initialised first."""

TOPOLOGY_TIMEOUT_S = 10.0

XIDS_KEPT = 50

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), ?(.*)")
_NUMBER = re.compile(r"-?\d+")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
"""nvidia-smi underlines the header of the matrix even where nobody can see it."""

NOT_THROTTLED = ("gpu_idle", "applications_clocks_setting", "sync_boost", "display_clocks_setting", "sw_power_cap")
"""Reasons for a lower clock that are no fault: idle, set so, or the power limit that every busy GPU reaches."""


def probe_health(note: Note) -> Dict[str, Any]:
    """Return {"cuda", "gpus": [see `parse_health`], "links": see `parse_topology`, "p2p", "xids"}.

    `cuda` is the newest CUDA version that the driver runs. `links` and `p2p` are null where nvidia-smi cannot tell.
    `xids`: {"source", "error", "found": [{"bus", "code", "text", "age_s"}]}, those since boot. Raises RuntimeError,
    subprocess.TimeoutExpired, ElementTree.ParseError.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"cuda": None, "gpus": [], "links": None, "p2p": None, "xids": _xids(note)}
    note("nvidia-smi -q -x")
    health = parse_health(_run([program, "-q", "-x"], QUERY_TIMEOUT_S))
    note("nvidia-smi topo")
    return {
        **health,
        "links": _topology([program, "topo", "-m"]),
        "p2p": _topology([program, "topo", "-p2p", "r"]),
        "xids": _xids(note),
    }


def parse_health(document: str) -> Dict[str, Any]:
    """Turn the XML of `nvidia-smi -q -x` into {"cuda", "gpus"}.

    A GPU is {uuid, bus, persistence, compute_mode, ecc, ecc_pending, ecc_uncorrected (since the driver was loaded),
    ecc_uncorrected_ever, rows_remapped, remap_pending, remap_failed, retire_pending, unrepairable, repair_pending,
    recovery (action that the driver asks for), throttled: [reason], mig, mig_pending, link_gen, link_gen_max,
    link_width, link_width_max}. What the driver does not say (N/A, or an element that it does not know) is null.
    """
    root = ElementTree.fromstring(document)  # noqa: S314 - the driver's own output, and expat expands no external entity
    return {"cuda": _text(root, "cuda_version"), "gpus": [_health(gpu) for gpu in root.findall("gpu")]}


def parse_topology(output: str) -> Optional[Dict[str, Dict[str, str]]]:
    """Turn the matrix of `nvidia-smi topo` into {"GPU0": {"GPU1": "NV18"}}; null if there is none in it."""
    matrix: Dict[str, Dict[str, str]] = {}
    columns: List[str] = []
    for line in output.splitlines():
        words = _ESCAPE.sub("", line).split()
        if not columns:
            columns = [word for word in words if re.fullmatch(r"GPU\d+", word)]
        elif words and words[0] in columns and words[0] not in matrix:
            row = dict(zip(columns, words[1:]))  # noqa: B905 - 3.9 has no strict; NICs and affinity follow
            matrix[words[0]] = {name: link for name, link in row.items() if link != "X"}
    return matrix or None


def parse_xids(lines: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return the last XIDS_KEPT records of the driver's errors among kernel messages ({"age_s", "text"})."""
    found = []
    for line in lines:
        match = _XID.search(line["text"])
        if match:
            bus, code, text = match.groups()
            found.append({"bus": bus.lower(), "code": int(code), "text": text.strip(), "age_s": line["age_s"]})
    return found[-XIDS_KEPT:]


def _xids(note: Note) -> Dict[str, Any]:
    log = read_kernel_log(note)
    return {"source": log.source, "error": log.error, "found": parse_xids(log.lines)}


def _health(gpu: ElementTree.Element) -> Dict[str, Any]:
    reasons = gpu.find("clocks_event_reasons")
    if reasons is None:
        reasons = gpu.find("clocks_throttle_reasons")  # before driver 535
    active = [
        re.sub(r"^clocks_(event|throttle)_reason_", "", reason.tag)
        for reason in (() if reasons is None else reasons)
        if (reason.text or "").strip() == "Active"
    ]
    return {
        "uuid": _text(gpu, "uuid"),
        "bus": gpu.get("id", "").lower(),
        "persistence": _flag(gpu, "persistence_mode"),
        "compute_mode": _text(gpu, "compute_mode"),
        "ecc": _flag(gpu, "ecc_mode/current_ecc"),
        "ecc_pending": _flag(gpu, "ecc_mode/pending_ecc"),
        "ecc_uncorrected": _sum(gpu, "ecc_errors/volatile", "uncorrect"),
        "ecc_uncorrected_ever": _sum(gpu, "ecc_errors/aggregate", "uncorrect"),
        "rows_remapped": _number(gpu, "remapped_rows/remapped_row_unc"),
        "remap_pending": _flag(gpu, "remapped_rows/remapped_row_pending"),
        "remap_failed": _flag(gpu, "remapped_rows/remapped_row_failure"),
        "retire_pending": _flag(gpu, "retired_pages/pending_retirement"),
        "unrepairable": _flag(gpu, "ecc_errors/unrepairable_memory"),
        "repair_pending": _either(gpu, "ecc_errors/channel_repair_pending", "ecc_errors/tpc_repair_pending"),
        "recovery": _text(gpu, "gpu_recovery_action"),
        "throttled": [reason for reason in active if reason not in NOT_THROTTLED],
        "mig": _flag(gpu, "mig_mode/current_mig"),
        "mig_pending": _flag(gpu, "mig_mode/pending_mig"),
        "link_gen": _number(gpu, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        "link_gen_max": _number(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        "link_width": _number(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        "link_width_max": _number(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
    }


def _text(place: ElementTree.Element, path: str) -> Optional[str]:
    found = (place.findtext(path) or "").strip()
    return None if found in ("", "N/A", "None", "[N/A]") else found


def _flag(place: ElementTree.Element, path: str) -> Optional[bool]:
    return {"Enabled": True, "Yes": True, "Disabled": False, "No": False}.get(_text(place, path) or "")


def _either(place: ElementTree.Element, *paths: str) -> Optional[bool]:
    known = [flag for flag in (_flag(place, path) for path in paths) if flag is not None]
    return any(known) if known else None


def _number(place: ElementTree.Element, path: str) -> Optional[int]:
    match = _NUMBER.match(_text(place, path) or "")
    return int(match.group()) if match else None


def _sum(place: ElementTree.Element, path: str, word: str) -> Optional[int]:
    """Add up the counters of a group whose names hold `word`; how they are split up differs by driver."""
    group = place.find(path)
    values = [_number(group, item.tag) for item in group if word in item.tag] if group is not None else []
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _topology(argv: List[str]) -> Optional[Dict[str, Dict[str, str]]]:
    try:
        return parse_topology(_run(argv, TOPOLOGY_TIMEOUT_S))
    except RuntimeError:  # a virtual machine, or an older nvidia-smi: the matrix is a help, not a condition
        return None


def _run(argv: List[str], timeout_s: float) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        said = (output + done.stderr.decode("utf-8", "replace")).strip()
        raise RuntimeError("nvidia-smi ended with exit code %d: %s" % (done.returncode, said[:2000]))
    return output

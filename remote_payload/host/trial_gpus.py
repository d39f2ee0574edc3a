"""Which GPUs the functional probe may touch: the job's own, and only while they are nobody's."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

MEMORY_LIMIT = 1 << 30
"""Bytes in use on a GPU that make it occupied: the same as at the supervisor's recheck under the lease."""


def job_gpus(found: Optional[Dict[str, Any]], visible: Optional[str], count: int) -> List[Dict[str, Any]]:
    """Return the GPUs of a report that the job will use: those CUDA_VISIBLE_DEVICES names, else the first `count`."""
    gpus: List[Dict[str, Any]] = (found or {}).get("gpus") or []
    if not visible:
        return gpus[:count]
    words = [word.strip() for word in visible.split(",")]
    # In the order of the words: a rank's number is its place among them.
    named = [
        gpu
        for word in words
        for gpu in gpus
        if word == str(gpu["index"]) or (word and not word.isdigit() and str(gpu["uuid"]).startswith(word))
    ]
    return list({gpu["uuid"]: gpu for gpu in named}.values())


def why_not_tried(
    cuda: bool,
    ranks: int,
    gpus: List[Dict[str, Any]],
    processes: Optional[Dict[str, Any]],
    leases: Optional[Dict[str, Any]],
    environment: Optional[Dict[str, Any]],
) -> Optional[str]:
    """Return why nothing is tried on these GPUs, None if they are free and known to be."""
    if environment is None or "torch" not in environment["packages"]:
        return "the environment has no torch"
    if leases is None:
        return "it is not known whether another run holds the lease"
    wanted = {gpu["uuid"] for gpu in gpus} if cuda else {"host"}
    for lease in leases["leases"]:
        if lease["resource"] in wanted and lease["state"] == "held" and lease.get("alive") != "dead":
            return "run %s holds the lease" % lease.get("run_id")
    if not cuda:
        return None
    if len(gpus) < ranks:
        return "%d ranks need more GPUs than the %d that are there" % (ranks, len(gpus))
    if processes is None or processes["compute"] is None:
        return "it is not known whether somebody computes on the GPUs"
    holders = [record["pid"] for record in processes["compute"] if record["gpu_uuid"] in wanted]
    if holders:
        return "process %d computes on them" % holders[0]
    full = [gpu["index"] for gpu in gpus if (gpu["memory_used"] or 0) > MEMORY_LIMIT]
    if full:
        return "memory of GPU %d is in use" % full[0]
    split = [gpu["index"] for gpu in gpus if gpu["mig"] == "Enabled"]
    return "GPU %d is split by MIG" % split[0] if split else None

"""Checks of GPUs that look idle and are not well: pending repairs, errors in the kernel's log, and their links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.checks_gpus import ranks, selected
from controller.core.finding import Finding, age, failed, passed, section, some, warned
from remote_payload.host.protocol import Plan

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 69})
"""Errors of NVIDIA's Xid catalogue that a program causes (bad access, its own end): the GPU is well afterwards."""

NO_LINK = frozenset({"CNS", "GNS", "TNS", "NS", "U"})
"""What `nvidia-smi topo -p2p` says of a pair without peer-to-peer access."""

EXAMPLES = 3


def check_health(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge repairs, throttling, modes, bus and Xid errors of the job's GPUs, then the links between them."""
    found, gpus = section(report, "health"), section(report, "gpus")
    if found is None or gpus is None:
        return
    chosen = {gpu["uuid"]: gpu["index"] for gpu in selected(gpus, plan)}
    mine = [(chosen[gpu["uuid"]], gpu) for gpu in found["gpus"] if gpu["uuid"] in chosen]
    problems = [
        *(problem for number, gpu in mine for problem in _check_gpu(number, gpu)),
        *_check_persistence(mine),
        *_check_xids(found["xids"], mine),
    ]
    yield from problems
    if mine and not problems:
        log = "no Xid since boot" if found["xids"]["source"] else "the kernel's log may not be read"
        yield passed("gpu-health", f"{len(mine)} GPUs without pending repairs or throttling, {log}")
    yield from _check_links(found, plan, list(chosen.values()))


def _check_gpu(number: int, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    label = f"GPU {number}"
    reset = f"on the host, with the GPU idle: `sudo nvidia-smi --gpu-reset -i {number}`"
    if gpu["remap_failed"] or gpu["unrepairable"]:
        yield failed(
            "gpu-memory-broken",
            f"{label} has memory that cannot be repaired",
            why="remapping its rows failed, so errors will come back",
            fix=f"have it replaced; the driver's record: `nvidia-smi -q -d ROW_REMAPPER,ECC -i {number}`",
        )
    waiting = [
        text
        for key, text in (
            ("remap_pending", "rows to be remapped"),
            ("retire_pending", "pages to be retired"),
            ("repair_pending", "a channel to be repaired"),
        )
        if gpu[key]
    ]
    if waiting:
        yield warned(
            "gpu-repair", f"{label} has {', '.join(waiting)}", why="this is done at its next reset", fix=reset
        )
    if gpu["recovery"]:
        yield failed(
            "gpu-recovery",
            f"{label} needs: {gpu['recovery']}",
            why="the driver says so, after an error",
            fix=reset if "reset" in gpu["recovery"].lower() else "reboot the host",
        )
    if gpu["throttled"]:
        yield warned(
            "gpu-throttled",
            f"{label} is slowed down: {some(gpu['throttled'])}",
            why="one slow GPU holds up all ranks",
            fix=f"look at cooling and power: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {number}`",
        )
    if gpu["mig_pending"] and not gpu["mig"]:
        yield warned(
            "gpu-mig-pending",
            f"{label} will be split by MIG at its next reset",
            fix=f"on the host: `sudo nvidia-smi -i {number} -mig 0`",
        )
    if gpu["compute_mode"] == "Prohibited":
        yield failed(
            "gpu-prohibited",
            f"{label} takes no compute process",
            why="its compute mode is Prohibited",
            fix=f"on the host: `sudo nvidia-smi -i {number} -c DEFAULT`",
        )
    if None not in (gpu["link_width"], gpu["link_width_max"]) and gpu["link_width"] < gpu["link_width_max"]:
        yield warned(
            "gpu-link",
            f"{label} has {gpu['link_width']} PCIe lanes of {gpu['link_width_max']}",
            why="it loads weights, and without NVLink exchanges results, more slowly than the others",
            fix=f"reseat the card or its riser; `nvidia-smi -q -d PCIE -i {number}`",
        )


def _check_persistence(gpus: list[tuple[int, Mapping[str, Any]]]) -> Iterator[Finding]:
    off = [str(number) for number, gpu in gpus if gpu["persistence"] is False]
    if off:
        yield warned(
            "gpu-persistence",
            f"persistence mode is off on GPU {some(off, 8)}",
            why="the driver is unloaded when nobody uses it: every start and every nvidia-smi takes seconds longer",
            fix="on the host: `sudo nvidia-smi -pm 1`",
        )


def _check_xids(xids: Mapping[str, Any], gpus: list[tuple[int, Mapping[str, Any]]]) -> Iterator[Finding]:
    for number, gpu in gpus:
        of_gpu = [xid for xid in xids["found"] if _same_bus(xid["bus"], gpu["bus"])]
        errors = [xid for xid in of_gpu if xid["code"] not in APPLICATION_XIDS]
        if errors:
            last = errors[-1]
            shown = some([f"Xid {xid['code']} {age(xid['age_s'])} ago" for xid in reversed(errors)], EXAMPLES)
            yield warned(
                "gpu-xid",
                f"GPU {number} had {len(errors)} driver errors since boot: {shown}",
                why=f"the last: {last['text'][:160]}",
                fix=f"if it was not reset since: `sudo nvidia-smi --gpu-reset -i {number}`, with the GPU idle",
            )


def _same_bus(short: str, whole: str) -> bool:
    """Compare `0000:41:00` of the kernel's log with `00000000:41:00.0` of nvidia-smi."""
    short, whole = short.partition(".")[0], whole.partition(".")[0]
    return bool(short) and short.split(":")[-2:] == whole.split(":")[-2:] and _domain(short) == _domain(whole)


def _domain(address: str) -> int:
    head = address.split(":")[0] if address.count(":") == 2 else "0"
    return int(head, 16)


def _check_links(found: Mapping[str, Any], plan: Plan, numbers: list[int]) -> Iterator[Finding]:
    if ranks(plan) < 2 or len(numbers) < 2:
        return
    names = {f"GPU{number}" for number in numbers}
    unlinked = sorted(
        f"{one}-{other} {state}"
        for one, row in (found["p2p"] or {}).items()
        for other, state in row.items()
        if {one, other} <= names and one < other and state in NO_LINK
    )
    links = describe_links(found["links"], names)
    if unlinked:
        yield warned(
            "gpu-p2p",
            f"{len(unlinked)} pairs of GPUs cannot reach each other's memory: {some(unlinked, EXAMPLES)}",
            why=f"NCCL goes through host memory then{'; links: ' + links if links else ''}",
            fix="nothing, if the trial of the all-reduce passes: it is only slower; see `nvidia-smi topo -p2p r`",
        )
    elif links:
        yield passed("gpu-links", f"links between the GPUs: {links}")


def describe_links(matrix: Mapping[str, Mapping[str, str]] | None, names: set[str] | None = None) -> str:
    """Return the kinds of link between GPUs, as `nvidia-smi topo -m` names them, with their pairs: `28 x NV18`."""
    kinds: dict[str, int] = {}
    for one, row in (matrix or {}).items():
        for other, link in row.items():
            if one < other and (names is None or {one, other} <= names):
                kinds[link] = kinds.get(link, 0) + 1
    return ", ".join(f"{count} x {link}" for link, count in sorted(kinds.items()))

"""Checks of what the host has room for: memory, shared memory, disks, and whether another run holds the lease."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.core.checks_gpus import ranks, selected
from controller.core.finding import Finding, age, failed, passed, section, size, some, warned
from remote_payload.host.protocol import Accelerator, Plan

SHM_NEEDED = 1 << 30
"""Bytes of /dev/shm that several ranks need to talk to each other; a container's default is 64 MiB."""

MEMORY_PER_RANK = 2 << 30
"""Bytes of host memory: Python and CUDA context of one worker (1.9 GB on an H200), beside the plan's `buffer_bytes`,
which a worker pins when it loads. Weights are mapped, not held."""

CPU_HEADROOM = 2 << 30
"""Bytes beside the weights when the CPU computes: activations, KV cache, the interpreter."""

WORKDIR_NEEDED = 1 << 30
"""Bytes: the log up to its default cap, events, ledgers and the payload."""

SYNC_SLOW_S = 2.0
"""Seconds; a local disk takes milliseconds, a healthy file server tens of them."""

INODES_SPARE = 10_000
"""Files beside the samples: logs, compile caches, whatever else the file system serves."""

DISK_UNKNOWN = 20 << 30
"""Bytes free below which a run of unknown size is warned about: a few hundred samples of a large model."""

FEW_FILES = 3
"""Names that fit into a line that somebody copies."""

NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"})


def check_memory(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge host memory and /dev/shm."""
    found = section(report, "memory")
    if found is None:
        return
    problems = [*_check_available(found, report, plan), *_check_shm(found["shm"], report, plan)]
    yield from problems
    if not problems:
        yield passed("memory", f"{size(found['available'])} of {size(found['total'])} available")


def check_disk(
    report: Mapping[str, Any], plan: Plan, bytes_expected: int | None, min_free_bytes: int | None
) -> Iterator[Finding]:
    """Judge the disks of the workdir and of each output: room, inodes, and whether they can be written."""
    found = section(report, "disk")
    if found is None:
        return
    workdir = plan["host"]["workdir"]
    disks = {record["path"]: record for record in found["paths"]}
    problems = [problem for record in disks.values() for problem in _check_writable(record)]
    space = disks.get(workdir)
    if space is not None and space["free"] is not None and space["free"] < WORKDIR_NEEDED:
        problems.append(_low(space, WORKDIR_NEEDED, "the log, events and results of the run go there"))
    if space is not None and space["fs_type"] in NETWORK_FILE_SYSTEMS:
        problems.append(
            warned(
                "disk-network",
                f"the workdir {workdir} is on {space['fs_type']}",
                why="locks and named pipes are unreliable on a network disk",
                fix="set `workdir` of this host in hosts.toml to a local disk",
            )
        )
    listings = (section(report, "outputs") or {"outputs": []})["outputs"]
    for listing in listings:
        disk = disks.get(listing["root"])
        if disk is not None and disk["free"] is not None:
            problems.extend(_check_room(listing, disk, report, plan, bytes_expected, min_free_bytes))
    yield from problems
    if not problems:
        free = (f"{record['path']}: {size(record['free'])} free ({record['fs_type']})" for record in disks.values())
        yield passed("disk", "; ".join(free))


def check_lease(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Say who holds the job's GPUs, or the host where there are none."""
    found = section(report, "lease")
    if found is None:
        return
    if error := found.get("error"):
        yield failed("lease-folder", error["what"], why=error["why"], fix=error["fix"])
        return
    gpus = section(report, "gpus")
    wanted = (
        {"host"}
        if plan["host"]["accelerator"] == Accelerator.CPU
        else {gpu["uuid"] for gpu in selected(gpus or {}, plan)}
    )
    ours = [lease for lease in found["leases"] if lease["resource"] in wanted or gpus is None]
    seen: set[tuple[str, object]] = set()
    for lease in ours:
        run = str(lease.get("run_id"))
        if (run, lease.get("workdir")) in seen:
            continue  # one run holds a lease for each of its GPUs
        seen.add((run, lease.get("workdir")))
        who = f"run {run} of {lease.get('user')}"
        same_user = lease.get("user") == report.get("user")
        elsewhere = lease.get("workdir") if lease.get("workdir") != plan["host"]["workdir"] else None
        is_ours = same_user and elsewhere is None
        if same_user and elsewhere:  # an account that several people use
            who += f", your account, from another workdir ({elsewhere})"
        if lease["state"] == "held" and lease.get("alive") != "dead":
            yield failed(
                "lease-busy",
                f"{who} holds the lease",
                why=f"since {lease.get('since')}; {lease.get('evidence')}",
                fix=("nothing, or " if is_queued(plan) else "queue behind it with `--wait`, or ")
                + _who_ends(run, lease, is_ours=is_ours, same_user=same_user),
            )
        else:
            yield warned(
                "lease-dirty",
                f"{who} ended without giving its lease back",
                why=str(lease.get("evidence")),
                fix=f"`ctl stop {run}` {_whose_stop(is_ours=is_ours, same_user=same_user)} it up; "
                "else the next run must first prove that nothing of it lives",
            )
    if not ours:
        yield passed("lease", "no other run holds the lease")


def is_queued(plan: Plan) -> bool:
    """Whether the run is to wait for its turn on the host (`--wait`)."""
    return bool(plan["job"]["limits"].get("wait_for_lease"))


def _who_ends(run: str, lease: Mapping[str, Any], *, is_ours: bool, same_user: bool) -> str:
    if is_ours:
        return f"end it with `ctl stop {run}`"
    if same_user:
        return f"ask who uses {lease.get('user')} too: it can only be stopped from its own workdir"
    return f"ask {lease.get('user')} to end it"


def _whose_stop(*, is_ours: bool, same_user: bool) -> str:
    return "clears" if is_ours else "from that workdir clears" if same_user else "of that user clears"


def _check_available(found: Mapping[str, Any], report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    if plan["extract"] is None:
        return
    if plan["host"]["accelerator"] == Accelerator.CPU:
        needed = (section(report, "model") or {"total_bytes": 0})["total_bytes"] + CPU_HEADROOM
        reason = "the weights are held in it"
    else:
        # One piece of pinned memory, which torch's allocator rounds up to a power of two.
        buffers = 1 << (plan["extract"]["buffer_bytes"] - 1).bit_length()
        needed = ranks(plan) * (MEMORY_PER_RANK + buffers)
        reason = f"{ranks(plan)} workers need it beside the GPUs, {size(buffers)} each for `buffer_bytes`"
    if found["available"] < needed:
        yield warned(
            "memory-low",
            f"{size(found['available'])} of host memory are available, about {size(needed)} are needed",
            why=reason,
            fix="see who holds it with `ps aux --sort=-rss | head` on the host",
        )


def _check_shm(shm: Mapping[str, Any] | None, report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    free = shm["free"] if shm else 0
    if ranks(plan) > 1 and free < SHM_NEEDED:
        yield failed(
            "shm-small",
            f"{size(free)} are free in /dev/shm, {ranks(plan)} ranks need {size(SHM_NEEDED)}",
            why="the ranks exchange tensors through it, and die with a bus error when it is full",
            fix="`sudo mount -o remount,size=16G /dev/shm`; for a container: `docker run --shm-size=16g`",
        )
    left: Mapping[str, Any] = shm["leftovers"] if shm else {"count": 0}
    processes = section(report, "processes")
    # Where not all processes can be looked into, a running vLLM is reason enough to leave its files in peace.
    may_be_used = processes is None or bool(processes["vllm"] or processes["compute"])
    unused = [
        each
        for each in left.get("examples", ())
        if each.get("used_by") is None and (each.get("seen") or not may_be_used)
    ]
    if unused:
        count = left["count"] - left.get("in_use", 0)
        kinds = [f"{kind}* {number}" for kind, number in left["kinds"].items()]
        owners = ", ".join(dict.fromkeys(each["owner"] for each in unused))
        seen = all(each.get("seen", False) for each in unused)
        oldest = age(max(each["age_s"] for each in unused))
        mine = [each["name"] for each in unused if each.get("uid") == report["uid"]]
        yield warned(
            "shm-leftovers",
            f"{count:,} files ({size(left['bytes'])}) in /dev/shm look left behind, the oldest {oldest} old",
            why=f"{some(kinds)}, of {owners}; "
            + ("no process has them open or mapped" if seen else "processes of others cannot be looked into"),
            fix=f"`ctl preflight --fix --host {shlex.quote(plan['host']['name'])}` sweeps what dead runs left"
            + (f"; {_how_to_remove(mine, count)}" if mine else f"; ask {unused[0]['owner']}"),
        )


def _how_to_remove(mine: Sequence[str], count: int) -> str:
    """Say how to remove one's own files: a few are named, of many it is said where to see them and what is in use."""
    if count > FEW_FILES:
        return "`rm` your unused ones: all `ls -l /dev/shm`, in use `fuser /dev/shm/*`"
    paths = " ".join(shlex.quote(f"/dev/shm/{name}") for name in mine)  # noqa: S108 - named, never opened
    return f"what is yours, on the host: `rm {paths}`"


def _check_writable(record: Mapping[str, Any]) -> Iterator[Finding]:
    trial = record.get("trial") or {}
    where = shlex.quote(record["nearest"] or record["path"])
    if trial.get("errno") == "EDQUOT":
        yield failed(
            "disk-quota",
            f"the quota of {record['path']} is used up",
            why=f"{record['nearest']}: {record['error']}, at the {trial['at']}",
            fix=f"on the host: `quota -s`; free some below {where}, or choose another output root",
        )
    elif trial.get("at") in ("sync", "close"):
        yield failed(
            "disk-close",
            f"what is written to {record['path']} does not arrive: {record['error']}",
            why=f"the error came at the {trial['at']}, as network disks ({record['fs_type']}) tell of it",
            fix=f"on the host: `df -h {where}`, `sudo dmesg | tail`; have the file server looked at",
        )
    elif record["error"] is not None:
        yield failed(
            "disk-not-writable",
            f"{record['path']} cannot be used",
            why=f"{record['nearest'] or record['path']}: {record['error']}",
            fix=f"on the host: `ls -ld {record['nearest'] or record['path']}`, `df -hi {record['path']}`",
        )
    elif trial.get("rename") is False:
        yield failed(
            "disk-rename",
            f"a file cannot be put in another's place on {record['path']} ({record['fs_type']})",
            why="a sample appears under its name only when it is whole, by a rename",
            fix="set `output_roots` of this host in hosts.toml to another file system",
        )
    elif trial.get("lock") is False:
        yield warned(
            "disk-lock",
            f"{record['path']} ({record['fs_type']}) grants a lock twice",
            why="nothing there keeps two writers apart; ctl's own locks lie in `lease_dir` and the workdir",
            fix="use a local disk for `workdir` and `lease_dir`; do not give one output to two runs",
        )
    elif (trial.get("sync_s") or 0.0) > SYNC_SLOW_S:
        yield warned(
            "disk-slow",
            f"a sync of 1 MiB on {record['path']} took {trial['sync_s']:.1f} s",
            why="each sample is synced before it counts",
            fix=f"see who writes there: `iostat -x 1`, `df -h {where}`",
        )
    quota = record.get("quota") or {}
    if quota.get("inodes_free") is not None and quota["inodes_free"] < INODES_SPARE:
        yield warned(
            "disk-quota-files",
            f"your quota on {record['path']} leaves {quota['inodes_free']:,} files",
            why="each sample is a file",
            fix="on the host: `quota -s`",
        )


def _check_room(
    listing: Mapping[str, Any],
    disk: Mapping[str, Any],
    report: Mapping[str, Any],
    plan: Plan,
    bytes_expected: int | None,
    min_free_bytes: int | None,
) -> Iterator[Finding]:
    will_go = listing["stale"] == "clear"
    quota = (disk.get("quota") or {}).get("free")
    free = min(disk["free"], disk["free"] if quota is None else quota) + (listing["bytes"] if will_go else 0)
    spare = min_free_bytes or 0
    if bytes_expected is not None and free < bytes_expected + spare:
        yield _low(disk, bytes_expected + spare, f"the samples take up to {size(bytes_expected)}", free, plan)
    elif free < spare:
        yield _low(disk, spare, "`min_free_bytes` in [preflight] asks for it", free, plan)
    elif bytes_expected is None and free < DISK_UNKNOWN:
        yield warned(
            "disk-low",
            f"{disk['path']} has {size(free)} free, and the size of the output is not known",
            fix="set `max_samples`, and `hidden` in [model], so that it can be computed",
        )
    inodes, samples = disk["inodes_free"], _samples(report, plan)
    if inodes is not None and inodes < samples + INODES_SPARE:
        yield failed(
            "disk-inodes",
            f"{disk['path']} has {inodes:,} inodes free, {samples:,} samples are one file each",
            fix=f"on the host: `df -i {disk['path']}`; delete small files or choose another output root",
        )


_ALLOWED = {
    "extract": "; or `--allow disk-low`: the run then pauses where the room ends, and goes on when some is freed",
    "command": "; or `--allow disk-low`: the command then meets the full disk itself",
}
"""By the kind of job, what else can be done, and what it means; the others have no `--allow`."""


def _low(
    disk: Mapping[str, Any], needed: int, why: str, free: int | None = None, plan: Plan | None = None
) -> Finding:
    """`plan` is for the disk of an output, which its job may write full."""
    more = "" if plan is None else _ALLOWED.get(plan["job"]["kind"], "")
    return failed(
        "disk-low",
        f"{disk['path']} has {size(disk['free'] if free is None else free)} free, {size(needed)} may be needed",
        why=why,
        fix=f"on the host: `du -xh --max-depth=2 {disk['nearest']} | sort -h`; free some"
        + (", or lower `max_samples`" if plan is None or plan["extract"] else "")
        + more,
    )


def _samples(report: Mapping[str, Any], plan: Plan) -> int:
    spec = plan["extract"]
    lines = (section(report, "data") or {"lines": None})["lines"]
    known = [count for count in (lines, spec["max_samples"] if spec else None) if count is not None]
    return min(known, default=0)

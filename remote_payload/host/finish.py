"""The end of a run, the same for the supervisor and for a `stop` that comes after the supervisor's death.

Order: members stopped, log drained, shared memory swept, GPUs proved free, lease released, summary, and last
result.json: whoever reads it may rely on all the rest.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from remote_payload.host import container
from remote_payload.host.cgroup import Cgroup
from remote_payload.host.files import read_json, sha256_of, write_json
from remote_payload.host.layout import RunPaths
from remote_payload.host.leftovers import Baseline, Clean, count_oom_kills, prove_clean, sweep_shm
from remote_payload.host.liveness import Stat, boot_seconds
from remote_payload.host.members import Key, StopReport, stop_members
from remote_payload.host.protocol import WIRE, EndReason, Result
from remote_payload.host.pump import PumpKeeper, close_log
from remote_payload.host.segments import LogFiles, read_gaps
from remote_payload.host.summary import build_summary

DRAIN_S = 10.0
"""The pipe holds 1 MiB at most; longer than this only a full or dead disk takes."""

DEFAULT_GRACE_S = 15.0
"""vLLM needs a few seconds to end its workers; Slurm gives 30, Kubernetes 30, Docker 10."""

RESERVE_BYTES = 1 << 20

BASELINE = "baseline.json"


class Ending(NamedTuple):
    """How a run ends, as far as its steps decide it."""

    end_reason: EndReason
    message: str
    step: Optional[str] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None


class Cleanup(NamedTuple):
    """What was done to the run's remains. `oom_kills`: of the job's own cgroup, None where there was none."""

    stopped: StopReport
    clean: Clean
    evidence: str
    leftovers: List[Dict[str, Any]]
    oom_kills: Optional[int] = None


def baseline_path(paths: RunPaths) -> str:
    return os.path.join(paths.folder, BASELINE)


def read_baseline(paths: RunPaths) -> Optional[Baseline]:
    """Return what was measured before the job, None if the run did not come that far."""
    record = read_json(baseline_path(paths))
    return Baseline(**record) if record else None


def reserve_space(paths: RunPaths) -> None:
    """Keep 1 MiB for result.json and summary.json, so that even a run that filled the disk can say how it ended."""
    with open(paths.reserve, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)


def clean_up(
    paths: RunPaths,
    *,
    find: Callable[[], List[Stat]],
    reap: Callable[[], None],
    known: Callable[[], "set[Key]"],
    grace_s: float,
    baseline: Optional[Baseline],
    started: float,
    pipe: Optional[int],
    keeper: PumpKeeper,
    cgroup: Optional[Cgroup],
    tell: Callable[[str], None] = lambda text: None,
) -> Cleanup:
    """End the members, drain the log, sweep shared memory, and prove the accelerator free.

    `started` is the Unix time of the run's start; `pipe` the log's FIFO, if there is one. `tell` gets sentences for
    people, of how far it is; none where no member was left to end.
    """
    stopped = stop_members(find, grace_s, reap, kill_all=cgroup.kill if cgroup else lambda: None, tell=tell)
    if stopped.killed:
        tell("looking whether GPUs, shared memory and processes are as before the run")
    leftovers = list(stopped.leftovers)
    hidden, unremoved = container.end(paths)
    if unremoved:
        leftovers.append({"path": paths.folder, "reason": unremoved})
    if pipe is not None:
        problem = close_log(paths, pipe, keeper, DRAIN_S)
        if problem:
            leftovers.append({"path": paths.pipe, "reason": problem})
    if baseline is not None:
        leftovers += sweep_shm(baseline.shm, started, survivors=[each["pid"] for each in stopped.leftovers])
    oom_kills = None
    if cgroup is not None:
        oom_kills = cgroup.oom_kills()
        problem = cgroup.remove()
        if problem:
            leftovers.append({"path": cgroup.path, "reason": problem})
    clean, evidence = prove_end(baseline, known(), len(stopped.leftovers), unremoved or hidden)
    return Cleanup(stopped=stopped, clean=clean, evidence=evidence, leftovers=leftovers, oom_kills=oom_kills)


def prove_end(
    baseline: Optional[Baseline], known: "set[Key]", survivors: int, container_doubt: Optional[str]
) -> Tuple[Clean, str]:
    """Return the verdict of `prove_clean`, "unknown" at best where `container_doubt` says what it cannot see."""
    clean, evidence = prove_clean(baseline, {pid for pid, _ in known}, survivors)
    if clean is True and container_doubt:
        return "unknown", container_doubt
    return clean, evidence


def write_result(
    paths: RunPaths,
    plan: Dict[str, Any],
    ending: Ending,
    *,
    clean: Clean,
    leftovers: List[Dict[str, Any]],
    boot_s: Optional[float],
    baseline: Optional[Baseline],
    killed: Sequence[Dict[str, Any]] = (),
    oom_kills: Optional[int] = None,
) -> Result:
    """Write summary.json, then result.json. Raises OSError.

    `boot_s` is when the run got its lease, by the clock since boot; None if it never did. `oom_kills` are those of
    the job's own cgroup.
    """
    log_bytes, log_sha256 = sha256_of(LogFiles(paths).segments())
    result = Result(
        wire=WIRE,
        run_id=plan["run_id"],
        end_reason=ending.end_reason.value,
        step=ending.step,
        exit_code=ending.exit_code,
        signal=ending.signal,
        oom_killed=oom_kills > 0 if oom_kills is not None else _oom_killed(baseline),
        message=ending.message,
        ended=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        duration_s=0.0 if boot_s is None else round(max(0.0, boot_seconds() - boot_s), 3),
        gpus_clean=clean,
        killed=list(killed),
        leftovers=leftovers,
        log_bytes=log_bytes,
        log_sha256=log_sha256,
        log_gap_bytes=sum(gap["bytes"] for gap in read_gaps(LogFiles(paths))),
    )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.reserve)
    try:
        write_json(paths.summary, build_summary(paths, plan, result))
    except Exception as error:  # noqa: BLE001 - reported in the result, which has to be written in any case
        traceback.print_exc()
        reason = "summary.json could not be written: %s: %s" % (type(error).__name__, error)
        result["leftovers"].append({"path": paths.summary, "reason": reason})
    write_json(paths.result, result)
    return result


def _oom_killed(baseline: Optional[Baseline]) -> Optional[bool]:
    now = count_oom_kills()
    if baseline is None or baseline.oom_kills is None or now is None:
        return None
    return now > baseline.oom_kills

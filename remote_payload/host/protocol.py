"""The wire: every word and record that the workstation and the host share.

Both sides import this module, `codes.py`, `framing.py` (how records and bytes travel), `layout.py` (where files lie)
and `layers.py`, so a change there changes both at once. They need Python 3.9 and nothing but the standard library,
because the host runs them under whatever `bootstrap_python` it has.

Compatibility: `WIRE` is written into every record. A controller reads its own wire and the one before, ignores
fields and events that it does not know, and can list, read and stop a run of any wire. A host only ever runs the
payload that started the run.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Dict, List, Optional, TypedDict, Union, cast

from remote_payload.host.errors import ProtocolError
from remote_payload.host.layout import check_run_id

WIRE = 1
"""Major version of the records below."""

WIRES_READ = (1,)
"""Wires this version can read: its own and the one before (there is none before 1)."""

# --------------------------------------------------------------------------------------------- words


class RunState(str, Enum):
    """What is known of a run, judged on the host from files and processes, never from the connection."""

    QUEUED = "queued"
    LAUNCHING = "launching"
    RUNNING = "running"
    ORPHANED = "orphaned"  # the job lives, its supervisor does not
    STOPPING = "stopping"
    FINISHED = "finished"  # result.json exists
    LOST = "lost"  # no result, and neither supervisor nor job lives (a reboot, a SIGKILL of both)


class EndReason(str, Enum):
    """Why a run ended. Separate from its state: `finished` says that it ended, this says how."""

    SUCCEEDED = "succeeded"
    JOB_FAILED = "job-failed"  # the job's process ended with a non-zero exit code
    JOB_SIGNALED = "job-signaled"  # the job's process was killed by a signal
    VERIFY_FAILED = "verify-failed"  # the job exited 0, yet what it promised is not there
    LIMIT_EXCEEDED = "limit-exceeded"  # load_timeout, silence_timeout or time limit
    STOPPED = "stopped"  # somebody asked for it
    CANCELLED = "cancelled"  # given up before the supervisor confirmed
    LEASE_BUSY = "lease-busy"  # another run holds the GPUs (or the host)
    LEASE_DIRTY = "lease-dirty"  # an earlier run ended unclean and the GPUs are not proved free
    RECHECK_FAILED = "recheck-failed"  # under the lease the GPUs were no longer free
    CLEAR_CHANGED = "clear-changed"  # the output folder is not what was shown and confirmed
    CLEAR_FAILED = "clear-failed"
    REHEARSAL_FAILED = "rehearsal-failed"  # the same job on a model cut from this one did not work
    SUPERVISOR_FAILED = "supervisor-failed"  # an error of ctl's own


REFUSED = frozenset(
    {
        EndReason.LEASE_BUSY,
        EndReason.LEASE_DIRTY,
        EndReason.RECHECK_FAILED,
        EndReason.CLEAR_CHANGED,
        EndReason.CLEAR_FAILED,
        EndReason.REHEARSAL_FAILED,
    }
)
"""Ends that happened before the job was started; the controller's exit code for them is 3."""


class Liveness(str, Enum):
    """The host's judgement about a process identity; see `ProcessIdentity`."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Stale(str, Enum):
    """What to do with files that an earlier run left in the output folder."""

    FAIL = "fail"
    CLEAR = "clear"
    QUARANTINE = "quarantine"
    RESUME = "resume"


class Accelerator(str, Enum):
    CUDA = "cuda"
    CPU = "cpu"


# ------------------------------------------------------------------------------------------- records


class ProcessIdentity(TypedDict):
    """A process, for all time. Two processes with equal identities are the same process.

    `pid` is as seen inside the PID namespace whose inode is `pidns`; `start_ticks` is field 22 of
    /proc/PID/stat (clock ticks since boot), which tells a reused pid from the original.
    """

    machine: str
    boot: str
    pidns: int
    pid: int
    start_ticks: int


class OwnedOutput(TypedDict):
    """A folder that the job writes and that `ctl` may clear."""

    path: str
    root: str  # the entry of output_roots that contains it
    stale: str  # a word of `Stale`
    adopt: bool  # the folder may be claimed although it holds foreign files without our marker
    digest: Optional[str]  # sha256 over the listing shown at preflight; None: the folder was absent or empty
    entries: int
    bytes: int


class Step(TypedDict, total=False):
    """One step of a job under the supervisor, run in the order of the plan.

    `kind` is `recheck`, `place`, `clear`, `exec` or `verify`; the last two run `argv`. `lease` and `release` are
    implied around all steps.
    """

    name: str
    kind: str
    argv: List[str]
    failure: str  # the EndReason of a failed exec step; default: job-failed


class Limits(TypedDict, total=False):
    """Durations in seconds, sizes in bytes; an absent or null limit does not apply."""

    load_timeout_s: Optional[float]  # from the job's start to its first `progress` event
    silence_timeout_s: Optional[float]  # without a byte of log or an event
    time_limit_s: Optional[float]
    stop_grace_s: float  # between TERM and KILL
    wait_for_lease: bool  # queue until the lease is free instead of being refused
    log_cap_bytes: int  # of all log segments together; beyond it segments of the middle become declared gaps
    output_bytes: Optional[int]  # of the owned outputs together, looked at every few seconds


class Container(TypedDict):
    """Where the program of an exec step runs instead of on the host itself; `host.container` makes the argv."""

    runtime: str  # "docker", "podman" or "apptainer"
    image: str
    options: List[str]  # further words of `run`, before the image
    mounts: List[str]  # HOST_PATH[:CONTAINER_PATH[:ro]], besides the run's own folders


class Watched(TypedDict, total=False):
    """Where a job says how far it is: in its output, or in a file of JSON lines."""

    patterns: List[str]  # regular expressions over a line of output; their named groups are fields of `progress`
    file: str  # absolute
    unit: str  # what is counted, in the plural


class Survey(TypedDict):
    """What the verify step of a command looks at; see `remote_payload.survey`."""

    paths: List[str]  # files, folders and globs, absolute
    files: List[str]  # globs that must each match a file
    sample_files: int  # of each group of equal files, looked at for NaN
    expect: Dict[str, Any]


class JobOptions(TypedDict, total=False):
    """What only commands ask for; plans of earlier payloads have none of it."""

    upload: str  # the hash of the tree that a `place` step copies into the run's `work` folder
    watched: Watched
    tracebacks: bool  # hook every Python process of the job; see `remote_payload.hook`
    container: Container
    survey: Survey


class Job(JobOptions):
    """All that supervisor, clear, watch and stop know; every kind of run is one of these."""

    kind: str  # "extract" or "command"
    name: str
    steps: List[Step]
    cwd: str
    env: Dict[str, str]  # plain values only
    secret_env: List[str]  # names; their values travel in the start request and are never written
    outputs: List[OwnedOutput]
    success: Dict[str, Any]  # {"exit_codes": [0]}
    limits: Limits


class HostRecord(TypedDict):
    """The host as the plan used it."""

    name: str
    address: str
    port: int  # 0: as the ssh configuration says
    user: str  # "": as the ssh configuration says
    workdir: str
    python: str
    bootstrap_python: str
    accelerator: str
    gpus: int
    lease_dir: Optional[str]
    env_file: Optional[str]  # of the host; what its jobs start with


class Plan(TypedDict):
    """plan.json: the whole intention of a run, without a secret in it."""

    wire: int
    run_id: str
    created: str  # ISO 8601, UTC
    ctl_version: str
    host: HostRecord
    playbook: Optional[str]
    payload: str  # sha256 of the payload's manifest
    job: Job
    extract: Optional[Dict[str, Any]]  # ExtractSpec for kind "extract"
    timings: Dict[str, float]  # push_s, preflight_s: known before launch
    allowed: List[str]  # codes of preflight's failures that somebody allowed by name


class ExtractChecks(TypedDict, total=False):
    """How an extraction proves itself; plans of earlier payloads have neither key."""

    canary: bool  # default True: stop the run if the captured states are not what they say
    rehearse: str  # "auto" (default: only for large models), "always", "fresh" (ignore the cache) or "never"


VALUE_ARGUMENTS = (
    "quantization", "quantization_config", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "attention_backend",
    "attention_config", "kernel_config", "moe_backend", "linear_backend", "model_impl", "disable_sliding_window",
    "hf_overrides", "rope_scaling", "rope_theta", "load_format", "seed",
)  # fmt: skip
"""vLLM engine arguments that change the values of states, as far as a plan sets them."""


class ExtractSpec(ExtractChecks):
    """What the extraction job needs to know. Boundary b = decoder layers completed (0 = embeddings, N = last)."""

    model: str
    revision: Optional[str]
    trust_remote_code: bool
    dtype: str
    data: str
    data_kind: str  # "auto", "tokens" or "chat": what a record is; the container is read from the contents
    max_samples: Optional[int]
    max_seq_len: int
    over_long: str  # "truncate" or "skip"
    shard: List[int]  # [number from 1, of how many]: this host's share of the samples
    boundaries: Union[str, List[int]]  # "eagle3" or a list; the job resolves and checks it against the model
    final_norm: bool  # False: boundary N is stored before the final norm
    store_dtype: str  # "auto" (the model's), "bfloat16", "float16", "float32" or "fp8"
    output: str
    format: str
    capture: str  # "auto", "hooks" or "native"
    engine: Dict[str, Any]  # vLLM engine arguments, tensor_parallel_size among them
    buffer_bytes: int  # host memory a rank may hold states in, pinned where there is a GPU


class RunRecord(TypedDict):
    """run.json, written by the supervisor only: who operates the run, and where it stands."""

    wire: int
    run_id: str
    payload: str
    name: str
    kind: str
    user: str
    supervisor: ProcessIdentity
    job: Optional[ProcessIdentity]  # the process group leader of the step being run
    cgroup: Optional[str]  # the job's own, where one was to be had; None: members are known by other signs
    state: str
    step: Optional[str]
    started: str  # ISO 8601, UTC
    boot_s: float  # seconds since boot at the start (CLOCK_BOOTTIME): durations never use the wall clock


class Result(TypedDict):
    """result.json, written last and atomically: the truth about how a run ended."""

    wire: int
    run_id: str
    end_reason: str
    step: Optional[str]  # the step that decided
    exit_code: Optional[int]
    signal: Optional[int]
    oom_killed: Optional[bool]
    message: str  # one sentence for a person
    ended: str
    duration_s: float  # from the lease to the end; 0 of a run that never held one
    gpus_clean: Union[bool, str]  # True, False or "unknown"; measured after the end
    killed: List[Dict[str, Any]]  # {pid, comm, signal} of each signal that ended what the job left; see `stop`
    leftovers: List[Dict[str, Any]]  # what could not be removed, with the reason; `ours` False: other people's
    log_bytes: int  # of the segments that are there, with the hash over them in order
    log_sha256: str
    log_gap_bytes: int  # printed by the job and given up under the log cap; see LOG_GAPS


class Confirmation(TypedDict):
    """The one answer to a start request; see `confirm_line`.

    `outcome`: "launched" (run.json is on disk and the lease is held; or, for a job with `wait_for_lease`, `run` is in
    state "queued", `detail` says behind whom, and the host starts it when its turn comes), "exists" (this id was
    launched before; its record is returned), "cancelled" (a cancel came first), "refused" (`result` says why, for
    example who holds the lease).
    """

    nonce: str
    outcome: str
    run: Optional[RunRecord]
    result: Optional[Result]
    detail: Optional[Dict[str, Any]]


# ---------------------------------------------------------------------------------------- validators


def check_record(record: Any, required: Dict[str, Any], what: str) -> Dict[str, Any]:
    """Return `record` if it is an object holding every `required` key with a value of the given type(s).

    Unknown keys pass: a newer peer may send more. Raises ProtocolError naming record and key.
    """
    if not isinstance(record, dict):
        raise ProtocolError("%s is not an object" % what)
    for key, kinds in required.items():
        if key not in record:
            raise ProtocolError("%s lacks %r" % (what, key))
        if not isinstance(record[key], kinds):
            raise ProtocolError("%s has %r of type %s" % (what, key, type(record[key]).__name__))
    return record


def check_wire(record: Any, what: str) -> None:
    """Raise ProtocolError if `record` was written by a wire that this version cannot read."""
    wire = record.get("wire") if isinstance(record, dict) else None
    if wire not in WIRES_READ:
        raise ProtocolError("%s has wire %r; this version reads %s" % (what, wire, list(WIRES_READ)))


def check_plan(record: Any) -> Dict[str, Any]:
    """Validate a plan as far as the host relies on it."""
    plan = check_record(
        record, {"wire": int, "run_id": str, "host": dict, "payload": str, "job": dict, "timings": dict}, "plan"
    )
    check_wire(plan, "plan")
    check_run_id(plan["run_id"])
    job = check_record(
        plan["job"],
        {
            "kind": str, "name": str, "steps": list, "cwd": str, "env": dict, "secret_env": list,
            "outputs": list, "success": dict, "limits": dict,
        },
        "plan.job",
    )  # fmt: skip
    for number, step in enumerate(job["steps"]):
        check_record(step, {"name": str, "kind": str}, "plan.job.steps[%d]" % number)
        if step["kind"] not in ("recheck", "place", "clear", "exec", "verify"):
            raise ProtocolError("plan.job.steps[%d] has unknown kind %r" % (number, step["kind"]))
        if step["kind"] in ("exec", "verify"):
            argv = step.get("argv")
            if not (isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv)):
                raise ProtocolError("plan.job.steps[%d] needs a non-empty argv of strings" % number)
        if step.get("failure", EndReason.JOB_FAILED.value) not in [reason.value for reason in EndReason]:
            raise ProtocolError("plan.job.steps[%d] has unknown failure %r" % (number, step["failure"]))
    for number, output in enumerate(job["outputs"]):
        check_record(output, {"path": str, "root": str, "stale": str, "adopt": bool}, "plan.job.outputs[%d]" % number)
    return plan


def confirm_line(confirmation: Confirmation) -> str:
    """Return the one line that answers a start request: `ctl-launch NONCE JSON`."""
    return "ctl-launch %s %s\n" % (confirmation["nonce"], json.dumps(confirmation, separators=(",", ":")))


def parse_confirmation(output: bytes, nonce: str) -> Optional[Confirmation]:
    """Find the answer to the request with `nonce` among `output`; None if it is not there whole."""
    prefix = ("ctl-launch %s " % nonce).encode()
    for line in output.splitlines(True):
        if line.startswith(prefix) and line.endswith(b"\n"):
            record: Any = json.loads(line[len(prefix) :])
            check_record(record, {"nonce": str, "outcome": str}, "confirmation")
            return cast("Confirmation", record)
    return None

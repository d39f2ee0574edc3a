"""The wire: every name, word and record that the workstation and the host share.

Both sides import this module, so a change here changes both at once. It needs Python 3.9 and nothing but the
standard library, because the host runs it under whatever `bootstrap_python` it has.

Compatibility: `WIRE` is written into every record. A controller reads its own wire and the one before, ignores
fields and events that it does not know, and can list, read and stop a run of any wire. A host only ever runs the
payload that started the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from enum import Enum
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, TypedDict, Union, cast

WIRE = 1
"""Major version of the records below."""

WIRES_READ = (1,)
"""Wires this version can read: its own and the one before (there is none before 1)."""

RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
"""UTC date, UTC time, 24 random bits. Sorts by time, needs no quoting anywhere."""

HASH = re.compile(r"[0-9a-f]{64}")

OWNER_MARKER = ".ctl-owner.json"
"""Marks a folder whose contents `ctl` may clear. Written when a run first claims an empty or adopted folder."""

OUTPUT_MANIFEST = ".ctl-manifest.json"
"""In an output folder, written by the job: {"schema_version", "identity" (what all samples share), "runs" (ids)}."""

OUTPUT_LEDGER = ".ctl-ledger"
"""In an output folder: RUN_ID.rank-N.jsonl, the ledger line of every sample that was written there."""


WRITTEN_NAMES = re.compile(
    r"hs_[0-9]+\.safetensors|data_[0-9]+\.(pt|ckpt)(\.gz)?|rows_[0-9]+-[0-9]+|[0-9]+\.pt"
    r"|data-[0-9]+-of-[0-9]+\.arrow|(dataset_info|dataset_dict|state)\.json|\..*"
)
"""Top-level names that extractions write into an output folder; anything else there was put in by somebody."""


class ProtocolError(ValueError):
    """A record or frame is not of the form that this wire prescribes; the message names the offending part."""


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

    `kind` is `recheck`, `clear`, `exec` or `verify`; the last two run `argv`. `lease` and `release` are implied
    around all steps.
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


class Job(TypedDict):
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
    duration_s: float
    gpus_clean: Union[bool, str]  # True, False or "unknown"; measured after the end
    leftovers: List[Dict[str, Any]]  # what could not be removed, with the reason
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


# -------------------------------------------------------------------------------------------- layout


class Layout:
    """Paths below a host's `workdir`. Every folder is 0700, every file 0600."""

    def __init__(self, workdir: str) -> None:
        self.workdir = workdir
        self.payloads = os.path.join(workdir, "payload")
        self.runs = os.path.join(workdir, "runs")
        self.data = os.path.join(workdir, "data")  # pushed data sets, each below its content's hash

    def payload(self, digest: str) -> str:
        if not HASH.fullmatch(digest):
            raise ProtocolError("not a payload hash: %r" % digest)
        return os.path.join(self.payloads, digest)

    def run(self, run_id: str) -> "RunPaths":
        return RunPaths(os.path.join(self.runs, check_run_id(run_id)))


class RunPaths:
    """The run folder. Each file has one writer, named in the comment."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        join = os.path.join
        self.plan = join(folder, "plan.json")  # starter
        self.start_lock = join(folder, "start.lock")  # starter: flock, its content is irrelevant
        self.cancelled = join(folder, "cancelled")  # cancel, under start.lock
        self.run = join(folder, "run.json")  # supervisor
        self.tree = join(folder, "tree.jsonl")  # supervisor: {"pid", "start_ticks", "ppid", "comm"} a line
        self.supervisor_log = join(folder, "supervisor.log")  # supervisor's own stderr
        self.log = join(folder, "log")  # log pump: 000001.log, 000002.log, ..., gaps.jsonl
        self.pipe = join(folder, "log", "pipe")  # FIFO that the job writes into
        self.events = join(folder, "events")  # one file a writer: supervisor, driver, rank-N
        self.ledger = join(folder, "ledger")  # one file a writer: rank-N, driver (skipped samples)
        self.verify = join(folder, "verify.json")  # the verify step: the kind's own part of the summary
        self.summary = join(folder, "summary.json")  # supervisor
        self.result = join(folder, "result.json")  # supervisor, last; stop, where the supervisor is dead
        self.reserve = join(folder, "reserve")  # 1 MiB, given up when result.json is written


LAYER_CONVENTIONS = {
    "boundaries": 0,
    "vllm": 0,
    "speculators": 0,  # 0.5 and newer
    "speculators-0.3": 1,  # and 0.4
    "specforge": 1,
    "torchspec": 1,
    "angelslim": 1,
    "modelopt": 1,  # its HF and TensorRT-LLM dumps; its vLLM dump passes ids on unshifted
    "modelopt-vllm": 0,
}
"""By which number each system calls a state: boundary = its layer id + this. (Ours are boundaries already.)"""


def boundaries_of(ids: Sequence[int], convention: str) -> List[int]:
    """Return the boundaries that another system's layer ids mean. Raises ProtocolError for an unknown convention."""
    return [number + _shift(convention) for number in ids]


def layer_ids(boundaries: Sequence[int], convention: str) -> List[int]:
    """Return what another system calls these boundaries; -1 for the embeddings where it counts layers' outputs."""
    return [boundary - _shift(convention) for boundary in boundaries]


def _shift(convention: str) -> int:
    if convention not in LAYER_CONVENTIONS:
        raise ProtocolError("no layer convention %r; there are %s" % (convention, ", ".join(LAYER_CONVENTIONS)))
    return LAYER_CONVENTIONS[convention]


MIRRORED_STREAMS = ("log", "events", "ledger")
"""Folders of append-only files that the controller copies byte by byte; the local size is the cursor."""

LOG_GAPS = "gaps.jsonl"
"""In `log/`, written by the log pump: {"segment", "bytes", "sha256"} a line for each segment given up under the log
cap. The line is on disk before its segment goes; what a mirror holds of that segment stays there."""

MIRRORED_DOCUMENTS = ("plan.json", "run.json", "verify.json", "summary.json", "result.json")
"""Small files that are replaced whole."""


def check_run_id(text: str) -> str:
    """Return `text` if it is a run id, else raise ProtocolError: it becomes part of a path."""
    if not RUN_ID.fullmatch(text):
        raise ProtocolError("not a run id: %r (expected YYYYMMDD-HHMMSS-xxxxxx)" % text)
    return text


# ------------------------------------------------------------------------------------------- framing

_FRAME = struct.Struct(">II")
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 26
"""64 MiB: one frame of a log or an upload; larger things are sent in pieces."""


def pack_frame(header: Dict[str, Any], body: bytes = b"") -> bytes:
    """Return one frame: two big-endian uint32 (header length, body length), the header as JSON, the body."""
    head = json.dumps(header, separators=(",", ":")).encode()
    if len(head) > MAX_HEADER or len(body) > MAX_BODY:
        raise ProtocolError("frame too large: header %d, body %d bytes" % (len(head), len(body)))
    return _FRAME.pack(len(head), len(body)) + head + body


class FrameReader:
    """Turns bytes that arrive in any pieces into frames. A cut stream is seen as `pending` bytes at its end."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Tuple[Dict[str, Any], bytes]]:
        self._buffer += data
        while len(self._buffer) >= _FRAME.size:
            head, body = _FRAME.unpack_from(self._buffer)
            if head > MAX_HEADER or body > MAX_BODY:
                raise ProtocolError("frame announces header %d, body %d bytes: not our stream" % (head, body))
            end = _FRAME.size + head + body
            if len(self._buffer) < end:
                return
            header = json.loads(self._buffer[_FRAME.size : _FRAME.size + head])
            if not isinstance(header, dict):
                raise ProtocolError("frame header is not an object")
            payload = bytes(self._buffer[_FRAME.size + head : end])
            del self._buffer[:end]
            yield header, payload


def read_frame(stream: Any) -> Tuple[Dict[str, Any], bytes]:
    """Read exactly one frame from a blocking binary stream; raise ProtocolError if it ends early."""
    prefix = _read_exactly(stream, _FRAME.size)
    head, body = _FRAME.unpack(prefix)
    if head > MAX_HEADER or body > MAX_BODY:
        raise ProtocolError("frame announces header %d, body %d bytes: not our stream" % (head, body))
    header = json.loads(_read_exactly(stream, head))
    if not isinstance(header, dict):
        raise ProtocolError("frame header is not an object")
    return header, _read_exactly(stream, body)


def _read_exactly(stream: Any, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = stream.read(count - len(data))
        if not piece:
            raise ProtocolError("stream ended after %d of %d bytes" % (len(data), count))
        data += piece
    return bytes(data)


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


# ------------------------------------------------------------------------------------------- digests


def file_digest(path: str) -> str:
    """Return the sha256 of a file's contents as hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def manifest_digest(files: Dict[str, str]) -> str:
    """Return the payload hash: sha256 over sorted lines `HEX  RELATIVE/PATH`, as sha256sum prints them."""
    text = "".join("%s  %s\n" % (files[name], name) for name in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()


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
        if step["kind"] not in ("recheck", "clear", "exec", "verify"):
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

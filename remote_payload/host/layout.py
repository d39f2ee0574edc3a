"""Where things lie: the paths below a host's `workdir`, a run's folder, and what `ctl` leaves in an output folder."""

from __future__ import annotations

import os
import re

from remote_payload.host.errors import ProtocolError

RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
"""UTC date, UTC time, 24 random bits. Sorts by time, needs no quoting anywhere."""

LEASE_FOLDER = "/run/lock/ctl"
"""Of a host that sets no `lease_dir`, where it has a /run/lock that all users may write."""

HASH = re.compile(r"[0-9a-f]{64}")

OWNER_MARKER = ".ctl-owner.json"
"""Marks a folder whose contents `ctl` may clear. Written when a run first claims an empty or adopted folder."""

OUTPUT_MANIFEST = ".ctl-manifest.json"
"""In an output folder, written by its first run and never again: {"schema_version", "identity" (of all samples)}."""

OUTPUT_LEDGER = ".ctl-ledger"
"""In an output folder: RUN_ID.rank-N.jsonl, the ledger line of every sample that was written there."""

_SAMPLE = r"(?:hs_[0-9]+\.safetensors|data_[0-9]+\.(?:pt|ckpt)(?:\.gz)?|[0-9]+\.pt)"
SAMPLE_NAME = re.compile(r"(?:hs_|data_|)(?P<index>[0-9]+)\.(?:safetensors|(?:pt|ckpt)(?:\.gz)?)")
"""The file of one whole sample, by the index of its record in the data set."""

_DESCRIBING = r"(?:data-[0-9]+-of-[0-9]+\.arrow|(?:dataset_info|dataset_dict|state)\.json)"

WRITTEN_PATHS = re.compile(
    r"(?:rows_[0-9]+-[0-9]+/)?(?:%(sample)s|\.%(sample)s(?:\.[0-9]+-[0-9]+)?\.partial)|rows_[0-9]+-[0-9]+"
    r"|%(describing)s|\.%(describing)s\.[^/]*|\.ctl-[^/]*|%(ledger)s/(?:%(run)s\.rank-[0-9]+\.jsonl|\.ctl-[^/]*)"
    % {"sample": _SAMPLE, "describing": _DESCRIBING, "ledger": re.escape(OUTPUT_LEDGER), "run": RUN_ID.pattern}
)
"""Paths that extractions and conversions write below an output folder, half-written ones too; anything else in it was
put there by somebody."""

WRITING_KINDS = ("extract", "convert")
"""Kinds of jobs of which all paths in their outputs are known; a command may write any."""

MIRRORED_STREAMS = ("log", "events", "ledger")
"""Folders of append-only files that the controller copies byte by byte; the local size is the cursor."""

LOG_GAPS = "gaps.jsonl"
"""In `log/`, written by the log pump: {"segment", "bytes", "sha256"} a line for each segment given up under the log
cap. The line is on disk before its segment goes; what a mirror holds of that segment stays there."""

LOG_TIMES = "times.jsonl"
"""In `log/`, written by the log pump at most once a second: {"t", "segment", "offset"}, when which byte came. Runs of
earlier payloads have none."""

MIRRORED_DOCUMENTS = ("plan.json", "run.json", "verify.json", "summary.json", "result.json")
"""Small files that are replaced whole."""


def check_run_id(text: str) -> str:
    """Return `text` if it is a run id, else raise ProtocolError: it becomes part of a path."""
    if not RUN_ID.fullmatch(text):
        raise ProtocolError("not a run id: %r (expected YYYYMMDD-HHMMSS-xxxxxx)" % text)
    return text


class Layout:
    """Paths below a host's `workdir`. Every folder is 0700, every file 0600."""

    def __init__(self, workdir: str) -> None:
        self.workdir = workdir
        self.payloads = os.path.join(workdir, "payload")
        self.runs = os.path.join(workdir, "runs")
        self.data = os.path.join(workdir, "data")  # pushed data sets, each below its content's hash
        self.files = os.path.join(workdir, "files")  # uploads of commands: blobs and trees by hash

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
        self.log = join(folder, "log")  # log pump: 000001.log, 000002.log, ..., gaps.jsonl, times.jsonl
        self.pipe = join(folder, "log", "pipe")  # FIFO that the job writes into
        self.events = join(folder, "events")  # one file a writer: supervisor, driver, rank-N
        self.ledger = join(folder, "ledger")  # one file a writer: rank-N, driver (skipped samples)
        self.work = join(folder, "work")  # the job's own: a fresh copy of what was uploaded for it
        self.faults = join(folder, "faults")  # one file a Python process that is hooked: stacks of a fatal signal
        self.verify = join(folder, "verify.json")  # the verify step: the kind's own part of the summary
        self.summary = join(folder, "summary.json")  # supervisor
        self.result = join(folder, "result.json")  # supervisor, last; stop, where the supervisor is dead
        self.left = join(folder, "left.json")  # stop, of a lost run: what it found left, and whether that is gone
        self.reserve = join(folder, "reserve")  # 1 MiB, given up when result.json is written

"""What the kernel said about a run that failed: its out-of-memory killer, and faults of the GPUs."""

from __future__ import annotations

import re
import subprocess
from typing import List

from remote_payload.host.journal import complain
from remote_payload.host.kernel_log import KernelLog, read_kernel_log

AROUND_S = 900.0
"""Seconds before a run's end that a message may be old: NCCL waits 600 s for a dead rank, vLLM 300 s for a step."""

MAX_LINES = 20

_TELLING = re.compile(r"Out of memory: Killed process|oom-kill:|NVRM: Xid|NVRM: GPU .* has fallen off the bus")


def kernel_notes(run_s: float) -> List[str]:
    """Return the telling messages of the last AROUND_S seconds, and of a run that took `run_s`, the oldest first.

    Empty where this user may not read the kernel's log.
    """
    try:
        found = read_kernel_log(lambda text: None)
    except subprocess.TimeoutExpired as error:
        complain("the kernel's messages are not read: %s" % error)
        return []
    return telling(found, run_s)


def telling(log: KernelLog, run_s: float) -> List[str]:
    """Pick the messages from a kernel log."""
    newest = min(AROUND_S, run_s)
    return [line["text"] for line in log.lines if line["age_s"] <= newest and _TELLING.search(line["text"])][
        -MAX_LINES:
    ]

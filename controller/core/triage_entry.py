"""The form of an entry of the triage catalogue, and the words that say that a failure is not the first.

Write evidence narrowly: an entry that matches what it should not sends somebody the wrong way, while a failure that
no entry knows is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.core.tracebacks import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One cause. `exception` is searched in `TYPE: MESSAGE`; `frames` in its traceback.

    `beside` must be in some other line of the log. `line` is searched in every log line, but only where no exception
    tells more. `also` are lines quoted beside the evidence. `least_ranks` is how many ranks must have failed alike;
    `ends` are end reasons that mean this. `{name}`, `{detail}`, `{wanted}`, `{source}` in the texts are named
    groups of the pattern that matched. `renamed` says what stands for a name of vLLM's own, by `name`, or by
    `owner.name` where the pattern has a group `owner`.
    """

    code: str
    what: str
    fix: str
    why: str = ""
    exception: re.Pattern[str] | None = None
    frames: re.Pattern[str] | None = None
    line: re.Pattern[str] | None = None
    beside: re.Pattern[str] | None = None
    also: re.Pattern[str] | None = None
    least_ranks: int = 0
    ends: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)


def pattern(text: str) -> re.Pattern[str]:
    """Compile evidence; `.` also stands for a line end, because messages have several lines."""
    return re.compile(text, re.DOTALL)


ECHOES = pattern(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|EngineGenerateError"
    r"|EngineCore encountered an issue|Worker failed with error"
    r"|Engine process failed to start|^RuntimeError: cancelled|EngineLostError: rank \d+ raised"
)
"""What a parent says of a child's failure; it names no cause of its own."""

CONSEQUENCES = pattern(
    r"Connection closed by peer|Connection reset by peer|recvValue failed|Broken pipe|ncclRemoteError"
    r"|remote process exited|^EOFError|Executor failed"
)
"""What a process says when another one that it talks to has died."""


def is_told(failure: Failure) -> bool:
    """Whether a failure only passes on, or follows from, what happened to another process."""
    return bool(ECHOES.search(failure.summary) or CONSEQUENCES.search(failure.summary))


KERNEL = pattern(r"Out of memory: Killed process|Memory cgroup out of memory|oom-kill:|NVRM: Xid|oom_reaper:")
"""Lines of the kernel. A log that somebody joined with `dmesg` holds those of weeks; see `triage_time`."""

CONTEXT = pattern(
    r"died unexpectedly|Out of memory: Killed process|oom-kill:|NVRM: Xid|exit ?code[ =:]+-?[1-9]"
    r"|Failed core proc\(s\): \{'[^']+': -\d+|terminated with signal|Segmentation fault|Bus error|Fatal Python error"
)

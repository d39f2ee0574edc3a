"""The kernel's messages since boot, by whichever way this user may read them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from typing import Any, Dict, List, NamedTuple, Optional

from remote_payload.host.liveness import boot_seconds
from remote_payload.host.sections import Note

KMSG = "/dev/kmsg"
RECORD_LIMIT = 8192
"""Bytes; the kernel fails a read into less than its largest record (CONSOLE_EXT_LOG_MAX)."""

JOURNAL_TIMEOUT_S = 8.0
MAX_LINES = 200_000

_JOURNAL_LINE = re.compile(r"\[\s*(\d+\.\d+)\]\s+\S+ kernel: (.*)")


class KernelLog(NamedTuple):
    """`lines`: {"age_s", "text"} of each message, the oldest first; `source` is None where none may be read."""

    source: Optional[str]
    error: Optional[str]
    lines: List[Dict[str, Any]]


def read_kernel_log(note: Note, kmsg: str = KMSG) -> KernelLog:
    """Read /dev/kmsg, else ask journalctl; never raises for what this user may not read.

    Without the right to (kernel.dmesg_restrict) `error` says why. Raises subprocess.TimeoutExpired.
    """
    note(kmsg)
    try:
        return KernelLog(kmsg, None, _read_kmsg(kmsg))
    except OSError as error:
        refused = "%s: %s" % (kmsg, error.strerror)
    journalctl = shutil.which("journalctl")
    if journalctl is None:
        return KernelLog(None, refused, [])
    note("journalctl -k")
    done = subprocess.run(
        [journalctl, "--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet", "--lines=20000"],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=JOURNAL_TIMEOUT_S, check=False,
    )  # fmt: skip
    lines = parse_journal(done.stdout.decode("utf-8", "replace"), boot_seconds())
    if done.returncode != 0 or not lines:  # the log of a kernel that booted is never empty
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return KernelLog(None, "%s; journalctl: %s" % (refused, said[-1] if said else "shows nothing to us"), [])
    return KernelLog("journalctl", None, lines)


def parse_kmsg(record: bytes, now_s: float) -> Optional[Dict[str, Any]]:
    """Return {"age_s", "text"} of a record `PRIORITY,SEQUENCE,MICROSECONDS,...;TEXT`, None for anything else.

    The format is the kernel's Documentation/ABI/testing/dev-kmsg. `now_s` are seconds since boot.
    """
    head, separator, text = record.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 3 or not fields[2].isdigit():
        return None
    line = text.split(b"\n", 1)[0].decode("utf-8", "replace")  # continuation lines are a dictionary
    return {"age_s": round(max(0.0, now_s - int(fields[2]) / 1e6), 1), "text": line}


def parse_journal(output: str, now_s: float) -> List[Dict[str, Any]]:
    """Return the messages in the output of `journalctl -k -o short-monotonic`."""
    matches = (_JOURNAL_LINE.match(line) for line in output.splitlines())
    return [{"age_s": round(max(0.0, now_s - float(m.group(1))), 1), "text": m.group(2)} for m in matches if m]


def _read_kmsg(path: str) -> List[Dict[str, Any]]:
    lines: List[Dict[str, Any]] = []
    now_s = boot_seconds()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while len(lines) < MAX_LINES:
            try:
                record = os.read(descriptor, RECORD_LIMIT)
            except BlockingIOError:  # all that there is has been read
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read: the next read goes on after the gap
                    continue
                raise
            if not record:
                break
            line = parse_kmsg(record, now_s)
            if line is not None:
                lines.append(line)
    finally:
        os.close(descriptor)
    return lines

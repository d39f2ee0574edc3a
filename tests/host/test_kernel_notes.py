"""Which of the kernel's messages a failed run keeps."""

from __future__ import annotations

from remote_payload.host.kernel_log import KernelLog
from remote_payload.host.kernel_notes import AROUND_S, kernel_notes, telling

OOM = "Out of memory: Killed process 7 (python)"
XID = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."


def log(*lines: tuple[float, str]) -> KernelLog:
    return KernelLog("/dev/kmsg", None, [{"age_s": age, "text": text} for age, text in lines])


def test_only_what_tells_and_only_of_this_run() -> None:
    found = log((5000.0, OOM), (50.0, XID), (20.0, "usb 1-1: new device"), (10.0, OOM))
    assert telling(found, run_s=100.0) == [XID, OOM]
    assert telling(found, run_s=30.0) == [OOM]  # what was before the run is not of it
    assert telling(log((AROUND_S + 1, OOM)), run_s=10_000.0) == []
    assert telling(KernelLog(None, "Operation not permitted", []), run_s=100.0) == []


def test_a_look_at_the_real_log_never_fails() -> None:
    assert isinstance(kernel_notes(1.0), list)

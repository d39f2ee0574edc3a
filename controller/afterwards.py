"""What the workstation does when a run has ended: the command or notification of `on_finish`, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.core.model import Host
from controller.core.values import NOTIFY
from controller.runfolder import RunFolder
from controller.ui.formats import count_text

HOOK_TIMEOUT_S = 60.0
"""A hook sends a message; one that waits for something must not keep `ctl` from ending."""

SHOWN_BYTES = 2000
"""Of what a failed hook printed, the end."""

HOOK_FAILED = "on-finish"
"""Code of the notice that a hook did not do its work."""

MARKER = "on-finish.json"
"""In the run folder: made by whoever runs the hook, before it runs, so that nobody runs it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Afterwards:
    """What a host's configuration says about its ended runs; see `core.model.Host`."""

    on_finish: str | Sequence[str] | None = None
    price_per_gpu_hour: float | None = None

    @classmethod
    def of(cls, host: Host) -> Afterwards:
        return cls(on_finish=host.on_finish, price_per_gpu_hour=host.price_per_gpu_hour)


def run_hook(folder: RunFolder, hook: str | Sequence[str], document: Mapping[str, Any]) -> str | None:
    """Run a hook with `document` as JSON on its stdin, unless one was run for this folder; return why it failed.

    Whoever sees the end of a run first runs it: it may be `extract`, `attach`, `logs` or a notebook. A hook that was
    begun counts as run, whatever became of it: a message that was perhaps sent is not sent again.
    """
    argv = notification(document) if hook == NOTIFY else list(hook)
    try:
        marker = os.open(folder.path / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return None
    with open(marker, "w", encoding="utf-8") as stream:
        json.dump({"argv": argv}, stream)
    environ = {
        **os.environ,
        "CTL_RUN_ID": folder.run_id,
        "CTL_RUN_DIR": str(folder.path),
        "CTL_END_REASON": str(document.get("end_reason") or document.get("state")),
    }
    try:
        done = subprocess.run(
            argv, input=json.dumps(document, default=str).encode(), env=environ, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=HOOK_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not end within {HOOK_TIMEOUT_S:g} s and was killed"
    except OSError as error:
        return f"{argv[0]} could not be started: {error.strerror or error}"
    if done.returncode == 0:
        return None
    said = done.stdout[-SHOWN_BYTES:].decode(errors="replace").strip()
    return f"{argv[0]} ended with exit code {done.returncode}" + (f": {said}" if said else "")


def notification(document: Mapping[str, Any]) -> list[str]:
    """Return the command that shows a notification on this desktop."""
    title = f"ctl: {document.get('end_reason') or document.get('state')}"
    hosts = ", ".join(map(str, document.get("hosts") or ()))
    samples = document.get("samples")
    amount = (
        f", {count_text(samples.get('written'))} of {count_text(samples.get('expected'))} samples"
        if isinstance(samples, dict)
        else ""
    )
    text = f"run {document.get('run_id')} on {hosts}{amount}"
    if sys.platform == "darwin":
        script = ("on run argv", "display notification (item 2 of argv) with title (item 1 of argv)", "end run")
        return ["osascript", *(word for line in script for word in ("-e", line)), title, text]
    return ["notify-send", "--app-name=ctl", "--", title, text]

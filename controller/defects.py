"""Keeps the traceback of an unexpected error, below $XDG_STATE_HOME, for whoever reports it."""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from pathlib import Path

from controller.history import history_file
from controller.private import write_private
from controller.version import version


def keep(error: BaseException) -> Path | OSError:
    """Write a file that can be sent as a report, and return its path; or the error that kept it from being written.

    It holds the verb, and not its arguments: those may name what the sender would rather keep.
    """
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    head = f"ctl {version()} ({verb}), Python {platform.python_version()}, {platform.platform()}\n\n"
    path = history_file().parent / "defects" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, (head + "".join(traceback.format_exception(error))).encode())
    except OSError as failed:
        return failed
    return path

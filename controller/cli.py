"""The command line: `app` with every verb registered.

Nothing heavy is imported at module level: `ctl --help` and completion must answer at once, so every command
imports what it needs when it runs. The order of the imports is the order of the verbs in `ctl --help`.
"""

from __future__ import annotations

import os
import sys

from controller import acting, hosting, hosts_setup, looking
from controller.app import app, run

__all__ = ["acting", "app", "hosting", "hosts_setup", "looking", "main"]


def main() -> None:
    """Entry point of the `ctl` command."""
    if os.environ.get("NO_COLOR"):
        # For rich and typer it only takes the colours, and where they are forced bold and faint would stay.
        os.environ.pop("FORCE_COLOR", None)
        os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"
    sys.exit(run())

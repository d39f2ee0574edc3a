"""Section `programs` of the probe: which of the programs that a command needs are there."""

from __future__ import annotations

import shutil
from typing import Any, Dict, List

from remote_payload.host.sections import Note


def probe_programs(note: Note, names: List[str]) -> Dict[str, Any]:
    """Return {"programs": [{"name", "path"}]}; `path` is None where there is no such program that may be run."""
    found = []
    for name in names:
        note(name)
        found.append({"name": name, "path": shutil.which(name)})
    return {"programs": found}

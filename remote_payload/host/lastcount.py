"""How far an extraction came, told once more at its end: what the driver could not say before it was ended itself."""

from __future__ import annotations

import glob
import os
from typing import Any, Callable, Dict, Optional, Tuple

from remote_payload.host.files import each_line
from remote_payload.host.layout import RunPaths


def tell_last_count(paths: RunPaths, plan: Dict[str, Any], emit: Callable[..., None]) -> None:
    """Emit a `progress` event of what the ledgers hold, if that is more than the driver's last one says.

    The ranks write on for as long as the driver takes to be ended, and the summary counts what they wrote. To be
    called when no process of the run is left.
    """
    told = _last_told(paths) if plan["job"]["kind"] == "extract" else None
    if told is None:
        return
    sizes: Dict[int, Tuple[int, int]] = {}
    for path in glob.glob(os.path.join(glob.escape(paths.ledger), "*.jsonl")):
        by_rank = os.path.basename(path).startswith("rank-")
        for line in each_line(path):
            if "index" in line and (by_rank or line.get("kept")):
                sizes[line["index"]] = (line.get("tokens", 0), line.get("bytes", 0))
    if len(sizes) > told.get("done", 0):
        tokens, size = (sum(each[place] for each in sizes.values()) for place in (0, 1))
        same = {name: told[name] for name in ("total", "skipped", "failed", "records") if name in told}
        emit("progress", done=len(sizes), tokens=tokens, bytes=size, **same)


def _last_told(paths: RunPaths) -> Optional[Dict[str, Any]]:
    last = None
    for event in each_line(os.path.join(paths.events, "driver.jsonl")):
        if event.get("type") == "progress":
            last = event
    return last

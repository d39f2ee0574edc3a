"""Whether a run is paused, as its driver's events say: a full disk makes it wait, which no state tells."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Optional

from remote_payload.host.codes import PAUSES
from remote_payload.host.files import parse_line, tail_bytes

FREED = "disk-freed"

TAIL_BYTES = 64 << 10
"""In a pause there is a line each half minute, and little else; before it there was one a second."""


def paused_by(events: str) -> Optional[str]:
    """Return the code of the notice that began the present pause (see PAUSES), None if there is none.

    `events` is the folder of the run's events. The driver says in its latest `progress` whether it waits.
    """
    for line in reversed(tail_bytes(os.path.join(events, "driver.jsonl"), TAIL_BYTES).splitlines()):
        record = parse_line(line)
        if record is not None and record.get("type") == "progress":
            code = record.get("paused")
            return code if code in PAUSES else None
    return None


def paused_seconds(events: Iterable[Dict[str, Any]]) -> float:
    """Return for how long a run was paused in all, by its events, each writer's in its order.

    A pause that nothing ended lasted until the last event of any writer.
    """
    seconds, last = 0.0, 0.0
    since: Optional[float] = None
    for event in events:
        if not isinstance(event.get("t"), (int, float)):
            continue
        last = max(last, event["t"])
        if event.get("type") != "notice" or event.get("writer") != "driver":
            continue
        if event.get("code") in PAUSES and since is None:
            since = event["t"]
        elif event.get("code") == FREED and since is not None:
            seconds, since = seconds + max(0.0, event["t"] - since), None
    return seconds if since is None else seconds + max(0.0, last - since)

"""One stream of events for dashboards, plain lines, JSON, notebooks, replays and tests.

An event is a flat JSON object on a line of its own. Every writer has its own file and its own sequence, so that
no two processes ever append to one file; readers merge by time. Unknown types and fields are kept and ignored.

Types and their fields beside the common ones (`wire`, `seq`, `run`, `host`, `writer`, `t`, `type`):

| type            | writer             | fields |
|---|---|---|
| stage           | controller         | name (connect, push, data, uploads, preflight, confirm, launch, watch, summarize), status (started, done, failed, skipped), text, seconds |
| finding         | controller         | level (ok, warn, fail), code, what, why, fix |
| contact         | controller         | status (connected, lost, reconnecting), text; not a word about the run itself |
| state           | supervisor         | state (a RunState), text |
| step            | supervisor         | name, status (started, done, failed), text, seconds |
| sample          | supervisor         | gpus [{index, util, memory_used, memory_total, power_w, temperature_c}] or [], cpu_percent, memory_used, memory_total, disk_free, disk_total (bytes; of the output's file system) |
| end             | supervisor         | end_reason, exit_code, signal, message, gpus_clean |
| phase           | driver             | name (data, load, probe, canary, capture, drain, canary-end), status (started, done), text, seconds |
| progress        | driver             | done, total, tokens, bytes, skipped, failed (of an extraction also once before the load), of an extraction records (of the whole data set, of all shares), paused (the code of the notice that says why nothing is admitted; absent otherwise); of a command (written by the follower) also unit, values {name: number or text} |
| stacks          | supervisor         | pid, rank, process, stacks or error: what a silent job's process was doing, before it was ended |
| notice          | any                | level (info, warn), code, text |
| problem         | driver, rehearse   | code, what, why, fix; what the job found out itself, an entry of the summary's `problems` |
| exception       | driver, rank-N, py-PID-X, faults | rank (null in the driver), exc_type, message, traceback, where; of hooked processes also process |
"""  # noqa: E501 - a table row cannot be folded

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remote_payload.host.protocol import WIRE

COMMON = ("wire", "seq", "run", "host", "writer", "t", "type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened. `t` is seconds since the Unix epoch by the writer's own clock."""

    type: str
    run: str
    host: str
    writer: str
    seq: int
    t: float
    data: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.data.get(name, default)

    def to_json(self) -> str:
        """Return the line for events.jsonl, without its newline."""
        record = {"wire": WIRE, "seq": self.seq, "run": self.run, "host": self.host, "writer": self.writer}
        return json.dumps({**record, "t": self.t, "type": self.type, **self.data}, ensure_ascii=False, default=str)


def parse_event(line: str | bytes) -> Event | None:
    """Return the event on a line, or None if the line is not one (cut off, or not ours): a reader never stops."""
    try:
        record = json.loads(line)
        return Event(
            type=str(record["type"]),
            run=str(record["run"]),
            host=str(record.get("host", "")),
            writer=str(record["writer"]),
            seq=int(record["seq"]),
            t=float(record["t"]),
            data={key: value for key, value in record.items() if key not in COMMON},
        )
    except (ValueError, KeyError, TypeError):
        return None

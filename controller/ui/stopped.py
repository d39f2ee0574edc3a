"""The answer of `ctl stop`: how the run ended, what of it is left, and what is only somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from controller.ui.clean import Encodable, clean
from controller.ui.formats import (
    count_text,
    end_text,
    ended_text,
    host_text,
    inline_text,
    last_stage_text,
    state_word,
)
from controller.ui.glyphs import glyphs_for
from controller.ui.tables import sign_of
from remote_payload.host.protocol import EndReason, RunState

WELL_ENDED = frozenset({EndReason.SUCCEEDED.value, EndReason.STOPPED.value, EndReason.CANCELLED.value})
"""Ends of a run that somebody wanted."""


def print_stop(
    console: Console, record: Mapping[str, Any], *, had_ended: bool = False, untouched: bool = False
) -> None:
    """Print what `ctl stop` did, and what is left.

    `had_ended`: the run had ended before anybody asked. `untouched`: and nothing of it had to be ended now.
    """
    glyphs = glyphs_for(console.encoding)
    leftovers = list(record.get("leftovers") or ())
    ours = [each for each in leftovers if not _is_others(each)]
    reason = str(record.get("end_reason") or "")
    level = "ok" if record.get("gpus_clean") is True and not ours else "warn"
    lost = record.get("state") == RunState.LOST.value
    sign, style = sign_of("fail" if lost or (reason and reason not in WELL_ENDED) else level, glyphs)
    words = end_text(reason) if reason else state_word(str(record.get("state")))
    ended = ended_text(reason, record.get("last_stage")) if reason else words
    if lost and (doing := last_stage_text("", record.get("last_stage"))):
        ended = f"{words}; its last sign of life came while {doing}"
    if had_ended:
        when = record.get("ended")
        ended = f"had already ended{f' at {when}' if when else ''}: {ended}"
    shown = f"{' ' if had_ended else ': '}{clean(ended)}"
    _print(console, Text.assemble((sign, style), " run ", (clean(record.get("run_id")), "bold"), shown))
    message = clean(record.get("message") or "")
    # gpus_clean speaks of processes and the accelerator: "left clean" would contradict the files named below it.
    files_only = record.get("gpus_clean") is True and ours
    verdict = "no process is left" if files_only else host_text(record)
    verdict = "" if verdict in message else verdict
    samples = record.get("samples")
    far = f"{count_text(samples['written'])} of {count_text(samples['expected'])} samples" if samples else ""
    untouched = untouched or (lost and not record.get("killed"))
    parts = ["nothing was stopped" if untouched else "", "" if message == words else message, far, verdict]
    forced = {each["pid"] for each in record.get("killed") or () if each.get("signal") == "SIGKILL"}
    if forced and not untouched:  # what is recorded was sent then
        parts.append(f"killed by force: {len(forced)}")
    _print(console, Text("  " + "; ".join(part for part in parts if part)))
    for leftover in ours:
        _print(console, Text.assemble(("  left: ", "yellow"), clean(_leftover_text(leftover))))
    for leftover in leftovers:
        if _is_others(leftover):
            _print(console, Text.assemble(("  not ours: ", "dim"), clean(_leftover_text(leftover))))


def _is_others(leftover: object) -> bool:
    """Whether it belongs to somebody else, who made it while the run went on; the run is clean all the same."""
    return isinstance(leftover, Mapping) and leftover.get("ours") is False


def _leftover_text(leftover: object) -> str:
    """Return `/dev/shm/x (in use by process 22222)`, or `1234 python (could not be killed)`."""
    if not isinstance(leftover, Mapping):
        return inline_text(leftover)
    named = [leftover["path"]] if leftover.get("path") else [leftover.get("pid"), leftover.get("comm")]
    what = " ".join(str(part) for part in named if part)
    return f"{what} ({leftover['reason']})" if leftover.get("reason") else what or inline_text(leftover)


def _print(console: Console, line: Text) -> None:
    console.print(Encodable(line), soft_wrap=True)

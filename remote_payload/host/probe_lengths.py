"""The `lengths` section: how many tokens the job will read, for what it will write and how long that takes."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any, Dict, Mapping, Optional

from remote_payload.host.lengths import Lengths, count_ids, measure
from remote_payload.host.sections import Note

WHOLE_BELOW = 16 << 20
"""Bytes of a file of token ids that is read whole: 16 MiB take about a second."""

RENDERED_FROM = 1 << 20
"""Bytes of chats from which on the host's Python renders a sample; below, a bound by the bytes says enough."""

TEMPLATE_TOKENS = 64
"""That a chat template adds to a conversation at most, for the bound: markers around a few turns."""

MEASURE_S = 8.0
START_S = 20.0
"""For the start of the environment's Python: importing transformers takes 3 to 10 s."""

PAYLOAD = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def probe_lengths(
    note: Note, spec: Mapping[str, Any], data: Mapping[str, Any], python: Optional[str], env: Dict[str, str]
) -> Dict[str, Any]:
    """Return {"lengths": see `Lengths`, or null, "error"}.

    `spec` holds what the job's ExtractSpec says of model and data, `data` is the section of that name. `python` null:
    only what needs no tokenizer. Raises OSError, subprocess.TimeoutExpired.
    """
    kind = data["kind"] if spec["data_kind"] == "auto" else spec["data_kind"]
    note(spec["data"])
    if data["container"] == "jsonl" and kind == "tokens":
        found = measure(
            spec["data"],
            count_ids(spec["max_seq_len"], spec["over_long"]),
            max_samples=spec["max_samples"],
            whole_below=WHOLE_BELOW,
            seconds=MEASURE_S,
        )
        return {"lengths": found.to_dict() if found else None, "error": None}
    lines = data["lines"]
    if data["container"] == "jsonl" and data["bytes"] < RENDERED_FROM and lines is not None:
        samples = lines if spec["max_samples"] is None else min(lines, spec["max_samples"])
        # Each token of a byte-level vocabulary is at least one byte of the text; JSON's own bytes come on top.
        bound = min(data["bytes"] + samples * TEMPLATE_TOKENS, samples * spec["max_seq_len"])
        return {"lengths": Lengths(samples, bound, 0, 0, 0, "bound").to_dict(), "error": None}
    if python is None:
        return {"lengths": None, "error": "the environment that renders chats is not there"}
    return _rendered(note, spec, python, env)


def _rendered(note: Note, spec: Mapping[str, Any], python: str, env: Dict[str, str]) -> Dict[str, Any]:
    note("%s -m remote_payload.extract.lengths" % python)
    request = json.dumps({**spec, "seconds": MEASURE_S})
    environ = {**os.environ, **env, "CTL_LENGTHS": request, "PYTHONPATH": PAYLOAD, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-m", "remote_payload.extract.lengths"], stdin=subprocess.DEVNULL, capture_output=True, env=environ,
        timeout=START_S + MEASURE_S, check=False, cwd="/",
    )  # fmt: skip
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith("ctl-lengths "):
            answer: Dict[str, Any] = json.loads(line.partition(" ")[2])
            return answer
    said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
    return {"lengths": None, "error": said[-1] if said else "exit code %d" % done.returncode}

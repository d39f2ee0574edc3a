"""A run folder on the workstation as a share of an extraction."""

from __future__ import annotations

import json

from controller.core.errors import UsageError
from controller.core.shares import Share
from controller.runfolder import RunFolder


def load_share(folder: RunFolder) -> Share:
    """Read a run's plan, summary and ledgers. Raises UsageError if it is no extraction."""
    plan = folder.read("plan.json") or {}
    spec = plan.get("extract")
    if not spec:
        raise UsageError(f"run {folder.run_id} is no extraction", fix="name runs of `ctl extract`")
    verify = folder.read("summary.json") or folder.read("verify.json") or {}
    lines = []
    for path in sorted((folder.path / "ledger").glob("*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # the last may not be copied whole yet
                lines.append(json.loads(line))
    return Share(
        run_id=folder.run_id,
        host=plan["host"]["name"],
        spec=spec,
        records=(verify.get("data") or {}).get("records"),
        ledger=lines,
    )

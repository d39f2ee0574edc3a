"""A run folder on the workstation as a share of an extraction."""

from __future__ import annotations

from controller.core.errors import UsageError
from controller.core.shares import Share, counted
from controller.recorded import last_progress, ledger_records
from controller.runfolder import RunFolder


def load_share(folder: RunFolder) -> Share:
    """Read a run's plan, summary, events and ledgers. Raises UsageError if it is no extraction.

    The verify step says of how many records its data set is; of a run that ended before it, its driver does.
    """
    plan = folder.read("plan.json") or {}
    spec = plan.get("extract")
    if not spec:
        raise UsageError(f"run {folder.run_id} is no extraction", fix="name runs of `ctl extract`")
    verify = folder.read("summary.json") or folder.read("verify.json") or {}
    records: int | None = (verify.get("data") or {}).get("records")
    at_least = records or 0
    if records is None:
        records, at_least = counted(last_progress(folder), spec["shard"])
    return Share(
        run_id=folder.run_id,
        host=plan["host"]["name"],
        spec=spec,
        records=records,
        at_least=at_least,
        ledger=[record for record, _ in ledger_records(folder)],
    )

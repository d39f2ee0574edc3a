"""What `ctl diff` does: two runs of this workstation, side by side where they differ."""

from __future__ import annotations

from typing import Any

from controller.afterwards import Afterwards
from controller.core.errors import ConfigError, ExitCode, UsageError
from controller.core.rundiff import compare
from controller.core.usage import usage
from controller.runfolder import RunFolder, find_run
from controller.ui.comparison import print_comparison
from controller.ui.terminal import out_console, print_json
from controller.workspace import Workspace, load_workspace


def diff(first: str, second: str, *, as_json: bool) -> ExitCode:
    """Print what changed from the first run to the second; nothing is asked of a host. Raises UsageError."""
    workspace = load_workspace()
    folders = [find_run(workspace.runs_dir, run_id) for run_id in (first, second)]
    plans = [folder.read("plan.json") for folder in folders]
    for folder, plan in zip(folders, plans, strict=True):
        if plan is None:
            raise folder.missing("plan.json", f"fetch it with `ctl attach {folder.run_id} --host HOST`")
    changes = compare(plans, [_summary(workspace, folder) for folder in folders])
    document = {
        "schema_version": 1,
        "runs": [folder.run_id for folder in folders],
        "ended": [folder.is_over for folder in folders],
        "same": not any(changes.values()),
        "changes": changes,
    }
    if as_json:
        print_json(document)
    else:
        print_comparison(out_console(), document)
    return ExitCode.OK


def _summary(workspace: Workspace, folder: RunFolder) -> dict[str, Any] | None:
    summary = folder.read("summary.json")
    if summary is None:
        return None
    plan = folder.read("plan.json") or {}
    try:
        price = Afterwards.of(workspace.config.host(plan["host"]["name"])).price_per_gpu_hour
    except (ConfigError, UsageError):
        price = None  # the host is not configured any more: its GPU-hours are known, their price is not
    return {**summary, **usage(plan, folder.read("result.json"), price)}

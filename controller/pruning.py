"""What `ctl prune` does: show which run folders of a host may go, ask, have the host delete those, and look again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller import contact
from controller.core.errors import ExitCode, UsageError
from controller.core.loglines import parse_span
from controller.history import entries
from controller.runfolder import RunFolder, list_runs
from controller.stages import prune as stage
from controller.ui.terminal import ask_yes_no, err_console, out_console, print_json, require_yes
from controller.workspace import load_workspace


def prune(
    host: str | None, *, older_than: str | None, keep: int | None, yes: bool, dry_run: bool, as_json: bool
) -> ExitCode:
    """Delete the folders of runs that are over from a host.

    Raises UsageError, RefusedError (nothing was deleted), RemoteFailed (`prune-incomplete`: not all of it was).
    """
    from controller.ui.pruned import folders_text, print_prunable, print_pruned

    if older_than is None and keep is None:
        raise UsageError(
            "nothing says which runs may go",
            fix="use `--older-than 30d`, `--keep 20`, or both: then what is old and not among the newest goes",
        )
    workspace = load_workspace()
    target = workspace.config.host(host)
    wanted = stage.Wanted(
        older_than_s=None if older_than is None else -parse_span(older_than, 0.0),
        keep=keep or 0,
        copied=copied_runs(workspace.runs_dir),
    )
    with contact.host_context(target, ask=ask_yes_no) as ctx:
        shown = stage.look(ctx, wanted)
        only_shown = dry_run or not shown["runs"]
        if not (only_shown and as_json):
            print_prunable(out_console() if only_shown else err_console(), target.name, shown)
        if only_shown:
            return _answer(_document(target.name, wanted, shown), as_json=as_json)
        if not yes:
            amount = folders_text(shown["runs"])
            require_yes(
                f"delete {amount} on {target.name}?",
                unattended=f"{amount} would go on {target.name}, and nobody is there to confirm",
                fix="add `--yes` to delete exactly what is listed",
                declined="nothing was deleted",
            )
        done = stage.run(ctx, wanted, shown)
    document = {
        **_document(target.name, wanted, shown),
        "deleted": [each["run_id"] for each in done["deleted"]],
        "deleted_entries": sum(each["entries"] for each in done["deleted"]),
        "deleted_bytes": sum(each["bytes"] for each in done["deleted"]),
    }
    if not as_json:
        print_pruned(out_console(), document)
    return _answer(document, as_json=as_json)


def copied_runs(runs_dir: Path) -> dict[str, dict[str, int]]:
    """Return {run_id: {relative path: bytes}} of the copies in `runs_dir`, and of those where runs were made.

    Of a run that is in several places, the place with the most.
    """
    found: dict[str, dict[str, int]] = {}
    for run in (*list_runs(runs_dir), *(RunFolder(Path(entry.folder)) for entry in entries())):
        held = run.mirror.held()
        if sum(held.values()) > sum(found.get(run.run_id, {}).values()):
            found[run.run_id] = held
    return found


def _document(host: str, wanted: stage.Wanted, shown: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "host": host,
        "older_than_s": wanted.older_than_s,
        "keep": wanted.keep,
        "runs": shown["runs"],
        "entries": sum(row["entries"] for row in shown["runs"]),
        "bytes": sum(row["bytes"] for row in shown["runs"]),
        "kept": shown["kept"],
        "deleted": [],
        "deleted_entries": 0,
        "deleted_bytes": 0,
    }


def _answer(document: dict[str, Any], *, as_json: bool) -> ExitCode:
    if as_json:
        print_json(document)
    return ExitCode.OK

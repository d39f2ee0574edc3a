"""What `ctl clear` does: show an output folder, ask, have the host delete what was shown, and look again."""

from __future__ import annotations

import shlex
from typing import Any

from controller import contact, pipeline
from controller.core.command import CommandPlaybook
from controller.core.errors import ExitCode, UsageError
from controller.core.outputs import owned_output, planned_output
from controller.stages import sweep
from controller.stages.sweep import Folder
from controller.ui.terminal import ask_yes_no, err_console, loss_question, out_console, require_yes
from controller.workspace import Workspace, load_workspace
from remote_payload.host.protocol import OwnedOutput, Stale


def clear(
    path: str | None, host: str | None, playbook: str | None, *, yes: bool, dry_run: bool, as_json: bool
) -> ExitCode:
    """Empty the output folder `path` of a host, or that of a playbook. Raises RefusedError, ConfigError."""
    from controller.ui.output import print_folder, print_swept

    workspace = load_workspace()
    target = workspace.config.host(host)
    output = _output(workspace, path, host, playbook)
    with contact.host_context(target, ask=ask_yes_no) as ctx:
        before = sweep.look(ctx, output)
        sweep.refuse(before)  # before it is said that anything will be deleted
        only_shown = dry_run or before.is_empty
        if not (only_shown and as_json):
            # What is asked about is talk; where nothing follows, it is the answer.
            console = out_console() if only_shown else err_console()
            print_folder(console, target.name, before.output, before.listing)
        if only_shown:
            return _answer(_document(target.name, before), as_json=as_json)
        if not yes:
            _confirm(target.name, before)
        report, after = sweep.run(ctx, before, pipeline.new_run_id())
    document = {
        **_document(target.name, before),
        "deleted_entries": report["deleted_entries"],
        "deleted_bytes": report["deleted_bytes"],
        "remaining": after.listing["entries"],
    }
    if not as_json:
        print_swept(out_console(), document)
    return _answer(document, as_json=as_json)


def _output(workspace: Workspace, path: str | None, host: str | None, playbook: str | None) -> OwnedOutput:
    target = workspace.config.host(host)
    if path is not None:
        return owned_output(
            target, target.resolve(path), stale=Stale.CLEAR.value, adopt=False, reads=(), where="change the path"
        )
    chosen = workspace.any_playbook(playbook, target)
    if isinstance(chosen, CommandPlaybook):
        folders = [shlex.quote(target.resolve(section.path)) for section in chosen.outputs]
        named = " or ".join(f"`ctl clear --host {shlex.quote(target.name)} {folder}`" for folder in folders)
        raise UsageError(
            f"playbook `{chosen.name}` is a command, of which no single folder is the output",
            fix=f"name the folder: {named}" if named else "name a folder: it has no [[outputs]]",
        )
    planned = planned_output(target, chosen, adopt=False)
    return {**planned, "stale": Stale.CLEAR.value}


def _confirm(host: str, folder: Folder) -> None:
    path, count = folder.output["path"], folder.output["entries"]
    require_yes(
        loss_question(host, folder.output, folder.listing, keepable=False),
        unattended=f"{path} on {host} holds {count:,} entries, and nobody is there to confirm",
        fix="add `--yes` to delete exactly what is listed",
        declined="nothing was deleted",
    )


def _document(host: str, folder: Folder) -> dict[str, Any]:
    listing = folder.listing
    return {
        "schema_version": 1,
        "host": host,
        "path": folder.output["path"],
        "root": folder.output["root"],
        "entries": listing["entries"],
        "bytes": listing["bytes"],
        "digest": listing["digest"],
        "marker": listing["marker"],
        "examples": listing["examples"],
        "not_ours": listing["not_ours"],
        "deleted_entries": 0,
        "deleted_bytes": 0,
        "remaining": listing["entries"],
    }


def _answer(document: dict[str, Any], *, as_json: bool) -> ExitCode:
    if as_json:
        from controller.ui.terminal import print_json

        print_json(document)
    return ExitCode.OK

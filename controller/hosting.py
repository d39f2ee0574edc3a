"""The verbs of `ctl hosts`: what is known of the hosts themselves, whatever runs there."""

from __future__ import annotations

import typer

from controller.app import guarded, hosts_app
from controller.options import JsonOption, VerboseOption


@hosts_app.callback(epilog="Example: ctl hosts")
def hosts(context: typer.Context, as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """List the hosts of the configuration, or act on one."""
    if context.invoked_subcommand is None:
        guarded(_list)(as_json=as_json, verbose=verbose)


def _list(as_json: bool = False, verbose: bool = False) -> None:
    from controller import commands

    commands.hosts(as_json=as_json)


def hosts_list(as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """List the hosts of the configuration."""
    _list(as_json=as_json)


hosts_app.command("list", epilog="Example: ctl hosts list --json")(guarded(hosts_list))

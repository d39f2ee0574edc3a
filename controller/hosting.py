"""The verbs of `ctl hosts` and `ctl init`: what is known of the hosts themselves, whatever runs there."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from controller import completion
from controller.app import command, guarded, hosts_app, subcommand
from controller.core.errors import ExitCode, UsageError
from controller.options import JsonOption, VerboseOption

AddressOption = Annotated[
    str | None,
    typer.Option("--address", metavar="[USER@]ADDRESS[:PORT]", help="Or an alias of your ssh configuration."),
]
PythonOption = Annotated[str | None, typer.Option("--python", help="Of the vLLM environment on the host.")]
WorkdirOption = Annotated[
    str | None, typer.Option("--workdir", help="Payloads and run folders on the host; default: ctl in its home.")
]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=1, help="How many GPUs the host has.")]
CpuOption = Annotated[bool, typer.Option("--cpu", help="The host has no GPU to use.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")]


DEFAULT_GPUS = 8
"""What `ctl init` assumes of a host whose GPUs nobody counted; it says so."""


@hosts_app.callback()
def hosts(context: typer.Context, as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """List the hosts of the configuration, or act on one."""
    if context.invoked_subcommand is None:
        guarded(_list)(as_json=as_json, verbose=verbose)


def _list(as_json: bool = False, verbose: bool = False) -> None:
    from controller import commands

    commands.hosts(as_json=as_json)


@subcommand(hosts_app, "list", examples=("ctl hosts list", "ctl hosts list --json"))
def hosts_list(as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """List the hosts of the configuration."""
    _list(as_json=as_json)


@subcommand(
    hosts_app,
    "add",
    examples=(
        "ctl hosts add gpu1 --address root@10.1.230.174 --gpus 8 --python /opt/vllm/bin/python --output-root /data",
        "ctl hosts add gpu2 --dry-run",
    ),
)
def hosts_add(
    name: Annotated[str, typer.Argument(help="What to call the host.")],
    address: AddressOption = None,
    python: PythonOption = None,
    gpus: GpusOption = None,
    cpu: CpuOption = False,
    gpu_name: Annotated[str | None, typer.Option("--gpu-name", help="As the driver reports it.")] = None,
    workdir: WorkdirOption = None,
    output_root: Annotated[
        list[str] | None,
        typer.Option("--output-root", help="A folder below which outputs may lie; may be repeated."),
    ] = None,
    playbook: Annotated[
        str | None, typer.Option("--playbook", help="Its playbook by default.", autocompletion=completion.playbooks)
    ] = None,
    own: Annotated[
        bool, typer.Option("--user", help="Into ~/.config/ctl/hosts.toml, not the project's file.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Append a host, with every key explained, to hosts.toml; the rest of the file stays as it is."""
    from controller import settingup
    from controller.core.templates import NewHost, split_address

    user, where, port = split_address(address or name)
    host = NewHost(
        name=name, address=where, user=user, port=port, python=python, workdir=workdir or settingup.workdir_of(user),
        output_roots=tuple(output_root or ()), gpus=_gpus(gpus, cpu=cpu), gpu_name=gpu_name, playbook=playbook,
    )  # fmt: skip
    path, text = settingup.add_host(host, own_file=own, dry_run=dry_run)
    _say([(str(path), text)], f"next: ctl hosts test {shlex.quote(name)}", dry_run=dry_run, as_json=as_json)


@subcommand(hosts_app, "test", examples=("ctl hosts test gpu1", "ctl hosts test gpu1 --json"))
def hosts_test(
    name: Annotated[
        str | None, typer.Argument(metavar="[HOST]", help="Default: CTL_HOST.", autocompletion=completion.hosts)
    ] = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Connect to a host, and look at its Pythons, vLLM, GPUs and folders in one round trip; nothing is changed."""
    from controller import commands

    return commands.hosts_test(name, as_json=as_json)


@command(
    "init",
    panel="Set up",
    examples=(
        "ctl init",
        "ctl init --address root@gpu1 --python /opt/vllm/bin/python --model /models/Kimi-K2.5 --data local:a.jsonl",
    ),
)
def init(
    address: AddressOption = None,
    python: PythonOption = None,
    model: Annotated[str | None, typer.Option("--model", help="The model's folder on the host.")] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="The data set: a path on the host, or local:PATH.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call the host; default: its address.")] = None,
    gpus: GpusOption = None,
    cpu: CpuOption = False,
    workdir: WorkdirOption = None,
    output_root: Annotated[
        str | None, typer.Option("--output-root", help="Where outputs may lie; default: output in the workdir.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a commented hosts.toml and playbook into this folder by asking four questions; overwrites nothing."""
    from controller import settingup
    from controller.ui.terminal import can_ask

    answers = settingup.Answers(address=address, python=python, model=model, data=data)
    count = _gpus(gpus, cpu=cpu)
    host, texts = settingup.init(
        answers,
        name=name,
        gpus=DEFAULT_GPUS if count is None else count,
        workdir=workdir,
        output_root=output_root,
        prompt=settingup.ask if can_ask() and not as_json else None,
        dry_run=dry_run,
    )
    assumed = settingup.assumptions(texts) if count is None else []
    told = ["assumed, so check it before the first run:", *(f"  {line}" for line in assumed)] if assumed else []
    _say(
        [(str(path), text) for path, text in texts],
        "\n".join([*told, f"next: ctl hosts test {shlex.quote(host)}, then ctl plan --host {shlex.quote(host)}"]),
        dry_run=dry_run,
        as_json=as_json,
    )


def _gpus(gpus: int | None, *, cpu: bool) -> int | None:
    if cpu and gpus:
        raise UsageError("--cpu and --gpus contradict each other", fix="leave one of them out")
    return 0 if cpu else gpus


def _say(written: list[tuple[str, str]], after: str, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        from controller.ui.terminal import print_json

        files = [{"path": path, "text": text} for path, text in written]
        print_json({"schema_version": 1, "written": not dry_run, "files": files})
        return
    for path, text in written:
        print(f"# {path}\n{text}" if dry_run else f"wrote {path}")
    if not dry_run:
        print(after, file=sys.stderr)

"""The verbs that look: plan, preflight, ps, logs, summary and the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controller import completion
from controller.app import command, config_app, guarded, ledger_app
from controller.core.errors import ExitCode, UsageError
from controller.options import (
    AdoptOption,
    AllowOption,
    CanaryOption,
    CaptureOption,
    ConventionOption,
    DataOption,
    FormatOption,
    HostOption,
    HostsOption,
    JsonOption,
    KindOption,
    LastOption,
    LayersOption,
    OutputOption,
    PlaybookOption,
    ProgressOption,
    RehearseOption,
    RunArgument,
    SamplesOption,
    ShardOption,
    StaleOption,
    StoreOption,
    VerboseOption,
    make_overrides,
)


@command("plan", panel="Look", epilog="Example: ctl plan --host 10.1.230.174")
def plan(
    host: HostOption = None,
    playbook: PlaybookOption = None,
    stale: StaleOption = None,
    adopt: AdoptOption = False,
    max_samples: SamplesOption = None,
    output: OutputOption = None,
    capture: CaptureOption = None,
    data: DataOption = None,
    data_kind: KindOption = None,
    output_format: FormatOption = None,
    store_dtype: StoreOption = None,
    boundaries: LayersOption = None,
    layer_convention: ConventionOption = None,
    shard: ShardOption = None,
    no_canary: CanaryOption = False,
    rehearse: RehearseOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Print what `extract` would do, without connecting: uploads, argv, environment, deletions, bytes."""
    from controller import commands

    overrides = make_overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, output_format=output_format, store_dtype=store_dtype, boundaries=boundaries,
        layer_convention=layer_convention, shard=shard, canary=False if no_canary else None, rehearse=rehearse,
    )  # fmt: skip
    intention = commands.plan_extract(host, playbook, overrides)
    commands.show_plan(intention, as_json=as_json)


def preflight(
    host: HostsOption = None,
    playbook: PlaybookOption = None,
    stale: StaleOption = None,
    adopt: AdoptOption = False,
    output: OutputOption = None,
    data: DataOption = None,
    allow: AllowOption = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Stop and delete what dead runs of yours left there, after showing it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --fix: do what is shown, without asking.")] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Look at hosts and say whether the extraction can run there; only --fix changes anything."""
    from controller import checkup, commands

    overrides = make_overrides(stale=stale, adopt=adopt, output=output, data=data)
    hosts: list[str | None] = list(host or ()) or [None]  # None: the setting
    intentions = [commands.plan_extract(one, playbook, overrides, allow=allow or ()) for one in hosts]
    if fix:
        return checkup.fix(intentions, yes=yes, as_json=as_json)
    return checkup.preflight(intentions, as_json=as_json)


@command("rehearse", panel="Look", epilog="Example: ctl rehearse --host 10.1.230.174")
def rehearse(
    host: HostOption = None,
    playbook: PlaybookOption = None,
    capture: CaptureOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the host has confirmed.")] = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Try the whole extraction on a model cut from the real one: about a minute that may save a long load."""
    from controller import commands

    intention = commands.plan_rehearsal(host, playbook, capture=capture)
    return commands.launch_and_watch(intention, yes=True, detach=detach, progress=progress, as_json=as_json)


command("preflight", panel="Look", epilog="Example: ctl preflight --host 10.1.230.174")(preflight)
command("doctor", panel="Look", hidden=True)(preflight)


@command("ps", panel="Look", epilog="Example: ctl ps --host 10.1.230.174")
def ps(host: HostOption = None, as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """List the runs of a host, and who holds its GPUs."""
    from controller import commands

    commands.ps(host, as_json=as_json)


@command("logs", panel="Look", epilog="Example: ctl logs --last --follow")
def logs(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last N lines.")] = None,
    problem: Annotated[bool, typer.Option("--problem", help="Only the lines around what the run failed of.")] = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Print the job's raw output, fetching first what is new on the host."""
    from controller import commands

    return commands.logs(None if last else run_id, host, follow=follow, tail=tail, problem=problem)


@command("triage", panel="Look", epilog="Example: ctl triage vllm.log")
def triage(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Logs of vLLM, one a process or node, or one run folder.")
    ],
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Name the cause of a failure from its log, also from one that ctl did not make."""
    from controller import commands

    return commands.triage(files, as_json=as_json)


@command("summary", panel="Look", epilog="Example: ctl summary --last --json")
def summary(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Show what a run wrote: samples, tokens, shapes, norms, NaN counts, problems."""
    from controller import commands

    return commands.summary(None if last else run_id, host, as_json=as_json)


@command("hosts", panel="Look", epilog="Example: ctl hosts")
def hosts(as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """List the hosts of the configuration."""
    from controller import commands

    commands.hosts(as_json=as_json)


def ledger_merge(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run ids, or parts of them.")],
    output: Annotated[str | None, typer.Option("--output", help="Write the joined ledger here, as JSONL.")] = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Join the ledgers of shards, and show holes and doubles."""
    from controller import commands

    return commands.merge_ledgers(run_ids, output=output, as_json=as_json)


ledger_app.command("merge")(guarded(ledger_merge))


@command("help", panel="Look", epilog="Example: ctl help exit-codes")
def help_topic(
    topic: Annotated[str | None, typer.Argument(help="What to explain.", autocompletion=completion.topics)] = None,
    verbose: VerboseOption = False,
) -> None:
    """Explain what belongs to no single verb: exit-codes, environment, json, boundaries."""
    from controller.core.suggest import did_you_mean
    from controller.topics import TOPICS

    if topic is None:
        print("topics: " + ", ".join(TOPICS))
        return
    if topic not in TOPICS:
        raise UsageError(f"no topic `{topic}`", fix=did_you_mean(topic, TOPICS, kind="topics"))
    print(TOPICS[topic], end="")


def config_show(as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """Print every value of the configuration with its origin."""
    from controller import commands

    commands.config_show(as_json=as_json)


config_app.command("show")(guarded(config_show))

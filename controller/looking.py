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
    host: HostOption = None,
    playbook: PlaybookOption = None,
    stale: StaleOption = None,
    adopt: AdoptOption = False,
    output: OutputOption = None,
    data: DataOption = None,
    allow: AllowOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Look at a host and say whether the extraction can run there; nothing is changed but what is pushed."""
    from controller import commands

    overrides = make_overrides(stale=stale, adopt=adopt, output=output, data=data)
    intention = commands.plan_extract(host, playbook, overrides, allow=allow or ())
    return commands.preflight(intention, as_json=as_json)


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


@command("stacks", panel="Look", epilog="Example: ctl stacks --last")
def stacks(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Show what every Python process of a living run is doing (needs py-spy on the host); nothing is stopped."""
    from controller import commandverbs

    return commandverbs.show_stacks(None if last else run_id, host, as_json=as_json)


@command("replay", panel="Look", epilog="Example: ctl replay --last --speed 20")
def replay(
    run_id: RunArgument = None,
    last: LastOption = False,
    speed: Annotated[
        float,
        typer.Option("--speed", min=0, help="Recorded seconds a second; 0: all at once."),
    ] = 10.0,
    at: Annotated[str, typer.Option("--at", help="Begin there: 90s, 12m, 1h, 40% or end.")] = "0",
    progress: ProgressOption = "auto",
    verbose: VerboseOption = False,
) -> ExitCode:
    """Play a recorded run, or the folder of one, through the dashboard, at the times of then."""
    from controller import viewing

    return viewing.replay(None if last else run_id, speed=speed, at=at, progress=progress)


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
    """Show what a run wrote: samples or files, shapes, dtypes, norms, NaN counts, problems."""
    from controller import commands

    return commands.summary(None if last else run_id, host, as_json=as_json)


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
    """Explain what belongs to no single verb: exit-codes, environment, json, run, boundaries."""
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

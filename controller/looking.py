"""The verbs that look: plan, preflight, ps, logs, summary and the configuration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller import completion
from controller.app import MEANT, app, command, config_app, ledger_app, subcommand, verbs
from controller.core.errors import ExitCode, UsageError
from controller.options import (
    AdoptOption,
    AllowOption,
    CanaryOption,
    CaptureOption,
    ConventionOption,
    DataOption,
    DetachOption,
    DryRunOption,
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
    QuietOption,
    RehearseOption,
    RunArgument,
    SamplesOption,
    ShardOption,
    StaleOption,
    StoreOption,
    VerboseOption,
    chosen_run,
    make_overrides,
    view_mode,
)

if TYPE_CHECKING:
    from controller.pipeline import Intention


@command(
    "plan", panel="Look", examples=("ctl plan --host gpu1", "ctl plan --host gpu1 --playbook eagle3-kimi-k2.5 --json")
)
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

    overrides = make_overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, output_format=output_format, store_dtype=store_dtype, boundaries=boundaries,
        layer_convention=layer_convention, shard=shard, canary=False if no_canary else None, rehearse=rehearse,
    )  # fmt: skip

    def plan_on(one: str | None) -> Intention:
        return commands.plan_extract(one, playbook, overrides, allow=allow or ())

    hosts: list[str | None] = list(dict.fromkeys(host or ())) or [None]  # None: the setting
    if fix:  # what cannot be planned for one host is said before anything is cleared on another
        return checkup.fix([plan_on(one) for one in hosts], yes=yes, as_json=as_json)
    planned = checkup.plan_each(host, plan_on) if host else [plan_on(None)]
    return checkup.preflight(planned, as_json=as_json)


@command("rehearse", panel="Look", examples=("ctl rehearse --host gpu1",))
def rehearse(
    host: HostOption = None,
    playbook: PlaybookOption = None,
    capture: CaptureOption = None,
    detach: DetachOption = False,
    dry_run: DryRunOption = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = 0,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Try the whole extraction on a model cut from the real one: about a minute that may save a long load."""
    from controller import commands

    view = view_mode(progress, quiet=quiet, verbose=verbose, as_json=as_json)
    intention = commands.plan_rehearsal(host, playbook, capture=capture)
    if dry_run:
        commands.show_plan(intention, as_json=as_json)
        return ExitCode.OK
    return commands.launch_and_watch(intention, yes=True, detach=detach, progress=view, as_json=as_json)


command(
    "preflight", panel="Look", examples=("ctl preflight --host gpu1", "ctl preflight --host gpu1 --json | jq .ok")
)(preflight)
command("doctor", panel="Look", hidden=True)(preflight)


@command(
    "ps",
    panel="Look",
    examples=("ctl ps --host gpu1", "ctl ps --host gpu1 --limit 10", "ctl ps --host gpu1 --running --json"),
)
def ps(
    host: HostOption = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Only the newest N runs.")] = None,
    running: Annotated[bool, typer.Option("--running", help="Only runs that are not over.")] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """List the runs of a host, and who holds its GPUs."""
    from controller import commands

    commands.ps(host, limit=limit, running=running, as_json=as_json)


@command(
    "logs",
    panel="Look",
    examples=(
        "ctl logs --last --follow",
        "ctl logs --last --tail 50 --rank 3",
        "ctl logs 2562e8 --since 10m --timestamps --search 'error|warn'",
        "ctl logs --last --problem",
    ),
)
def logs(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last N lines.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="SPAN", help="Only what was printed since 90s, 5m, 1h30m ago.")
    ] = None,
    since_time: Annotated[
        str | None, typer.Option("--since-time", metavar="TIME", help="Only since 2026-11-29T21:45:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Only up to that time.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only lines of this rank's process.")] = None,
    search: Annotated[
        str | None,
        typer.Option("--search", metavar="REGEX", help="Only lines that match; case counts if it has capitals."),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Put the host's time before each line, right to a second.")
    ] = False,
    prefix: Annotated[bool, typer.Option("--prefix", help="Put the process's name before each line.")] = False,
    problem: Annotated[bool, typer.Option("--problem", help="Only the lines around what the run failed of.")] = False,
    previous: Annotated[bool, typer.Option("--previous", help="Of the run before this one.")] = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Print the job's raw output, or the lines wanted of it, fetching first what is new on the host."""
    from controller import reading
    from controller.core import loglines

    if since and since_time:
        raise UsageError("--since and --since-time say the same", fix="leave one of them out")
    begin = loglines.parse_span(since, time.time()) if since else None
    selection = loglines.Selection(
        since=loglines.parse_moment(since_time) if since_time else begin,
        until=loglines.parse_moment(until) if until else None,
        rank=rank,
        search=loglines.parse_pattern(search) if search else None,
        timestamps=timestamps,
        prefix=prefix,
    )
    wanted = reading.Wanted(selection=selection, follow=follow, tail=tail, problem=problem, previous=previous)
    return reading.logs(chosen_run(run_id, last=last), host, wanted)


@command("stacks", panel="Look", examples=("ctl stacks --last", "ctl stacks 2562e8 --json"))
def stacks(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Show what every Python process of a living run is doing (needs py-spy on the host); nothing is stopped."""
    from controller import commandverbs

    return commandverbs.show_stacks(chosen_run(run_id, last=last), host, as_json=as_json)


@command("replay", panel="Look", examples=("ctl replay --last --speed 20", "ctl replay 2562e8 --at 40%"))
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

    return viewing.replay(chosen_run(run_id, last=last), speed=speed, at=at, progress=progress)


@command(
    "triage",
    panel="Look",
    examples=("ctl triage vllm.log", "ctl triage node0.log node1.log --json", "ctl triage 2562e8"),
)
def triage(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Logs of vLLM, one a process or node; or one run: its folder, its id, or a part of that.",
        ),
    ],
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Name the cause of a failure from its log, also from one that ctl did not make."""
    from controller import commands

    return commands.triage(files, as_json=as_json)


@command("summary", panel="Look", examples=("ctl summary --last", "ctl summary 2562e8 --json | jq .samples"))
def summary(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Show what a run wrote: samples or files, shapes, dtypes, norms, NaN counts, problems."""
    from controller import ending

    return ending.summary(chosen_run(run_id, last=last), host, as_json=as_json)


@command("report", panel="Look", examples=("ctl report --last --open", "ctl report 9a7b41 -o run.html"))
def report(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: report.html in ctl-runs/RUN/.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Write a run as one HTML file that needs no network: stages, GPUs, norms, samples, problems, repetition."""
    from controller import reporting

    return reporting.report(chosen_run(run_id, last=last), host, output=output, show=show, as_json=as_json)


@command("diff", panel="Look", examples=("ctl diff 2562e8 9a7b41", "ctl diff 2562e8 9a7b41 --json | jq .changes"))
def diff(
    first: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The earlier run, or a part of its id.", autocompletion=completion.runs),
    ],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The later run.", autocompletion=completion.runs)],
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Show what changed from one run to another: plan, versions, end, figures."""
    from controller import comparing

    return comparing.diff(first, second, as_json=as_json)


def ledger_merge(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run ids, or parts of them.")],
    output: Annotated[str | None, typer.Option("--output", help="Write the joined ledger here, as JSONL.")] = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Join the ledgers of shards, and show holes and doubles."""
    from controller import commands

    return commands.merge_ledgers(run_ids, output=output, as_json=as_json)


subcommand(
    ledger_app,
    "merge",
    examples=("ctl ledger merge 2562e8 9a7b41", "ctl ledger merge 2562e8 9a7b41 --output all.jsonl"),
)(ledger_merge)


def _topics_and_verbs(incomplete: str) -> list[str]:
    return [*completion.topics(incomplete), *(verb for verb in verbs() if verb.startswith(incomplete))]


@command("help", panel="Look", examples=("ctl help exit-codes", "ctl help extract", "ctl help hosts add"))
def help_topic(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC or VERB]", help="What to explain.", autocompletion=_topics_and_verbs),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Explain a verb, or a topic: exit-codes, environment, json, runs, run, boundaries, hooks."""
    from controller.core.suggest import did_you_mean
    from controller.topics import TOPICS
    from controller.ui.terminal import out_console
    from controller.ui.wrapping import wrapped_page

    topic = " ".join(words or ())
    if not topic:
        print(f"topics: {', '.join(TOPICS)}\nverbs: {', '.join(verbs())}")
    elif topic in TOPICS:
        print(wrapped_page(TOPICS[topic], out_console()), end="")
    elif words and words[0] in verbs():
        app([*words, "--help"], prog_name="ctl", standalone_mode=False)
    else:
        known = (*TOPICS, *verbs())
        raise UsageError(f"no topic or verb `{topic}`", fix=did_you_mean(topic, known, kind="topics", meant=MEANT))


def config_show(as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """Print every value of the configuration with its origin."""
    from controller import commands

    commands.config_show(as_json=as_json)


subcommand(config_app, "show", examples=("ctl config show", "ctl config show --json"))(config_show)

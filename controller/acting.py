"""The verbs that act on a host: extract, run, attach, stop and what belongs to them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from controller import completion
from controller.app import Verb, command
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
    ExtractionArgument,
    FormatOption,
    HostOption,
    JsonOption,
    KindOption,
    LastExtractionOption,
    LastOption,
    LayersOption,
    OutputOption,
    PlaybookOption,
    ProgressOption,
    QuietOption,
    RehearseOption,
    RunArgument,
    RunsArgument,
    SamplesOption,
    ShardOption,
    StaleOption,
    StoreOption,
    VerboseOption,
    WaitOption,
    YesOption,
    chosen_run,
    make_overrides,
    view_mode,
)


@command(
    "extract",
    panel="Run",
    examples=(
        "ctl extract --host gpu1",
        "ctl extract --host gpu1 --playbook eagle3-kimi-k2.5 --max-samples 100 --stale clear",
        "ctl extract --host gpu1 --dry-run          (=server: look at the host too)",
        "ctl extract --host gpu1 --yes --detach --json",
    ),
)
def extract(
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
    allow: AllowOption = None,
    yes: YesOption = False,
    wait: WaitOption = False,
    detach: DetachOption = False,
    dry_run: DryRunOption = False,
    dry_run_server: Annotated[bool, typer.Option("--dry-run-server", hidden=True)] = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = 0,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Check a host, push the payload, launch an extraction, watch it, and bring its summary back."""
    from controller import commands

    view = view_mode(progress, quiet=quiet, verbose=verbose, as_json=as_json)
    overrides = make_overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, output_format=output_format, store_dtype=store_dtype, boundaries=boundaries,
        layer_convention=layer_convention, shard=shard, canary=False if no_canary else None, rehearse=rehearse,
    )  # fmt: skip
    intention = commands.plan_extract(host, playbook, overrides, allow=allow or (), wait=wait)
    if dry_run:
        commands.show_plan(intention, as_json=as_json)
        return ExitCode.OK
    if dry_run_server:
        from controller import checkup

        return checkup.preflight([intention], as_json=as_json)
    return commands.launch_and_watch(intention, yes=yes, detach=detach, progress=view, as_json=as_json)


@command(
    "convert",
    panel="Run",
    examples=(
        "ctl convert --last --to specforge",
        "ctl convert 2562e8 --to modelopt --output /data/out/modelopt --dry-run",
    ),
)
def convert(
    to: Annotated[str, typer.Option("--to", help="speculators, speculators-0.3, specforge or modelopt.")],
    run_id: ExtractionArgument = None,
    last: LastExtractionOption = False,
    host: HostOption = None,
    output: OutputOption = None,
    stale: Annotated[str, typer.Option("--stale", help="Files in the output: fail, clear or quarantine.")] = "fail",
    adopt: AdoptOption = False,
    yes: YesOption = False,
    detach: DetachOption = False,
    dry_run: DryRunOption = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = 0,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Write a run's samples anew in another trainer's format, on the host; refused where something would be lost."""
    from controller import commands, commandverbs

    view = view_mode(progress, quiet=quiet, verbose=verbose, as_json=as_json)
    intention = commandverbs.plan_convert(
        chosen_run(run_id, last=last), host, to=to, output=output, stale=stale, adopt=adopt
    )
    if dry_run:
        commands.show_plan(intention, as_json=as_json)
        return ExitCode.OK
    return commands.launch_and_watch(intention, yes=yes, detach=detach, progress=view, as_json=as_json)


class RunCommand(Verb):
    """`ctl run [PLAYBOOK] [OPTIONS] [-- WORD...]`: what stands after the first `--` is never parsed here.

    `ctx` is click's context, which newer typers bring along under a private name.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        cut = words.index("--") if "--" in words else len(words)
        ctx.meta[AFTER_DASHES] = words[cut + 1 :]
        return super().parse_args(ctx, words[:cut])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- WORD...]"]


AFTER_DASHES = "ctl.after-dashes"
"""Key of the click context: the words after `--`, as they are."""


@command(
    "run",
    panel="Run",
    examples=(
        "ctl run --host gpu1 -- nvidia-smi",
        "ctl run --host gpu1 --name train --detach -- python train.py --epochs 3",
        "ctl run speculators-train --host gpu1 -- --epochs 3",
    ),
    cls=RunCommand,
)
def run(
    context: typer.Context,
    playbook: Annotated[
        str | None,
        typer.Argument(
            metavar="[PLAYBOOK]",
            help='A playbook of kind "command"; the words after `--` are then added to its own. Without one they are '
            "the command.",
            autocompletion=completion.playbooks,
        ),
    ] = None,
    host: HostOption = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call the run; default: the command.")] = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", help="Folder on the host to run in; default: its workdir.")
    ] = None,
    tracebacks: Annotated[
        bool, typer.Option("--tracebacks", help="Hook every Python process of it: whole tracebacks, with ranks.")
    ] = False,
    stale: StaleOption = None,
    adopt: AdoptOption = False,
    allow: AllowOption = None,
    yes: YesOption = False,
    wait: WaitOption = False,
    detach: DetachOption = False,
    dry_run: DryRunOption = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = 0,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Run a command playbook, or any command, under the same care: lease, supervision, exact logs, a clean end."""
    from controller import commands, commandverbs

    view = view_mode(progress, quiet=quiet, verbose=verbose, as_json=as_json)
    words = list(context.meta[AFTER_DASHES])
    if playbook is None:
        for flag, given in (("--stale", stale), ("--adopt", adopt)):
            if given:
                raise UsageError(f"`{flag}` is for a playbook's outputs", fix="a one-off command owns none")
        intention = commandverbs.plan_command(host, words, name=name, cwd=cwd, wait=wait, tracebacks=tracebacks)
    else:
        for flag, value in (("--name", name), ("--cwd", cwd), ("--tracebacks", tracebacks)):
            if value:
                raise UsageError(f"`{flag}` is for a command without a playbook", fix="set it in the playbook")
        intention = commandverbs.plan_command_playbook(
            host, playbook, words, stale=stale, adopt=adopt, allow=allow or (), wait=wait
        )
    if dry_run:
        commands.show_plan(intention, as_json=as_json)
        return ExitCode.OK
    return commands.launch_and_watch(intention, yes=yes, detach=detach, progress=view, as_json=as_json)


@command(
    "attach",
    panel="Run",
    examples=("ctl attach --last", "ctl attach 2562e8 --host gpu1      (a run that was launched elsewhere)"),
)
def attach(
    run_ids: RunsArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = 0,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Watch a run that is under way, or several; what was missed is caught up."""
    from controller import commands

    view = view_mode(progress, quiet=quiet, verbose=verbose, as_json=as_json)
    if last or not run_ids:
        wanted: list[str | None] = [chosen_run(" ".join(run_ids or ()) or None, last=last)]
    else:
        wanted = list(dict.fromkeys(run_ids))
    return commands.attach(wanted, host, progress=view, as_json=as_json)


@command("stop", panel="Run", examples=("ctl stop --last", "ctl stop 2562e8 --grace 120"))
def stop(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    grace: Annotated[float, typer.Option("--grace", min=0, help="Seconds between TERM and KILL.")] = 30.0,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Stop a run: TERM, grace, KILL over its whole process tree, then proof that nothing is left.

    Without a run and without --last it asks whether the last one is meant; without a terminal it refuses.
    """
    from controller import stopping

    named = chosen_run(run_id, last=last)
    return stopping.stop(named, host, grace_s=grace, as_json=as_json, sure=last or named is not None)


@command(
    "clear",
    panel="Run",
    examples=(
        "ctl clear --host gpu1                     (the output folder of the host's playbook)",
        "ctl clear --host gpu1 /data/out/kimi --dry-run",
        "ctl clear --host gpu1 --playbook eagle3-kimi-k2.5 --yes --json",
    ),
)
def clear(
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="The folder on the host; default: the playbook's output.")
    ] = None,
    host: HostOption = None,
    playbook: PlaybookOption = None,
    yes: YesOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the folder holds, and delete nothing.")
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Empty an output folder: show what it holds, ask, delete exactly that, and look again."""
    from controller import clearing

    return clearing.clear(path, host, playbook, yes=yes, dry_run=dry_run, as_json=as_json)


@command(
    "prune",
    panel="Run",
    examples=(
        "ctl prune --host gpu1 --older-than 30d --dry-run",
        "ctl prune --host gpu1 --older-than 30d --keep 20      (old ones, less the newest 20)",
        "ctl prune --host gpu1 --keep 20 --yes --json",
    ),
)
def prune(
    host: HostOption = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Runs that ended longer ago: 30d, 12h, 1h30m.")
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", min=0, help="Keep the newest N runs of the host.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete what is shown, without asking.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which run folders would go, and delete nothing.")
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Delete the folders of ended runs from a host: show them, ask, delete exactly those, and look again.

    Outputs are never touched, and a folder that may still be needed stays: docs/operations.md says when.
    """
    from controller import pruning

    return pruning.prune(host, older_than=older_than, keep=keep, yes=yes, dry_run=dry_run, as_json=as_json)

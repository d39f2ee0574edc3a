"""The command line: typer commands, and the only place where exceptions become exit codes.

Nothing heavy is imported at module level: `ctl --help` and completion must answer at once, so every command
imports what it needs when it runs.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec

import typer

from controller import completion
from controller.core.errors import CtlError, ExitCode, UsageError
from controller.options import (
    AdoptOption,
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
    RunArgument,
    SamplesOption,
    ShardOption,
    StaleOption,
    StoreOption,
    VerboseOption,
    YesOption,
    make_overrides,
)

P = ParamSpec("P")

app = typer.Typer(
    name="ctl",
    help="Operate long GPU extractions of hidden states on hosts you reach by SSH.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config", rich_help_panel="Look")
ledger_app = typer.Typer(help="Work with the ledgers of runs.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger", rich_help_panel="Look")


def command(
    name: str, *, panel: str, epilog: str = "", **settings: Any
) -> Callable[[Callable[P, ExitCode | None]], Callable[P, None]]:
    """Register a command whose exceptions are mapped to a message and an exit code here, and nowhere else."""

    def register(body: Callable[P, ExitCode | None]) -> Callable[P, None]:
        return app.command(name, rich_help_panel=panel, epilog=epilog, **settings)(_guarded(body))

    return register


def _guarded(body: Callable[P, ExitCode | None]) -> Callable[P, None]:
    @functools.wraps(body)
    def mapped(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(_mapped(body, *args, **kwargs))

    return mapped


def _mapped(body: Callable[P, ExitCode | None], *args: P.args, **kwargs: P.kwargs) -> int:
    as_json, verbose = bool(kwargs.get("as_json")), bool(kwargs.get("verbose"))
    try:
        return int(body(*args, **kwargs) or ExitCode.OK)
    except CtlError as error:
        if verbose:
            traceback.print_exc()
        _show_error(error, as_json=as_json)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted: nothing was launched", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout went away (`ctl logs | head`): not an error, and nothing can be written any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except Exception as error:  # noqa: BLE001 - the last resort, and it reports everything
        traceback.print_exc()
        _show_error(
            CtlError(
                f"unexpected {type(error).__name__}: {error}",
                why="this is a defect of ctl; a run that was launched goes on",
                fix="please report the traceback above with the output of `ctl --version`",
            ),
            as_json=as_json,
        )
        return int(ExitCode.UNEXPECTED)


def _show_error(error: CtlError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"schema_version": 1, "error": error.to_dict()}, default=str))
        return
    from controller.ui.errors import print_error

    print_error(error)


def _version(wanted: bool) -> None:
    if wanted:
        from controller.version import version

        print(f"ctl {version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Operate long GPU extractions of hidden states on hosts you reach by SSH."""


# ------------------------------------------------------------------------------------------------- run


@command("extract", panel="Run", epilog="Example: ctl extract --host 10.1.230.174 --playbook eagle3-kimi-k2.5")
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
    yes: YesOption = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the host has confirmed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Same as `ctl plan`.")] = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Check a host, push the payload, launch an extraction, watch it, and bring its summary back."""
    from controller import commands

    overrides = make_overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, output_format=output_format, store_dtype=store_dtype, boundaries=boundaries,
        layer_convention=layer_convention, shard=shard,
    )  # fmt: skip
    intention = commands.plan_extract(host, playbook, overrides)
    if dry_run:
        commands.show_plan(intention, as_json=as_json)
        return ExitCode.OK
    return commands.launch_and_watch(intention, yes=yes, detach=detach, progress=progress, as_json=as_json)


@command("convert", panel="Run", epilog="Example: ctl convert --last --to specforge")
def convert(
    to: Annotated[str, typer.Option("--to", help="speculators, speculators-0.3, specforge or modelopt.")],
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    output: OutputOption = None,
    stale: Annotated[str, typer.Option("--stale", help="Files in the output: fail, clear or quarantine.")] = "fail",
    adopt: AdoptOption = False,
    yes: YesOption = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the host has confirmed.")] = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Write a run's samples anew in another trainer's format, on the host; refused where something would be lost."""
    from controller import commands

    intention = commands.plan_convert(None if last else run_id, host, to=to, output=output, stale=stale, adopt=adopt)
    return commands.launch_and_watch(intention, yes=yes, detach=detach, progress=progress, as_json=as_json)


@command(
    "run",
    panel="Run",
    epilog="Example: ctl run --host gpu1 -- python train.py --epochs 3",
    context_settings={"ignore_unknown_options": True},
)
def run(
    argv: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")],
    host: HostOption = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call the run; default: the command.")] = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", help="Folder on the host to run in; default: its workdir.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the host has confirmed.")] = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Run any command on a host under the same care: lease, supervision, exact logs, a clean end."""
    from controller import commands

    intention = commands.plan_command(host, argv, name=name, cwd=cwd)
    return commands.launch_and_watch(intention, yes=True, detach=detach, progress=progress, as_json=as_json)


@command("attach", panel="Run", epilog="Example: ctl attach --last")
def attach(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Watch a run that is under way, from this or another workstation; what was missed is caught up."""
    from controller import commands

    return commands.attach(None if last else run_id, host, progress=progress, as_json=as_json)


@command("stop", panel="Run", epilog="Example: ctl stop --last")
def stop(
    run_id: RunArgument = None,
    last: LastOption = False,
    host: HostOption = None,
    grace: Annotated[float, typer.Option("--grace", min=0, help="Seconds between TERM and KILL.")] = 30.0,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Stop a run: TERM, grace, KILL over its whole process tree, then proof that nothing is left."""
    from controller import commands

    return commands.stop(None if last else run_id, host, grace_s=grace, as_json=as_json)


# ------------------------------------------------------------------------------------------------ look


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
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Print what `extract` would do, without connecting: uploads, argv, environment, deletions, bytes."""
    from controller import commands

    overrides = make_overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, output_format=output_format, store_dtype=store_dtype, boundaries=boundaries,
        layer_convention=layer_convention, shard=shard,
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
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Look at a host and say whether the extraction can run there; nothing is changed but what is pushed."""
    from controller import commands

    overrides = make_overrides(stale=stale, adopt=adopt, output=output, data=data)
    intention = commands.plan_extract(host, playbook, overrides)
    return commands.preflight(intention, as_json=as_json)


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
    verbose: VerboseOption = False,
) -> ExitCode:
    """Print the job's raw output, fetching first what is new on the host."""
    from controller import commands

    return commands.logs(None if last else run_id, host, follow=follow, tail=tail)


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


ledger_app.command("merge")(_guarded(ledger_merge))


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


config_app.command("show")(_guarded(config_show))


def main() -> None:
    """Entry point of the `ctl` command."""
    app(prog_name="ctl")

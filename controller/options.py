"""The options that commands share, and flags of an extraction as overrides of its playbook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from controller import completion
from controller.core.errors import UsageError
from controller.core.setting import Setting
from controller.core.suggest import did_you_mean

if TYPE_CHECKING:
    from controller.core.model import Overrides


def _host_source(context: typer.Context, value: str | None) -> str | None:
    """Mark a host that CTL_HOST names, see `core.setting`."""
    source = context.get_parameter_source("host")
    return Setting(value) if value is not None and source is not None and source.name == "ENVIRONMENT" else value


HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        "-H",
        envvar="CTL_HOST",
        callback=_host_source,
        help="A name or address of hosts.toml, or an ssh alias.",
        autocompletion=completion.hosts,
    ),
]
HostsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        "-H",
        envvar="CTL_HOST",
        help="A name or address of hosts.toml, or an ssh alias; may be repeated.",
        autocompletion=completion.hosts,
    ),
]
PlaybookOption = Annotated[
    str | None,
    typer.Option(
        "--playbook",
        "-p",
        envvar="CTL_PLAYBOOK",
        help="A name below playbooks/, or a path to a .toml file.",
        autocompletion=completion.playbooks,
    ),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run id, or a part that only it has; default: the last.",
        autocompletion=completion.runs,
    ),
]
RunsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Run ids, or parts that only they have; default: the last.",
        autocompletion=completion.runs,
    ),
]
LastOption = Annotated[
    bool,
    typer.Option("--last", help="The run launched last from this folder, of any kind: `ctl help runs`."),
]
ExtractionArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="An extraction's run id, or a part that only it has; default: the last extraction.",
        autocompletion=completion.runs,
    ),
]
LastExtractionOption = Annotated[bool, typer.Option("--last", help="The extraction launched last from this folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Delete or move what is shown, without asking.")]
ProgressOption = Annotated[
    str,
    typer.Option(
        "--progress",
        help="auto, plain, json (events as lines on stderr), or none.",
        autocompletion=completion.one_of(*completion.PROGRESS_MODES),
    ),
]
QuietOption = Annotated[
    int,
    typer.Option(
        "--quiet",
        "-q",
        count=True,
        help="No progress: the result, errors, and warnings of this side; -qq: errors and the exit code.",
    ),
]
DetachOption = Annotated[
    bool,
    typer.Option("--detach", "-d", help="Return once the host has confirmed, with exit code 8: the run goes on."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and connect nowhere.")]
WaitOption = Annotated[
    bool, typer.Option("--wait", "-w", help="Queue on the host while another run holds it. Ctrl-C leaves it queued.")
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show ctl's own traceback on an error; progress becomes plain lines."),
]
StaleOption = Annotated[
    str | None,
    typer.Option(
        "--stale",
        help="Files of an earlier run in the output: fail, clear, quarantine or resume.",
        autocompletion=completion.one_of("fail", "clear", "quarantine", "resume"),
    ),
]
AdoptOption = Annotated[
    bool, typer.Option("--adopt", help="Claim an output folder that holds files without our owner marker.")
]
SamplesOption = Annotated[int | None, typer.Option("--max-samples", min=1, help="Take only the first N samples.")]
OutputOption = Annotated[str | None, typer.Option("--output", help="The output folder on the host.")]
DataOption = Annotated[
    str | None, typer.Option("--data", help="The data set: a path on the host, or local:PATH, which is pushed.")
]
KindOption = Annotated[
    str | None,
    typer.Option(
        "--data-kind",
        help="What a record is: auto, tokens or chat.",
        autocompletion=completion.one_of("auto", "tokens", "chat"),
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="speculators, speculators-0.3, specforge or modelopt.",
        autocompletion=completion.one_of("speculators", "speculators-0.3", "specforge", "modelopt"),
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store-dtype",
        help="auto, bfloat16, float16, float32 or fp8 (with a scale a token).",
        autocompletion=completion.one_of("auto", "bfloat16", "float16", "float32", "fp8"),
    ),
]
LayersOption = Annotated[
    str | None, typer.Option("--boundaries", help="eagle3, or numbers with commas: decoder layers completed.")
]
ConventionOption = Annotated[
    str | None,
    typer.Option("--layer-convention", help="Whose layer ids --boundaries are, for example speculators-0.3."),
]
ShardOption = Annotated[
    str | None, typer.Option("--shard", metavar="I/N", help="Take only the I-th of N shares of the samples.")
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="CODE", help="Start in spite of this finding of preflight; may be repeated."),
]
CanaryOption = Annotated[
    bool, typer.Option("--no-canary", help="Capture without proof that the states are right; the summary says so.")
]
RehearseOption = Annotated[
    str | None,
    typer.Option(
        "--rehearse",
        help="auto (before long loads), always or never: first try a model cut from this one.",
        autocompletion=completion.one_of("auto", "always", "never"),
    ),
]
CaptureOption = Annotated[
    str | None,
    typer.Option(
        "--capture",
        help="auto, hooks (eager, any vLLM) or native (the model's own support).",
        autocompletion=completion.one_of("auto", "hooks", "native"),
    ),
]


def chosen_run(run_id: str | None, *, last: bool) -> str | None:
    """Return the run that is meant, None for the last. Raises UsageError for both: one would be ignored."""
    if last and run_id is not None:
        raise UsageError(
            f"`--last` and the run `{run_id}` name two runs", fix="leave one of them out", code="contradiction"
        )
    return run_id


def view_mode(progress: str, *, quiet: int, verbose: bool, as_json: bool) -> str:
    """Return how a run's progress is shown. Raises UsageError for a contradiction or an unknown word.

    A dashboard is drawn only where nothing else writes: beside a traceback or a JSON document lines come plain.
    """
    modes = completion.PROGRESS_MODES
    if progress not in modes:
        raise UsageError(f"unknown progress `{progress}`", fix=did_you_mean(progress, modes, kind="modes"))
    if quiet and verbose:
        raise UsageError("--quiet and --verbose contradict each other", fix="leave one of them out")
    if quiet > 1 and as_json:
        raise UsageError("-qq prints nothing, and --json a document", fix="leave one of them out")
    if progress != "auto":
        return progress
    if quiet > 1:
        from controller.ui.stream import SILENT  # not for verbs that show nothing

        return SILENT
    if quiet:
        return "none"
    return "plain" if verbose or as_json else "auto"


def make_overrides(
    *, stale: str | None = None, adopt: bool = False, max_samples: int | None = None, output: str | None = None,
    capture: str | None = None, data: str | None = None, data_kind: str | None = None,
    output_format: str | None = None, store_dtype: str | None = None, boundaries: str | None = None,
    layer_convention: str | None = None, shard: str | None = None, canary: bool | None = None,
    rehearse: str | None = None,
) -> Overrides:  # fmt: skip
    """Return the flags as values of a playbook. Raises UsageError where numbers are none."""
    from controller.core.model import Overrides  # pydantic takes 150 ms to import

    layers = _layers(boundaries) if boundaries and boundaries != "eagle3" else boundaries
    share = _share(shard) if shard else None
    return Overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, format=output_format, store_dtype=store_dtype, boundaries=layers,
        layer_convention=layer_convention, shard=share, canary=canary, rehearse=rehearse,
    )  # fmt: skip


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"`--boundaries` is `{text}`, and must be whole numbers with commas between them, or eagle3",
            fix="write for example `--boundaries 2,30,58,61`",
        ) from error


def _share(text: str) -> tuple[int, int]:
    try:
        number, count = text.split("/")
        return int(number), int(count)
    except ValueError as error:
        raise UsageError(
            f"`--shard` is `{text}`, and must say which share and of how many: I/N",
            fix=f"write for example `--shard {text}/4`" if text.isdecimal() else "write for example `--shard 1/4`",
        ) from error

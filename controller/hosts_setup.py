"""The verbs that prepare a host: `ctl hosts setup` and `ctl hosts fetch-model`."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import typer

from controller import completion
from controller.app import hosts_app, subcommand
from controller.core.errors import ExitCode, UsageError
from controller.core.suggest import did_you_mean
from controller.options import AdoptOption, JsonOption, ProgressOption, QuietOption, VerboseOption, view_mode

HostArgument = Annotated[
    str,
    typer.Argument(
        metavar="HOST", help="A name or address of hosts.toml, or an ssh alias.", autocompletion=completion.hosts
    ),
]
DoItOption = Annotated[bool, typer.Option("--yes", "-y", help="Do what is shown, without asking.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only look at the host and show the plan.")]
DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Return once the host has confirmed.")]

BUILDS = ("cpu", "cuda")
TOOLS = ("auto", "uv", "pip")


@subcommand(
    hosts_app,
    "setup",
    examples=("ctl hosts setup gpu1 --vllm 0.32.0 --dry-run", "ctl hosts setup gpu1 --vllm 0.32.0 --yes --detach"),
)
def setup(
    host: HostArgument,
    vllm: Annotated[
        str | None, typer.Option("--vllm", help="A version, or the path or URL of a wheel; default: what is there.")
    ] = None,
    build: Annotated[
        str | None, typer.Option("--build", help="cpu or cuda; default: as the host's `accelerator` says.")
    ] = None,
    packages: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="NAME[==VERSION]", help="Also this package; may be repeated. Default: pyarrow."
        ),
    ] = None,
    tool: Annotated[str, typer.Option("--tool", help="uv, pip, or auto: uv where the host has it.")] = "auto",
    base_python: Annotated[
        str | None, typer.Option("--base-python", help="The Python to build on; default: `bootstrap_python`.")
    ] = None,
    index_url: Annotated[str | None, typer.Option("--index-url", help="The package index, instead of PyPI.")] = None,
    extra_index_url: Annotated[
        list[str] | None, typer.Option("--extra-index-url", help="A further index; may be repeated.")
    ] = None,
    find_links: Annotated[
        list[str] | None, typer.Option("--find-links", help="A folder or page of wheels; may be repeated.")
    ] = None,
    no_index: Annotated[bool, typer.Option("--no-index", help="Use only --find-links.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Import vLLM even if nothing is to be installed.")] = False,
    yes: DoItOption = False,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = 0,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Make or complete the environment of the host's `python`, with vLLM in it; shows its plan first."""
    from controller import provisioning
    from controller.core.environment import PACKAGES, Wish, index_words

    view = view_mode(progress, quiet=quiet, verbose=verbose, as_json=as_json)
    if build not in (None, *BUILDS) or tool not in TOOLS:
        wrong, given = ("--tool", tool) if build in (None, *BUILDS) else ("--build", build or "")
        words = TOOLS if wrong == "--tool" else BUILDS
        raise UsageError(f"unknown word `{given}` for `{wrong}`", fix=did_you_mean(given, words, kind="words"))
    wish = Wish(
        vllm=vllm,
        build=cast("Literal['cpu', 'cuda'] | None", build),
        packages=PACKAGES if packages is None else tuple(packages),
        tool=cast("Literal['auto', 'uv', 'pip']", tool),
        base_python=base_python,
        indexes=index_words(
            index_url=index_url,
            extra_index_urls=extra_index_url or (),
            find_links=find_links or (),
            no_index=no_index,
        ),
    )
    return provisioning.setup(
        host, wish, check=check, yes=yes, dry_run=dry_run, detach=detach, progress=view, as_json=as_json
    )


@subcommand(
    hosts_app,
    "fetch-model",
    examples=("ctl hosts fetch-model gpu1 ORG/NAME@main --to /models/NAME",),
)
def fetch_model(
    host: HostArgument,
    model: Annotated[
        str, typer.Argument(metavar="MODEL@REVISION", help="ORGANISATION/NAME, and a commit, tag or branch.")
    ],
    to: Annotated[
        str | None, typer.Option("--to", help="The folder on the host; default: models/MODEL below its workdir.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="PATTERN", help="Only files like this; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATTERN", help="No file like this; default: weights in second forms."),
    ] = None,
    adopt: AdoptOption = False,
    token_stdin: Annotated[
        bool, typer.Option("--token-stdin", help="Read the hub's token from stdin; it is stored nowhere.")
    ] = False,
    yes: DoItOption = False,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = 0,
    verbose: VerboseOption = False,
) -> ExitCode:
    """Bring a model of the Hugging Face hub onto the host, proved file by file; goes on where it was cut off."""
    from controller import provisioning
    from controller.core.fetching import parse_model

    view = view_mode(progress, quiet=quiet, verbose=verbose, as_json=as_json)
    repo, revision = parse_model(model)
    return provisioning.fetch_model(
        host, repo, revision, to=to, include=include or (), exclude=exclude or (), adopt=adopt,
        token_stdin=token_stdin, yes=yes, dry_run=dry_run, detach=detach, progress=view, as_json=as_json,
    )  # fmt: skip

"""The application that verbs register with, and the only place where exceptions become exit codes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperCommand, TyperGroup

from controller.core.errors import CtlError, ExitCode, Interrupted, UsageError
from controller.core.suggest import did_you_mean
from controller.localdisk import disk_error

P = ParamSpec("P")

_ParseError: Any = typer.BadParameter.__base__
"""What the parser raises for a command line that it cannot read; typer exports only this child of it."""

SILENT = 2
"""From this many `-q` on, stdout stays empty too: the exit code says it all."""


SPELLINGS = {"--dry-run=client": "--dry-run", "--dry-run=server": "--dry-run-server"}
"""A flag that may have a value is beyond the parser, so each value is an option of its own to it."""


MEANT = {
    "status": ("ps", "summary"), "state": ("ps", "summary"), "ls": ("ps", "hosts"), "list": ("ps", "hosts"),
    "runs": ("ps",), "history": ("ps",), "show": ("summary",), "info": ("summary",), "describe": ("summary",),
    "result": ("summary",), "results": ("summary",), "verify": ("summary", "preflight"),
    "validate": ("preflight", "plan"), "check": ("preflight",), "tail": ("logs",), "watch": ("attach",),
    "follow": ("attach", "logs"), "kill": ("stop",), "cancel": ("stop",), "abort": ("stop",),
    "rm": ("clear", "prune"), "delete": ("clear", "prune"), "clean": ("clear", "prune"), "start": ("extract", "run"),
    "launch": ("extract", "run"), "submit": ("extract", "run"), "install": ("hosts", "init"), "compare": ("diff",),
    "debug": ("triage",), "explain": ("triage", "help"),
}  # fmt: skip
"""Verbs of other tools, and ours that do the same; of words that are merely mistyped the spelling is enough."""


def no_verb(path: str, name: str, verbs: Sequence[str]) -> UsageError:
    """Return the error for a verb that the group `path` does not have."""
    fix = did_you_mean(name, verbs, kind="verbs", meant=MEANT)
    if path == "ctl" and name == "completion":
        fix = "`ctl --install-completion` sets it up for your shell"
    if path == "ctl" and name in ("playbook", "playbooks"):
        from controller import completion

        names = ", ".join(completion.playbooks("")) or "none yet, `ctl init` writes one"
        fix = f"`ctl plan --playbook NAME` shows what one would do; there are: {names}"
    return UsageError(f"`{path}` has no verb `{name}`", fix=fix)


class Parsed:
    """What a verb and a group of them add to the parser's own: errors know their verb, and switches take no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parent: Any = super()
        try:
            words: list[str] = parent.parse_args(ctx, args)
        except _ParseError as error:
            error.ctx = error.ctx or ctx  # the parser of options does not say whose they are
            raise
        return words

    def get_params(self, ctx: Any) -> list[Any]:
        parent: Any = super()
        params: list[Any] = parent.get_params(ctx)
        for each in params:
            if each.metavar is None and (getattr(each, "is_flag", False) or getattr(each, "count", False)):
                each.metavar = ""  # else newer typers put `<bool>` behind it, as if one had to be given
        return params


class Verb(Parsed, TyperCommand):
    """A verb."""


class Verbs(Parsed, TyperGroup):
    """A group that answers an unknown verb with the nearest one, in the form of every other error."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            shown = [word for word, each in self.commands.items() if not each.hidden]
            raise no_verb(ctx.command_path, name, shown)
        return super().resolve_command(ctx, args)


def help_text(summary: str, examples: Sequence[str]) -> str:
    """Return a command's help: one sentence, then its examples, before the parser's list of options."""
    if not examples:
        return summary.strip()
    # A bracket would be markup to rich, which draws the page.
    lines = "\n".join(f"  {example}" for example in examples).replace("[", "\\[")
    return "\n\n".join([summary.strip(), f"Examples:\n{lines}"])


app = typer.Typer(
    name="ctl",
    cls=Verbs,
    help=help_text(
        "Operate long GPU extractions of hidden states on hosts you reach by SSH.",
        (
            "ctl init                        write hosts.toml and a playbook by four questions",
            "ctl preflight --host gpu1       look whether an extraction could run",
            "ctl extract --host gpu1         launch it and watch; Ctrl-C leaves it running",
            "ctl attach --last               watch it again",
            "ctl help exit-codes             what belongs to no single verb",
        ),
    ),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(cls=Verbs, help="Look at the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config", rich_help_panel="Look")
# A bare `ctl hosts` lists; every further verb of the group registers from a module of its own.
hosts_app = typer.Typer(
    cls=Verbs,
    help=help_text(
        "List the hosts of the configuration, or act on one.",
        ("ctl hosts", "ctl hosts add gpu1 --address root@10.1.230.174", "ctl hosts test gpu1"),
    ),
    invoke_without_command=True,
)
app.add_typer(hosts_app, name="hosts", rich_help_panel="Set up")
ledger_app = typer.Typer(cls=Verbs, help="Work with the ledgers of runs.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger", rich_help_panel="Look")


def command(
    name: str, *, panel: str, examples: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, ExitCode | None]], Callable[P, None]]:
    """Register a command whose exceptions are mapped to a message and an exit code here, and nowhere else."""
    return _registered(app, name, examples, rich_help_panel=panel, **settings)


def subcommand(
    group: typer.Typer, name: str, *, examples: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, ExitCode | None]], Callable[P, None]]:
    """Register a command of a group, as `command` does."""
    return _registered(group, name, examples, **settings)


def _registered(
    group: typer.Typer, name: str, examples: Sequence[str], **settings: Any
) -> Callable[[Callable[P, ExitCode | None]], Callable[P, None]]:
    def register(body: Callable[P, ExitCode | None]) -> Callable[P, None]:
        text = help_text(body.__doc__ or "", examples)
        return group.command(name, help=text, **{"cls": Verb, **settings})(guarded(body))

    return register


def verbs() -> list[str]:
    """Return the names of all verbs and groups that are shown."""
    group: Any = typer.main.get_command(app)
    return [name for name, each in group.commands.items() if not each.hidden]


def guarded(body: Callable[P, ExitCode | None]) -> Callable[P, None]:
    @functools.wraps(body)
    def mapped(*args: P.args, **kwargs: P.kwargs) -> None:
        with contextlib.ExitStack() as stack:
            # Together with --json it is a contradiction, which the verb itself refuses, as a document.
            quiet = kwargs.get("quiet")
            if isinstance(quiet, int) and quiet >= SILENT and not kwargs.get("as_json"):
                sink = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(sink))
                from controller.ui.terminal import silence

                stack.enter_context(silence())
            code = _mapped(
                lambda: body(*args, **kwargs),
                as_json=bool(kwargs.get("as_json")),
                verbose=bool(kwargs.get("verbose")),
            )
        raise typer.Exit(code)

    return mapped


def run(words: Sequence[str] | None = None) -> int:
    """Parse a command line, run its verb, and return the exit code."""
    given = list(sys.argv[1:] if words is None else words)
    end = given.index("--") if "--" in given else len(given)
    ours = [SPELLINGS.get(word, word) for word in given[:end]]
    # What could not be parsed has no parameters yet, so the two flags that shape an error are looked for by name.
    return _mapped(
        lambda: _parsed(ours + given[end:]),
        as_json="--json" in ours,
        verbose=bool({"-v", "--verbose"} & set(ours)),
    )


def _parsed(words: list[str]) -> int:
    try:
        return int(app(words, prog_name="ctl", standalone_mode=False) or ExitCode.OK)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _ParseError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            return int(ExitCode.USAGE)
        raise _parse_error(error, words) from None


def _parse_error(error: Any, words: Sequence[str]) -> UsageError:
    """Turn what the parser says of the words into the form of every other error."""
    path = error.ctx.command_path if error.ctx else "ctl"
    option = getattr(error, "option_name", None)
    if option is not None and option.startswith("-") and hasattr(error, "possibilities"):
        if option == SPELLINGS["--dry-run=server"]:
            return UsageError(f"`--dry-run` of `{path}` does not take a value", fix=f"see `{path} --help`")
        shown = [each for each in error.ctx.command.params if not getattr(each, "hidden", False)]
        known = [name for each in shown for name in each.opts if name.startswith("--")]
        return UsageError(
            f"`{path}` has no option `{option}`", fix=did_you_mean(option, known, kind=f"options of `{path}`")
        )
    values = [word.partition("=")[2] for word in words if word.startswith("--dry-run=")]
    if option == "--dry-run" and values and path == "ctl extract":
        kinds = [spelling.partition("=")[2] for spelling in SPELLINGS]
        return UsageError(
            f"`--dry-run` has no value `{values[0]}`", fix=did_you_mean(values[0], kinds, kind="values")
        )
    if isinstance(error.__cause__, ValueError) and hasattr(error.__cause__, "errors"):
        from controller.core.validation import says

        (detail,) = error.__cause__.errors(include_url=False)
        error.message = f"{says(detail)}, and is {detail['input']!r}"
    message = str(error.format_message()).rstrip(".").replace("'", "`")
    return UsageError(message[:1].lower() + message[1:], fix=f"see `{path} --help`")


def _mapped(body: Callable[[], int | None], *, as_json: bool, verbose: bool) -> int:
    try:
        code = int(body() or ExitCode.OK)
        sys.stdout.flush()  # a full disk behind `>` is an error of the command, not of Python's own end
        return code
    except typer.Exit:
        raise
    except CtlError as error:
        if verbose:
            traceback.print_exc()
        _show_error(error, as_json=as_json)
        return int(error.exit_code)
    except KeyboardInterrupt:
        _show_error(Interrupted("interrupted", why="a run that its host has confirmed goes on"), as_json=as_json)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout went away (`ctl logs | head`): not an error, and nothing can be written any more.
        _give_up_stdout()
        return int(ExitCode.OK)
    except OSError as error:
        known = disk_error(error)
        if known is None:
            return _unexpected(error, as_json=as_json, verbose=verbose)
        if verbose:
            traceback.print_exc()
        _show_error(known, as_json=as_json)
        try:
            sys.stdout.flush()
        except OSError:
            _give_up_stdout()
        return int(known.exit_code)
    except Exception as error:  # noqa: BLE001 - the last resort, and it reports everything
        return _unexpected(error, as_json=as_json, verbose=verbose)


def _unexpected(error: Exception, *, as_json: bool, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    _show_error(_defect(error), as_json=as_json)
    return int(ExitCode.UNEXPECTED)


def _give_up_stdout() -> None:
    """Let what is still buffered go nowhere: Python flushes at its end, and would fail and complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _defect(error: Exception) -> CtlError:
    """Keep the traceback in a file, and say where: a screen of frames helps nobody but who mends it."""
    from controller.defects import keep

    kept = keep(error)
    if isinstance(kept, OSError):
        traceback.print_exception(error)
    return CtlError(
        f"unexpected {type(error).__name__}: {error}",
        why="this is a defect of ctl; a run that was launched goes on",
        fix=f"please report {'the traceback above' if isinstance(kept, OSError) else kept}",
        data={} if isinstance(kept, OSError) else {"report": str(kept)},
    )


def _show_error(error: CtlError, *, as_json: bool) -> None:
    if as_json:
        try:
            print(json.dumps({"schema_version": 1, "error": error.to_dict()}, default=str), flush=True)
            return
        except OSError:  # a full disk behind it: the words below say so on stderr
            _give_up_stdout()
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
) -> None: ...

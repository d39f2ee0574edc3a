"""The application that verbs register with, and the only place where exceptions become exit codes."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec

import typer

from controller.core.errors import CtlError, ExitCode
from controller.localdisk import disk_error

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
# A bare `ctl hosts` lists; every further verb of the group registers from a module of its own.
hosts_app = typer.Typer(help="List the hosts of the configuration, or act on one.", invoke_without_command=True)
app.add_typer(hosts_app, name="hosts", rich_help_panel="Set up")
ledger_app = typer.Typer(help="Work with the ledgers of runs.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger", rich_help_panel="Look")


def command(
    name: str, *, panel: str, epilog: str = "", **settings: Any
) -> Callable[[Callable[P, ExitCode | None]], Callable[P, None]]:
    """Register a command whose exceptions are mapped to a message and an exit code here, and nowhere else."""

    def register(body: Callable[P, ExitCode | None]) -> Callable[P, None]:
        return app.command(name, rich_help_panel=panel, epilog=epilog, **settings)(guarded(body))

    return register


def guarded(body: Callable[P, ExitCode | None]) -> Callable[P, None]:
    @functools.wraps(body)
    def mapped(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(_mapped(body, *args, **kwargs))

    return mapped


def _mapped(body: Callable[P, ExitCode | None], *args: P.args, **kwargs: P.kwargs) -> int:
    as_json, verbose = bool(kwargs.get("as_json")), bool(kwargs.get("verbose"))
    try:
        code = int(body(*args, **kwargs) or ExitCode.OK)
        sys.stdout.flush()  # a full disk behind `>` is an error of the command, not of Python's own end
        return code
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
        _give_up_stdout()
        return int(ExitCode.OK)
    except OSError as error:
        known = disk_error(error)
        if known is None:
            return _unexpected(error, as_json=as_json)
        if verbose:
            traceback.print_exc()
        _show_error(known, as_json=as_json)
        try:
            sys.stdout.flush()
        except OSError:
            _give_up_stdout()
        return int(known.exit_code)
    except Exception as error:  # noqa: BLE001 - the last resort, and it reports everything
        return _unexpected(error, as_json=as_json)


def _unexpected(error: Exception, *, as_json: bool) -> int:
    traceback.print_exception(error)
    _show_error(
        CtlError(
            f"unexpected {type(error).__name__}: {error}",
            why="this is a defect of ctl; a run that was launched goes on",
            fix="please report the traceback above with the output of `ctl --version`",
        ),
        as_json=as_json,
    )
    return int(ExitCode.UNEXPECTED)


def _give_up_stdout() -> None:
    """Let what is still buffered go nowhere: Python flushes at its end, and would fail and complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
) -> None:
    """Operate long GPU extractions of hidden states on hosts you reach by SSH."""

"""Command playbooks as values: what `kind = "command"` files may say about a script that somebody already has.

Paths in `uploads` are on the workstation and start at the current folder; all others are on the host. There, relative
outputs and mounts start at the host's `workdir`, and everything the job itself reads or writes at its `cwd`.
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from controller.core.model import DEFAULT_LOG_CAP, PreflightSection
from controller.core.validation import refusal
from controller.core.values import (
    Bytes,
    Count,
    Duration,
    Environment,
    EnvName,
    Interpreter,
    RemotePath,
    Seconds,
    Text,
    parse_seconds,
)
from remote_payload.host.protocol import Stale

ALWAYS_IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/")
"""Never uploaded with a folder: made anew wherever they are needed, or of no use on the host."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _below(value: str) -> str:
    path = posixpath.normpath(value)
    if path.startswith("/") or path.split("/")[0] == "..":
        raise refusal("it must lie below the run's own folder", "write a relative path without `..`")
    return path


def _pattern(value: str) -> str:
    try:
        groups = re.compile(value).groupindex
    except re.error as error:
        raise refusal(f"it is no regular expression: {error}") from None
    if not groups:
        raise refusal("it has no named group", r"write for example step (?P<done>\d+)/(?P<total>\d+)")
    return value


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Placed = Annotated[str, AfterValidator(_below)]
Patterns = Annotated[tuple[Annotated[str, AfterValidator(_pattern)], ...], BeforeValidator(_listed)]


class UploadSection(_Model):
    """A file or folder of the workstation. `to` is its place below the run's folder; default: its own name.

    `ignore` holds lines as in .gitignore; those of a `.ctlignore` in the folder come before them.
    """

    path: Text
    to: Placed | None = None
    ignore: tuple[str, ...] = ()


class ContainerSection(_Model):
    runtime: Literal["docker", "podman", "apptainer"]
    image: Text
    options: tuple[Text, ...] = ()
    mounts: tuple[Text, ...] = ()


class OwnedSection(_Model):
    """A folder that the job writes. "resume" leaves it as it is: the script goes on with it."""

    path: RemotePath
    stale: Stale = Stale.FAIL


class ProgressSection(_Model):
    """`pattern`: one expression or several, searched in every line of output; or `file`: a file of JSON lines.

    Named groups, or keys, `done`, `total`, `tokens`, `bytes`, `skipped`, `failed` are counts; all others are values.
    """

    pattern: Patterns = ()
    file: RemotePath | None = None
    unit: Text = "steps"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.pattern) == bool(self.file):
            raise refusal("progress has exactly one source", "write `pattern` or `file`")
        return self


class CommandPreflight(PreflightSection):
    """`min_memory_bytes`: host memory that must be available; `programs`: that must be there, by name or path."""

    min_memory_bytes: Bytes | None = None
    programs: tuple[Text, ...] = ()


class CommandLimits(_Model):
    """Durations in seconds, sizes in bytes; None (written "none") lifts a limit. `log_cap` never ends a run."""

    time_limit: Duration = None
    silence_timeout: Duration = None
    load_timeout: Duration = None
    output_bytes: Bytes | None = None
    stop_grace: Annotated[Seconds, BeforeValidator(parse_seconds)] = 30.0
    log_cap: Bytes = DEFAULT_LOG_CAP


class SuccessSection(_Model):
    """`files`: paths or globs that must exist afterwards; what they hold is `[summary.expect]`'s."""

    exit_codes: Annotated[tuple[Annotated[int, Field(strict=True, ge=0, le=255)], ...], Field(min_length=1)] = (0,)
    files: tuple[RemotePath, ...] = ()


class Range(_Model):
    min: Annotated[int, Field(strict=True, ge=0)] | None = None
    max: Annotated[int, Field(strict=True, ge=0)] | None = None


Amount = Annotated[int, Field(strict=True, ge=0)] | Range


class TensorExpectation(_Model):
    """`shape`: a number or "*" for each dimension."""

    dtype: Text | None = None
    shape: tuple[Annotated[int, Field(strict=True, ge=0)] | Literal["*"], ...] | None = None


class ExpectSection(_Model):
    files: Amount | None = None
    bytes: Amount | None = None
    records: Amount | None = None
    nan: Amount | None = None
    tensors: dict[Text, TensorExpectation] = Field(default_factory=dict)


class SummarySection(_Model):
    """`paths`: what to look at; default: every output. `sample_files` of each group are searched for NaN."""

    paths: tuple[RemotePath, ...] = ()
    sample_files: Count = 16
    expect: ExpectSection = ExpectSection()


class CommandPlaybook(_Model):
    """A script and what is to be known of it. `name` and `origin` (its file) are filled in by the reader."""

    name: str
    origin: str
    schema_version: Annotated[Literal[1], Field(alias="schema")]
    kind: Literal["command"]
    description: str = ""
    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    python: Interpreter | None = None
    cwd: RemotePath | None = None
    gpus: Annotated[int, Field(strict=True, ge=0)] | None = None
    tracebacks: StrictBool = False
    uploads: tuple[UploadSection, ...] = ()
    container: ContainerSection | None = None
    env: Environment = Field(default_factory=dict, repr=False)
    secrets: tuple[EnvName, ...] = ()
    outputs: tuple[OwnedSection, ...] = ()
    progress: ProgressSection | None = None
    preflight: CommandPreflight = CommandPreflight()
    limits: CommandLimits = CommandLimits()
    success: SuccessSection = SuccessSection()
    summary: SummarySection | None = None

"""Which names hold secrets, and how anything that holds one is shown.

A plan never holds a secret: the values of secret names travel in the start request only, and are known in the
plan by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.core.errors import UsageError

MASK = "***"

_SECRET_NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""TOKENIZERS_PARALLELISM is no secret, and everybody sets it."""

_ASSIGNMENT = re.compile(
    r"(?<![A-Za-z0-9_])(?P<name>[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?))=[\"']*(?P<value>\S+)"
)
"""An assignment as in `env HF_TOKEN=... command`, also inside a shell's line; MAX_TOKENS=5 is not one."""

_OPTION = re.compile(
    r"--?(?P<name>token|(?:[a-z0-9]+[-_])*?(?:api[-_]?key|password|passwd|(?:secret|access)[-_]key|client[-_]secret"
    r"|(?:hf|hub|huggingface|auth|access|api|bearer|refresh|session|github|gitlab|wandb)[-_]token))"
    r"(?:=(?P<value>.*))?",
    re.IGNORECASE | re.DOTALL,
)
"""An option whose value is a secret. Of tokens only those of services: `--pad-token` and `--eos_token` are text."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:]*:(?P<value>[^\s/@]+)@")

_NO_VALUE = re.compile(r"\$[A-Za-z_{(].*|true|false|none|null|[01]?", re.IGNORECASE | re.DOTALL)
"""A reference to a variable is what is recommended; a switch (`--use-auth-token true`) tells nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """A secret in the open: how it is there, and a variable's name for it."""

    how: str
    name: str


def is_secret(name: str, value: str = "") -> bool:
    """Say whether an environment variable is treated as a secret: for its name, or for a URL's password in its value.

    `HTTPS_PROXY = "http://me:password@proxy:3128"` is the usual one of the second kind.
    """
    return _SECRET_NAME.search(name) is not None or has_password(value)


def has_password(value: str) -> bool:
    """Say whether a URL with a password stands in `value`; a reference (`$PASSWORD`) is none."""
    return any(not _NO_VALUE.fullmatch(found["value"]) for found in _URL.finditer(value))


def split_env(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return (plain variables, sorted names of secret ones)."""
    plain = {name: value for name, value in env.items() if not is_secret(name, value)}
    return plain, sorted(set(env) - set(plain))


def redact(env: Mapping[str, str], secret_names: Sequence[str] = ()) -> dict[str, str]:
    """Return an environment for display, sorted by name: secrets, and all of `secret_names`, as `***`."""
    shown = {name: MASK if is_secret(name, value) else value for name, value in env.items()}
    return dict(sorted({**shown, **dict.fromkeys(secret_names, MASK)}.items()))


def secret_in_argv(argv: Sequence[str]) -> Exposed | None:
    """Return the first secret that an argv has in the open, also within a shell's line; None if there is none."""
    pieces = [piece.strip("\"'`();") for word in argv for piece in (word.split() or [word])]
    for piece, following in zip(pieces, [*pieces[1:], ""], strict=True):
        if (found := _ASSIGNMENT.search(piece)) and not _NO_VALUE.fullmatch(found["value"]):
            return Exposed(how=f"assigns `{found['name']}`", name=found["name"])
        if found := _OPTION.fullmatch(piece):
            given, value = found["value"], (found["value"] or "").strip("\"'")
            if given is None and not following.startswith("-"):
                value = following
            if not _NO_VALUE.fullmatch(value):
                option = piece.partition("=")[0]
                name = found["name"].upper().replace("-", "_")
                return Exposed(how=f"gives `{option}` its value", name=name)
        if has_password(piece):
            return Exposed(how="has a URL with a password", name="URL")
    return None


def refuse_secrets(argv: Sequence[str], host: str, where: str) -> None:
    """Raise UsageError if an argv has a secret in the open; `where` says what else to do than to name it as one."""
    found = secret_in_argv(argv)
    if found is not None:
        raise UsageError(
            f"the command {found.how} in the open",
            why="arguments are stored in the plan, and every user of the host can read them",
            fix=f'add `{found.name} = {{ env = "{found.name}" }}` to [hosts."{host}".secrets], {where}, and let the '
            f"command read the variable {found.name}",
            code="secret-in-argv",
        )

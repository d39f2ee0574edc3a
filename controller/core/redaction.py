"""Which names hold secrets, and how anything that holds one is shown.

A plan never holds a secret: the values of secret names travel in the start request only, and are known in the
plan by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "***"

_SECRET_NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""TOKENIZERS_PARALLELISM is no secret, and everybody sets it."""

_ASSIGNMENT = re.compile(r"(?P<name>[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?))=(?=.)")
"""An environment assignment in an argv, such as `env HF_TOKEN=... command`; MAX_TOKENS=5 is not one."""


def is_secret(name: str) -> bool:
    """Say whether an environment variable of this name is treated as a secret."""
    return _SECRET_NAME.search(name) is not None


def split_env(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return (plain variables, sorted names of secret ones)."""
    plain = {name: value for name, value in env.items() if not is_secret(name)}
    return plain, sorted(set(env) - set(plain))


def redact(env: Mapping[str, str], secret_names: Sequence[str] = ()) -> dict[str, str]:
    """Return an environment for display, sorted by name: secrets, and all of `secret_names`, as `***`."""
    shown = {name: MASK if is_secret(name) else value for name, value in env.items()}
    return dict(sorted({**shown, **dict.fromkeys(secret_names, MASK)}.items()))


def secret_in_argv(argv: Sequence[str]) -> str | None:
    """Return the name of the first secret that an argv assigns in the open; None if there is none."""
    for word in argv:
        found = _ASSIGNMENT.match(word)
        if found:
            return found["name"]
    return None

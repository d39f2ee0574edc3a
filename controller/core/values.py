"""Kinds of value that hosts.toml and playbooks share: text, paths on the host, environments, durations.

Each is a type for pydantic; what is wrong with a value, and what to write instead, is said here.
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from controller.core.findingcodes import CODES, fix_of
from controller.core.validation import refusal

WHOLE_ADDRESS = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^@:]+|[^@]*:[^@]*:[^@]*)(?::(?P<port>\d+))?")
"""`[user@]address[:port]`; an IPv6 address is in brackets if a port follows."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BYTE_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(" + "|".join(_BYTE_UNITS) + ")")
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")

LOCAL = "local:"
"""Before the path of a data set that lies on the workstation; it starts at the current folder."""

NOTIFY = "notify"
"""In place of a command: a notification of the desktop."""

OWNED_ENV = frozenset(
    {"CTL_RUN_ID", "CTL_RUN_DIR", "CTL_HOST", "SPT_NOENV", "PYTHONUNBUFFERED", "VLLM_PROCESS_NAME_PREFIX"}
)
"""Set by the supervisor for every job: it finds a run's processes, and its output, by them."""


def _text(value: str) -> str:
    if not value.strip() or _CONTROL.search(value):
        raise refusal("it is empty or holds control characters")
    return value


def _finding_code(value: str) -> str:
    if value not in CODES:
        raise refusal("no finding of preflight has this code", fix_of(value))
    return value


def _ssh_word(value: str) -> str:
    # A leading dash would be an option to ssh; white space would end the word in a generated ssh configuration.
    if not _NAME.fullmatch(value):
        raise refusal("only letters, digits and . _ : - may be used, and not a leading dash")
    return value


def _address(value: str) -> str:
    parts = WHOLE_ADDRESS.fullmatch(value)
    if parts is not None and (parts["user"] or parts["port"]):
        rest = [f'{key} = "{parts[key]}"' if key == "user" else f"{key} = {parts[key]}"
                for key in ("user", "port") if parts[key]]  # fmt: skip
        keys = ", ".join([f'address = "{parts["host"].strip("[]")}"', *rest])
        raise refusal("user and port are keys of their own", f"write {keys}")
    return _ssh_word(value)


def _remote_path(value: str) -> str:
    _text(value)
    if value.startswith("~"):
        raise refusal("`~` is not expanded on the host", "write the absolute path, or one relative to `workdir`")
    if ".." in value.split("/"):
        raise refusal("`..` in a path means something else behind a symbolic link", "write the path without `..`")
    path = posixpath.normpath(value)
    # POSIX lets exactly two leading slashes mean something else, and normpath keeps them.
    return "/" + path.lstrip("/") if path.startswith("/") else path


def _data_path(value: str) -> str:
    return value if _text(value).startswith(LOCAL) and value != LOCAL else _remote_path(value)


def _absolute_path(value: str) -> str:
    path = _remote_path(value)
    if not path.startswith("/"):
        raise refusal("it must be an absolute path on the host")
    return path


def _interpreter(value: str) -> str:
    _text(value)
    if "/" not in value:
        return _ssh_word(value)
    return _absolute_path(value)


def _env_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise refusal("it cannot be the name of an environment variable")
    if name in OWNED_ENV:
        raise refusal("ctl itself sets this variable", f"remove `{name}`")
    return name


def _env_value(value: str) -> str:
    if "\x00" in value:
        raise refusal("an environment variable cannot hold a NUL character")
    return value


def parse_seconds(value: Any) -> Any:
    """Return seconds from a number or from text like `30m`, `1h30m`, `45s`; None from `none` (no limit)."""
    if not isinstance(value, str):
        return value
    if value == "none":
        return None
    parts = _DURATION.fullmatch(value)
    if not value or parts is None:
        raise refusal(f"`{value}` is not a duration", 'write seconds, or text like "90s", "45m", "1h30m"')
    days, hours, minutes, rest = (float(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def parse_bytes(value: Any) -> Any:
    """Return bytes from a whole number or from text like `500MB`, `4GiB` (powers of 1000 and of 1024)."""
    if not isinstance(value, str):
        return value
    parts = _BYTES.fullmatch(value)
    if parts is None:
        raise refusal(f"`{value}` is not a size", 'write bytes, or text like "500MB", "4GiB"')
    return int(float(parts[1]) * _BYTE_UNITS[parts[2]])


def _on_finish(value: Any) -> Any:
    if value == NOTIFY:
        return value
    words = list(value) if isinstance(value, list | tuple) else None
    if not words or not all(isinstance(word, str) for word in words):
        raise refusal("it is neither a command nor a notification", 'write ["program", "argument"] or "notify"')
    if not words[0].strip() or any("\x00" in word for word in words):
        raise refusal("a command has a program's name first, and no NUL character")
    return tuple(words)


def _boundaries(value: Any) -> Any:
    if isinstance(value, str):
        if value != "eagle3":
            raise refusal(f"`{value}` is not a set of boundaries", 'write "eagle3" or a list such as [2, 30, 58, 61]')
        return value
    if not isinstance(value, list | tuple) or not value or any(type(item) is not int for item in value):
        raise refusal("boundaries are a non-empty list of whole numbers", 'or write "eagle3"')
    if min(value) < 0:
        raise refusal(f"{min(value)} is negative", "boundary b means b decoder layers completed; 0 is the embeddings")
    if len(set(value)) < len(value):
        raise refusal("a boundary is given twice", "each state is captured once; remove the duplicate")
    return tuple(value)


Text = Annotated[str, AfterValidator(_text)]
FindingCode = Annotated[str, AfterValidator(_finding_code)]
Address = Annotated[str, AfterValidator(_address)]
SshWord = Annotated[str, AfterValidator(_ssh_word)]
RemotePath = Annotated[str, AfterValidator(_remote_path)]
DataPath = Annotated[str, AfterValidator(_data_path)]
AbsolutePath = Annotated[str, AfterValidator(_absolute_path)]
Interpreter = Annotated[str, AfterValidator(_interpreter)]
EnvName = Annotated[str, AfterValidator(_env_name)]
Environment = dict[EnvName, Annotated[str, AfterValidator(_env_value)]]
Count = Annotated[int, Field(strict=True, ge=1)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Duration = Annotated[Seconds | None, BeforeValidator(parse_seconds)]
"""Seconds, or None: no limit."""
OnFinish = Annotated[str | tuple[str, ...], BeforeValidator(_on_finish)]
"""A command as its argv, or the word `notify`."""

Bytes = Annotated[int, Field(strict=True, gt=0), BeforeValidator(parse_bytes)]
"""A size of files."""

Boundaries = Annotated[str | tuple[int, ...], BeforeValidator(_boundaries)]
"""The word `eagle3`, or numbers of decoder layers completed."""

"""The files of hosts.toml, merged: for every key the value that counts and where it stands.

Between files the project's beats the user's beats the shipped one. The tables `env` and `secrets` merge name by
name. A host that the project defines owes nothing to the shipped one of the same name. Within one layer (a file
and what it includes) nothing may be defined twice: which of the two counts would depend on the order of reading.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from controller.core.errors import ConfigError
from controller.core.model import Fleet, Host
from controller.core.tomltext import Document, Key, dotted
from controller.core.validation import check_keys, fail, keys_of, validate

MERGED_TABLES = ("env", "secrets")

HOST_KEYS = keys_of(Host)
DEFAULT_KEYS = HOST_KEYS - {"address"}


class Layer(StrEnum):
    """Where a file stands in the order of precedence, highest first."""

    PROJECT = "project"
    USER = "user"
    SHIPPED = "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that was looked for. `document` is None if there is none; `included_by` is the path of its includer."""

    path: str
    layer: Layer
    document: Document | None
    included_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value and where it comes from: `FILE:LINE (layer)`, `--flag`, `CTL_NAME` or `built-in default`."""

    value: Any
    origin: str


Values = dict[Key, Value]
"""Keys inside a host's table: ("gpus",), ("env", "NAME"), ("secrets", "NAME")."""


@dataclass(slots=True, kw_only=True)
class Tables:
    """All files merged. `fleets` hold host names."""

    defaults: Values = field(default_factory=dict)
    hosts: dict[str, Values] = field(default_factory=dict)
    fleets: dict[str, Value] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    """Where each table stands, for errors about what is not in it."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    include: tuple[str, ...] = ()
    defaults: dict[str, Any] = {}
    hosts: dict[str, dict[str, Any]] = {}
    fleets: dict[str, Fleet] = {}


def includes(document: Document, *, home: str) -> tuple[str, ...]:
    """Return the paths that a hosts.toml includes, relative ones below its own folder. Raises ConfigError."""
    names = document.data.get("include", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        fail(document, ("include",), "`include` is not a list of paths", fix='write include = ["more-hosts.toml"]')
    return tuple(beside(document.path, name, home) for name in names)


def beside(origin: str, path: str, home: str) -> str:
    """Return a path of the workstation as the file `origin` means it; `~/` is the home folder."""
    if path.startswith("~/"):
        return posixpath.join(home, path[2:])
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))


def merge(sources: Sequence[Source], *, home: str) -> Tables:
    """Merge all files. Raises ConfigError for an unknown key or word, or a thing defined twice in a layer."""
    files = [(source, _check(source.document)) for source in sources if source.document is not None]
    ours = {name for source, file in files if source.layer is Layer.PROJECT for name in file.hosts}
    tables = Tables()
    for layer in reversed(Layer):
        seen: dict[Key, str] = {}
        for source, file in files:
            if source.layer is layer:
                skip = ours if layer is Layer.SHIPPED else frozenset()
                _add(tables, source, file, seen, skip, home)
    return tables


def _check(document: Document) -> _File:
    file = validate(_File, document.data, where=document.where)
    check_keys(file.defaults, DEFAULT_KEYS, prefix=("defaults",), where=document.where)
    for name, table in file.hosts.items():
        check_keys(table, HOST_KEYS, prefix=("hosts", name), where=document.where)
    return file


def _add(tables: Tables, source: Source, file: _File, seen: dict[Key, str], skip: Set[str], home: str) -> None:
    document = source.document
    assert document is not None
    for key in file.defaults:
        _once(document, ("defaults", key), seen)
    tables.defaults.update(_flatten(source, document, ("defaults",), file.defaults, home))
    for name, table in file.hosts.items():
        _once(document, ("hosts", name), seen)
        if name not in skip:
            tables.hosts.setdefault(name, {}).update(_flatten(source, document, ("hosts", name), table, home))
            tables.places["hosts", name] = document.where(("hosts", name))
    for name, fleet in file.fleets.items():
        _once(document, ("fleets", name), seen)
        tables.fleets[name] = Value(value=fleet.hosts, origin=_origin(source, document, ("fleets", name)))
        tables.places["fleets", name] = document.where(("fleets", name, "hosts"))


def _once(document: Document, key: Key, seen: dict[Key, str]) -> None:
    here = document.where(key)
    first = seen.setdefault(key, here)
    if first != here:
        raise ConfigError(
            f"`{dotted(key)}` is defined twice",
            why=f"in {first} and in {here}",
            fix="remove or rename one of them",
            data={"key": dotted(key), "files": [first, here]},
        )


def _flatten(source: Source, document: Document, prefix: Key, table: Mapping[str, Any], home: str) -> Values:
    return {
        key: Value(value=_local(document, key, value, home), origin=_origin(source, document, prefix + key))
        for key, value in _entries(document, prefix, table)
    }


def _entries(document: Document, prefix: Key, table: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    for name, value in table.items():
        if name not in MERGED_TABLES:
            yield (name,), value
        elif isinstance(value, dict):
            yield from (((name, inner), entry) for inner, entry in value.items())
        else:
            shown = dotted((*prefix, name))
            fail(
                document,
                (*prefix, name),
                f"`{shown}` is not a table",
                fix=f"write a table: {name} = {{ NAME = ... }}",
            )


def _local(document: Document, key: Key, value: Any, home: str) -> Any:
    """Resolve what is a path on the workstation against the file that it stands in."""
    if key == ("ssh_config",) and isinstance(value, str):
        return beside(document.path, value, home)
    if key[0] == "secrets" and isinstance(value, dict) and isinstance(value.get("file"), str):
        return {**value, "file": beside(document.path, value["file"], home)}
    return value


def _origin(source: Source, document: Document, key: Key) -> str:
    return f"{document.where(key)} ({source.layer.value})"

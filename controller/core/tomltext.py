"""TOML text that remembers on which line each key stands, so that an error can point at it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from controller.core.errors import ConfigError

Key = tuple[str, ...]

_POSITION = re.compile(r"\s*\(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed file. `path` is only named in errors; nothing is opened here."""

    path: str
    text: str
    data: Mapping[str, Any]

    @cached_property
    def lines(self) -> Mapping[Key, int]:
        """Line (from 1) on which each table and key is first set."""
        found: dict[Key, int] = {}
        for key, line in _statements(self.text):
            for depth in range(1, len(key) + 1):
                found.setdefault(key[:depth], line)
        return found

    def where(self, key: Sequence[str]) -> str:
        """Return `path:line` of the key or, where it is not set, of the nearest table around it."""
        line = self.line(key)
        return self.path if line is None else f"{self.path}:{line}"

    def line(self, key: Sequence[str]) -> int | None:
        for depth in range(len(key), 0, -1):
            line = self.lines.get(tuple(key[:depth]))
            if line is not None:
                return line
        return None


def parse(path: str, text: str) -> Document:
    """Parse TOML. Raises ConfigError naming file, line and column of a syntax error.

    A byte order mark, which some editors write and none shows, is left out.
    """
    text = text.removeprefix("\ufeff")
    try:
        return Document(path=path, text=text, data=tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        position = _POSITION.search(message)
        last = text.count("\n") + 1
        line = int(position["line"]) if position and position["line"] else last
        column = int(position["column"]) if position and position["column"] else 1
        raise ConfigError(
            f"{path}:{line}:{column}: not valid TOML",
            why=_POSITION.sub("", message),
            fix=f"correct line {line}; strings need quotes, tables look like [hosts.NAME]",
            data={"file": path, "line": line, "column": column},
        ) from error


def dotted(key: Sequence[str]) -> str:
    """Return a key as TOML writes it: parts that are not bare are quoted."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"' for part in key)


def _statements(text: str) -> Iterator[tuple[Key, int]]:
    """Yield every key set in a valid document with the line on which its statement begins.

    A statement is the shortest run of lines that is itself valid TOML: only brackets and multi-line strings
    carry one over a line end, and those do not parse before they are closed.
    """
    table: Key = ()
    pending: list[str] = []
    begin = 1
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not pending:
            begin = number
        pending.append(line)
        try:
            statement = tomllib.loads("".join(pending))
        except tomllib.TOMLDecodeError:
            continue
        header = pending[0].lstrip().startswith("[")
        pending = []
        if header:
            table = _only_path(statement)
            yield table, begin
        else:
            for key in _leaves(statement):
                yield table + key, begin


def _only_path(table: Mapping[str, Any]) -> Key:
    """Return the key of a table header, given what it parses to: `[a.b]` is {"a": {"b": {}}}."""
    path: list[str] = []
    inner: Any = table
    while isinstance(inner, dict) and inner:
        name, inner = next(iter(inner.items()))
        path.append(name)
    return tuple(path)


def _leaves(table: Mapping[str, Any]) -> Iterator[Key]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            for key in _leaves(value):
                yield (name, *key)
        else:
            yield (name,)

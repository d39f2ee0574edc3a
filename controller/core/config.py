"""Files, environment and flags to one configuration, each value with its origin.

Nothing is read here: `workspace.py` reads the files and passes their texts. Precedence, highest first:

    flag  >  CTL_* environment  >  project file  >  user file  >  shipped default  >  built-in default

A host's own table beats `[defaults]`, whichever file either stands in; `sources.py` says how files merge.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from controller.core.errors import ConfigError, UsageError
from controller.core.model import Host
from controller.core.redaction import MASK, is_secret
from controller.core.sources import HOST_KEYS, MERGED_TABLES, Layer, Source, Tables, Value, Values, merge
from controller.core.suggest import did_you_mean
from controller.core.tomltext import Key, dotted
from controller.core.validation import validate
from remote_payload.host.layout import LEASE_FOLDER
from remote_payload.host.protocol import Accelerator

BUILT_IN = "built-in default"

SETTINGS = {"host": "CTL_HOST", "playbook": "CTL_PLAYBOOK", "runs_dir": "CTL_RUNS_DIR", "config": "CTL_CONFIG"}
"""Settings outside the files, and the environment variable of each."""

DEFAULT_RUNS_DIR = "ctl-runs"
"""Relative to the current folder."""

REQUIRED = tuple(name for name, info in Host.model_fields.items() if info.is_required() and name in HOST_KEYS)
"""Keys without which a host cannot be used; `address` defaults to its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All hosts and fleets, and the settings; made by `build`."""

    sources: tuple[Source, ...]
    settings: Mapping[str, Value]
    hosts: Mapping[str, Host]
    fleets: Mapping[str, tuple[str, ...]]
    ssh_patterns: tuple[str, ...]
    """Patterns of the `Host` lines in the user's ssh configuration."""
    tables: Tables

    def host(self, wanted: str | None = None, *, naming: str = "use `--host NAME`") -> Host:
        """Return the host that `--host` (or `wanted`) means: a name, an address in a file, or an ssh alias.

        Hosts of your own files come first, in each of these ways; a shipped example has to be named in full. `naming`
        says how a host is named to whoever named none.

        Raises UsageError if there is none, several or none was asked for; ConfigError for an ssh alias about
        which `[defaults]` does not say enough.
        """
        name = wanted or self._setting("host")
        if not name:
            known = ", ".join(self.own_hosts)
            raise UsageError(
                "no host given",
                why=f"hosts: {known}" if known else "no host is defined",
                fix=f"{naming}, or set CTL_HOST" if known else "describe one with `ctl init` or `ctl hosts add`",
            )
        if name in self.own_hosts:
            return self.own_hosts[name]
        same = [host for host in self.own_hosts.values() if host.address == name]
        if len(same) == 1:
            return same[0]
        if same:
            names = ", ".join(host.name for host in same)
            raise UsageError(f"several hosts have the address `{name}`", why=names, fix="use a host's name")
        if any(pattern != "*" and fnmatch.fnmatchcase(name, pattern) for pattern in self.ssh_patterns):
            return _make_host(name, self.tables)
        if name in self.hosts:
            return self.hosts[name]
        aliases = [pattern for pattern in self.ssh_patterns if not set(pattern) & set("*?!")]
        known_words = {*self.own_hosts, *(host.address for host in self.own_hosts.values()), *aliases}
        raise UsageError(
            f"unknown host `{name}`",
            why="it is neither a host nor an address in hosts.toml, nor an alias in the ssh configuration",
            fix=did_you_mean(name, known_words, kind="hosts"),
            code="unknown-host",
        )

    @property
    def own_hosts(self) -> Mapping[str, Host]:
        """The hosts that a file of the project or your own one names; the others are examples that came with ctl."""
        named = {
            name
            for source in self.sources
            if source.document is not None and source.layer is not Layer.SHIPPED
            for name in source.document.data.get("hosts", {})
        }
        return {name: host for name, host in self.hosts.items() if name in named}

    def fleet(self, name: str) -> tuple[Host, ...]:
        """Return a fleet's hosts in order. Raises UsageError if there is no such fleet."""
        if name not in self.fleets:
            raise UsageError(f"unknown fleet `{name}`", fix=did_you_mean(name, self.fleets, kind="fleets"))
        return tuple(self.host(host) for host in self.fleets[name])

    def host_names(self) -> tuple[str, ...]:
        """Return the names of all hosts but the shipped examples, sorted."""
        return tuple(sorted(self.own_hosts))

    def playbook(self, host: Host | None) -> str | None:
        """Return the playbook's name or path that a flag, CTL_PLAYBOOK or the host says; None if none does."""
        return self._setting("playbook") or (host.playbook if host else None)

    def values(self) -> Mapping[str, Value]:
        """Return every value by dotted key (`hosts.demo.gpus`), as used, with its origin; secrets are `***`.

        A host that only came with ctl is an example, and has values where a setting means it.
        """
        found = dict(self.settings)
        for name, value in self.tables.fleets.items():
            found[dotted(("fleets", name))] = value
        meant = {name: self.hosts[name] for name in (self._setting("host"),) if name in self.hosts and name}
        for name, host in {**meant, **self.own_hosts}.items():
            for key, value in _shown(host, _own_values(name, self.tables)).items():
                found[dotted(("hosts", name, *key))] = value
        return found

    def origins(self) -> Mapping[str, str]:
        """Return the origin of every value by dotted key."""
        return {key: value.origin for key, value in self.values().items()}

    def document(self) -> dict[str, Any]:
        """Return what `ctl config show` prints, as JSON-ready data: every file looked for, and every value."""
        return {
            "schema_version": 1,
            "files": [
                {
                    "path": source.path,
                    "layer": source.layer.value,
                    "found": source.document is not None,
                    "included_by": source.included_by,
                }
                for source in self.sources
            ],
            "values": {key: {"value": value.value, "origin": value.origin} for key, value in self.values().items()},
        }

    def _setting(self, name: str) -> str | None:
        return self.settings[name].value if name in self.settings else None


def build(
    sources: Sequence[Source],
    *,
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    home: str,
    ssh_patterns: Sequence[str] = (),
) -> Config:
    """Merge everything and check it all, used or not. `flags` has the keys of `SETTINGS`, `home` is what `~/` means.

    Raises ConfigError naming file, line and key.
    """
    tables = merge(sources, home=home)
    hosts = {name: _make_host(name, tables) for name in tables.hosts}
    for name, fleet in tables.fleets.items():
        for host in fleet.value:
            if host not in hosts:
                raise ConfigError(
                    f"{tables.places['fleets', name]}: fleet `{name}` names an unknown host `{host}`",
                    fix=did_you_mean(host, hosts, kind="hosts"),
                )
    return Config(
        sources=tuple(sources),
        settings=settings(flags, environ),
        hosts=hosts,
        fleets={name: fleet.value for name, fleet in tables.fleets.items()},
        ssh_patterns=tuple(ssh_patterns),
        tables=tables,
    )


def settings(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the settings that are set, each by its flag, else its CTL_* variable; an empty one is not set."""
    found = {"runs_dir": Value(value=DEFAULT_RUNS_DIR, origin=BUILT_IN)}
    for name, variable in SETTINGS.items():
        flag = flags.get(name)
        if flag:
            found[name] = Value(value=flag, origin=f"--{name.replace('_', '-')}")
        elif environ.get(variable):
            found[name] = Value(value=environ[variable], origin=variable)
    return found


def _own_values(name: str, tables: Tables) -> Values:
    return {**tables.defaults, **tables.hosts.get(name, {})}


def _make_host(name: str, tables: Tables) -> Host:
    values = _own_values(name, tables)
    data = _nested(values)
    data = {"address": name, **data, "name": name}
    missing = [key for key in REQUIRED if key not in data]
    if "gpus" not in data and data.get("accelerator") != Accelerator.CPU.value:
        missing.append("gpus")
    if missing:
        raise _incomplete(name, missing, tables)

    def where(key: Key) -> str:
        for depth in range(len(key), 2, -1):
            if key[2:depth] in values:
                return values[key[2:depth]].origin
        return tables.places.get(("hosts", name), "[defaults]")

    return validate(Host, data, prefix=("hosts", name), where=where)


def _nested(values: Values) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in values.items():
        if len(key) == 1:
            data[key[0]] = value.value
        else:
            data.setdefault(key[0], {})[key[1]] = value.value
    return data


def _incomplete(name: str, missing: Sequence[str], tables: Tables) -> ConfigError:
    table = dotted(("hosts", name))
    fix = f"add {', '.join(f'`{key}`' for key in missing)} to [{table}] or to [defaults]"
    data: dict[str, object] = {"host": name, "missing": list(missing)}
    if ("hosts", name) in tables.places:
        where = tables.places["hosts", name]
        return ConfigError(f"{where}: host `{name}` lacks {', '.join(missing)}", fix=fix, data=data)
    return ConfigError(
        f"`{name}` is an ssh alias, but hosts.toml does not say enough to use it",
        why=f"[defaults] lacks {', '.join(missing)}",
        fix=fix,
        data=data,
    )


def _shown(host: Host, values: Values) -> Values:
    """Return a host's values as used: normalised ones instead of those written, and built-in ones too."""
    shown: Values = {}
    for field in Host.model_fields:
        if field == "name":
            continue
        if field in MERGED_TABLES:
            for key in (key for key in values if key[0] == field):
                hidden = field == "env" and is_secret(key[1], str(values[key].value))
                shown[key] = Value(value=MASK, origin=values[key].origin) if hidden else values[key]
            continue
        value = getattr(host, field)
        if field == "lease_dir" and value is None:
            value = LEASE_FOLDER  # the host's own default, which a plan leaves to it
        origin = values[field,].origin if (field,) in values else BUILT_IN
        shown[field,] = Value(value=value.value if isinstance(value, Enum) else value, origin=origin)
    return shown

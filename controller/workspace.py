"""Where hosts.toml, playbooks and run folders live on the workstation, and the reading of them.

    project    the nearest hosts.toml from the current folder upwards, not above the home folder; or CTL_CONFIG
    user       $XDG_CONFIG_HOME/ctl/hosts.toml
    shipped    what came with ctl: the checkout's own files, or `controller/shipped` of an installed package

Playbooks are looked for in `playbooks/` beside the project file, in $XDG_CONFIG_HOME/ctl/playbooks, and beside
the shipped file.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from controller.core.command import CommandPlaybook
from controller.core.commandplan import unnamed_env
from controller.core.config import BUILT_IN, Config, build, settings
from controller.core.errors import ConfigError, UsageError
from controller.core.model import Host, Playbook
from controller.core.playbook import parse_playbook
from controller.core.redaction import is_secret
from controller.core.sources import Layer, Source, includes
from controller.core.suggest import did_you_mean
from controller.core.tomltext import parse
from controller.secretsources import read_secret

MAX_SSH_INCLUDES = 64
"""Files read for ssh aliases; OpenSSH itself allows includes 16 deep."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The configuration as found from one folder; made by `load_workspace`."""

    config: Config
    cwd: Path
    project: Path | None
    """The hosts.toml found upwards from the current folder; None if there is none, or CTL_CONFIG named one."""
    playbook_folders: tuple[Path, ...]
    """In the order of precedence; some may not exist."""
    environ: Mapping[str, str]

    @property
    def runs_dir(self) -> Path:
        """Absolute path of the folder that holds the run folders; it may not exist yet.

        Unless it was set, it lies beside the project's hosts.toml, so that it is the same from every subfolder.
        """
        setting = self.config.settings["runs_dir"]
        base = self.project.parent if self.project is not None and setting.origin == BUILT_IN else self.cwd
        return base / _expand(setting.value, self.environ)

    @cached_property
    def playbooks(self) -> Mapping[str, Path]:
        """Playbooks by name; the first folder that has a name counts."""
        found: dict[str, Path] = {}
        for folder in self.playbook_folders:
            for path in sorted(folder.glob("*.toml")):
                found.setdefault(path.stem, path)
        return found

    def playbook(self, wanted: str | None, host: Host | None = None) -> Playbook:
        """Return the extraction of a name or path, else of the setting, else the host's own.

        What ends in .toml or holds a slash is a path. Raises UsageError if none was asked for or if it is of another
        kind, ConfigError if it does not exist or is not valid.
        """
        found = self.any_playbook(wanted, host)
        if isinstance(found, CommandPlaybook):
            words = ["ctl", "run", wanted or found.name, *(("--host", host.name) if host else ())]
            raise UsageError(
                f"playbook `{found.name}` is a command, not an extraction",
                fix=f"use `{shlex.join(words)}`; with `--dry-run` it only shows what it would do",
            )
        return found

    def command_playbook(self, wanted: str) -> CommandPlaybook:
        """Return the command playbook of a name or path. Raises as `playbook`."""
        found = self.any_playbook(wanted, None)
        if isinstance(found, Playbook):
            raise UsageError(
                f"playbook `{found.name}` is an extraction, not a command",
                fix=f"use `ctl extract --playbook {shlex.quote(wanted)}`; a command line stands after `--`: "
                f"ctl run --host NAME -- {wanted}",
            )
        return found

    def any_playbook(self, wanted: str | None, host: Host | None) -> Playbook | CommandPlaybook:
        """Return the playbook of a name or path, of either kind. Raises as `playbook`."""
        name = wanted or self.config.playbook(host)
        if name is None:
            raise UsageError(
                "no playbook given",
                why=f"host `{host.name}` names none" if host else "",
                fix=f"use `--playbook NAME`; playbooks: {', '.join(sorted(self.playbooks)) or 'none found'}",
            )
        if name.endswith(".toml") or "/" in name:
            path = self.cwd / _expand(name, self.environ)
        elif name in self.playbooks:
            path = self.playbooks[name]
        else:
            raise ConfigError(
                f"unknown playbook `{name}`",
                why=f"looked in {', '.join(map(str, self.playbook_folders))}",
                fix=did_you_mean(name, self.playbooks, kind="playbooks"),
                code="unknown-playbook",
            )
        text = _read(_checked_place(path))
        if text is None:
            raise ConfigError(f"there is no playbook {path}", fix="check the path, or give a playbook's name")
        return parse_playbook(path.stem, str(path), text)

    def secret_values(self, host: Host, playbook: Playbook | CommandPlaybook | None) -> dict[str, str]:
        """Return the values of a job's secrets, by environment variable, for the start request only.

        They come from `secrets` of the host (for a command playbook: those that it names) and from what is
        secret in the `env` tables. Raises ConfigError naming the secret whose source is missing; never its value.
        """
        env = {**host.env, **(playbook.env if playbook else {})}
        wanted = set(host.secrets)
        if isinstance(playbook, CommandPlaybook):
            env, wanted = {**unnamed_env(host), **playbook.env}, set(playbook.secrets)
        values = {name: value for name, value in env.items() if is_secret(name, value)}
        named = {
            name: read_secret(name, source, host.name, self.environ)
            for name, source in host.secrets.items()
            if name in wanted
        }
        return {**values, **named}


def load_workspace(
    *,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str | None] | None = None,
    texts: Mapping[Path, str] | None = None,
) -> Workspace:
    """Find and read all configuration. `flags` has the keys of `config.SETTINGS`.

    `texts`, by absolute path, stand for what is in those files, or would be: to check a change before it is made.

    Raises ConfigError naming file, line and key.
    """
    cwd = (cwd or Path.cwd()).absolute()
    environ = os.environ if environ is None else environ
    flags = flags or {}
    chosen = settings(flags, environ).get("config")
    texts = texts or {}
    if chosen:
        project: Path | None = _chosen(cwd / _expand(chosen.value, environ), chosen.origin)
    else:
        project = cwd / "hosts.toml" if cwd / "hosts.toml" in texts else _nearest(cwd, environ)
    user = user_file(environ)
    shipped = shipped_folder() / "hosts.toml"
    sources: list[Source] = []
    seen: set[Path] = set()
    for path, layer in ((project, Layer.PROJECT), (user, Layer.USER), (shipped, Layer.SHIPPED)):
        if path is not None:
            sources += _with_includes(path, layer, seen, environ, texts)
    config = build(
        sources,
        flags=flags,
        environ=environ,
        home=str(_home(environ)),
        ssh_patterns=tuple(ssh_patterns(_home(environ))),
    )
    nearest = [cwd / "playbooks"] if project is None else []
    folders = [*nearest, *(path.parent / "playbooks" for path in (project, user, shipped) if path is not None)]
    return Workspace(
        config=config,
        cwd=cwd,
        project=None if chosen else project,
        playbook_folders=tuple(dict.fromkeys(folders)),
        environ=environ,
    )


def shipped_folder() -> Path:
    """Return the folder of the shipped hosts.toml and playbooks: inside a wheel, else the checkout's root."""
    package = Path(__file__).resolve().parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


def ssh_patterns(home: Path) -> Iterator[str]:
    """Yield the patterns of all `Host` lines in the user's ssh configuration and what it includes.

    Only to know which words are aliases: what they mean is resolved by the transport, with `ssh -G`.
    """
    waiting = [home / ".ssh" / "config"]
    seen: set[Path] = set()
    while waiting and len(seen) < MAX_SSH_INCLUDES:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        for line in (_read(path) or "").splitlines():
            keyword, _, rest = line.strip().replace("=", " ", 1).partition(" ")
            words = [word.strip('"') for word in rest.split()]
            if keyword.lower() == "host":
                yield from words
            elif keyword.lower() == "include":
                for word in words:
                    # Relative includes of a user's file start at ~/.ssh (ssh_config(5)).
                    pattern = home / ".ssh" / (str(home) + word[1:] if word.startswith("~/") else word)
                    waiting += [Path(found) for found in sorted(glob.glob(str(pattern)))]


def _with_includes(
    path: Path, layer: Layer, seen: set[Path], environ: Mapping[str, str], texts: Mapping[Path, str]
) -> Iterator[Source]:
    """Yield a file and what it includes, each once over all layers: the highest layer that has it counts."""
    waiting: list[tuple[Path, str | None]] = [(path, None)]
    while waiting:
        current, includer = waiting.pop(0)
        if current.resolve() in seen:
            continue
        seen.add(current.resolve())
        text = texts.get(current) or _read(_checked_place(current))
        document = None if text is None else parse(str(current), text)
        yield Source(path=str(current), layer=layer, document=document, included_by=includer)
        if document is not None:
            waiting += [(Path(name), str(current)) for name in includes(document, home=str(_home(environ)))]


def _chosen(path: Path, origin: str) -> Path:
    if not _checked_place(path).is_file():
        raise ConfigError(f"there is no file {path}", why=f"{origin} names it", fix=f"correct or remove {origin}")
    return path


def _nearest(cwd: Path, environ: Mapping[str, str]) -> Path | None:
    home = _home(environ)
    for folder in (cwd, *cwd.parents):
        if _checked_place(folder / "hosts.toml").is_file():
            return folder / "hosts.toml"
        if folder == home:
            return None
    return None


def _checked_place(path: Path) -> Path:
    """Return the path of a configuration file. Raises ConfigError where one seems to be there, and is no file."""
    if path.is_symlink() and not path.exists():
        why, fix = f"it is a link to {os.readlink(path)}, which is not there", "correct the link, or remove it"
    elif path.is_dir():
        why, fix = "it is a folder", "put the file in its place, or give the folder another name"
    else:
        return path
    raise ConfigError(f"{path} cannot be read", why=why, fix=fix)


def _read(path: Path) -> str | None:
    """Return a file's text, None if there is none. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}", why=str(error), fix="check its permissions and encoding") from error


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home())


def user_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of your own hosts.toml, which may not exist."""
    return _config_home(environ) / "ctl" / "hosts.toml"


def _config_home(environ: Mapping[str, str]) -> Path:
    # The XDG specification says that a relative path is to be ignored.
    configured = environ.get("XDG_CONFIG_HOME", "")
    return Path(configured) if configured.startswith("/") else _home(environ) / ".config"


def _expand(path: str, environ: Mapping[str, str]) -> str:
    return str(_home(environ)) + path[1:] if path == "~" or path.startswith("~/") else path

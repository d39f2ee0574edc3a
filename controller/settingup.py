"""What `ctl init` and `ctl hosts add` do: new text is checked as if it were in its place, and only then written."""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controller.core.config import REQUIRED
from controller.core.errors import ConfigError, RefusedError, UsageError
from controller.core.playbook import parse_playbook
from controller.core.templates import NewHost, host_table, hosts_file, playbook_file, split_address
from controller.core.tomltext import parse
from controller.localdisk import make_folder, making
from controller.workspace import Workspace, load_workspace, user_file

Prompt = Callable[[str, str], str]
"""Asks for a value: question and default to the answer."""

FLAGS = {"python": "--python", "workdir": "--workdir", "output_roots": "--output-root", "gpus": "--gpus or --cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The four answers of `ctl init`; None is asked for."""

    address: str | None = None
    python: str | None = None
    model: str | None = None
    data: str | None = None


QUESTIONS = {
    "address": ("Which host? (user@address, or an alias of your ssh configuration)", "", "--address"),
    "python": ("Which Python on it has vLLM?", "/opt/vllm/bin/python", "--python"),
    "model": ("Where on it is the model?", "", "--model"),
    "data": ("Where on it is the data set? (local:PATH for a file of this machine)", "", "--data"),
}
"""Field of `Answers` -> the question, its default, and the flag that answers it."""


def init(
    answers: Answers,
    *,
    name: str | None,
    gpus: int,
    workdir: str | None,
    output_root: str | None,
    prompt: Prompt | None,
    dry_run: bool,
) -> tuple[str, list[tuple[Path, str]]]:
    """Write hosts.toml and playbooks/NAME.toml in the current folder; return the host's name, and paths with texts.

    Raises UsageError, with nothing written, if one of them exists, an answer is missing and nobody is there to ask,
    or an answer is not valid.
    """
    cwd = Path.cwd()
    _require_absent(cwd / "hosts.toml")
    answers = _complete(answers, prompt)
    python, model, data = answers.python or "", answers.model or "", answers.data or ""
    user, address, port = split_address(answers.address or "")
    host_name = name or address
    playbook_name = posixpath.basename(model.rstrip("/")).lower() or "extract"
    playbook = cwd / "playbooks" / f"{playbook_name}.toml"
    _require_absent(playbook)
    workdir = workdir or workdir_of(user)
    root = output_root or posixpath.join(workdir, "output")
    host = NewHost(
        name=host_name, address=address, user=user, port=port, python=python,
        workdir=workdir, output_roots=(root,), gpus=gpus, playbook=playbook_name,
    )  # fmt: skip
    output = posixpath.join(root, playbook_name)
    texts = [
        (cwd / "hosts.toml", hosts_file(host)),
        (
            playbook,
            playbook_file(name=playbook_name, model=model, data=data, output=output, gpus=gpus),
        ),
    ]
    _check(lambda: load_workspace(cwd=cwd, texts=dict(texts[:1])).config.host(host_name))
    _check(lambda: parse_playbook(playbook_name, str(playbook), texts[1][1]))
    if not dry_run:
        make_folder(playbook.parent)
        for path, text in texts:
            _create(path, text)
    return host_name, texts


ASSUMED = ("gpus", "tensor_parallel_size")
"""Keys that `ctl init` writes without having asked, where no flag says how many GPUs there are."""


def assumptions(texts: Sequence[tuple[Path, str]]) -> list[str]:
    """Return `FILE:LINE: key = value` for each value in the written files that nobody gave."""
    return [
        f"{path}:{number}: {line.partition('#')[0].rstrip()}"
        for path, text in texts
        for number, line in enumerate(text.splitlines(), 1)
        if line.partition("=")[0].strip() in ASSUMED
    ]


def add_host(host: NewHost, *, own_file: bool, dry_run: bool) -> tuple[Path, str]:
    """Append a host to the project's hosts.toml (or to your own); return the path and the text that was added.

    Everything else in the file stays byte for byte. Raises UsageError if there is such a host already, ConfigError
    if it would not be valid, RefusedError if somebody else wrote to the file meanwhile; then nothing is written.
    """
    workspace = load_workspace()
    path = user_file() if own_file else workspace.project or workspace.cwd / "hosts.toml"
    before = path.read_bytes() if path.exists() else b""
    _require_new(workspace, path, host)
    _require_enough(workspace, host)
    text = host_table(host) if before else hosts_file(host)
    added = _continued(before, text)
    whole = (before + added).decode()
    _check(lambda: load_workspace(texts={path: whole}).config.host(host.name))
    parse(str(path), whole)
    if not dry_run:
        _append(path, before, added)
    return path, text


def workdir_of(user: str | None) -> str:
    """Return a workdir where a user's files usually are; a comment in the file says what the value is for."""
    name = user or os.environ.get("USER") or "root"
    return "/root/ctl" if name == "root" else f"/home/{name}/ctl"


def ask(question: str, default: str) -> str:
    """Ask on the terminal. Raises UsageError at its end of file."""
    print(f"{question}{f' [{default}]' if default else ''} ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip() or default
    except EOFError:
        raise UsageError("the questions were not answered", fix="give the answers as flags") from None


def _complete(answers: Answers, prompt: Prompt | None) -> Answers:
    missing = [field for field in QUESTIONS if getattr(answers, field) is None]
    if missing and prompt is None:
        flags = ", ".join(f"`{QUESTIONS[field][2]}`" for field in missing)
        raise UsageError("nobody is there to answer the questions", fix=f"give {flags}")
    for field in missing:
        assert prompt is not None
        question, default, flag = QUESTIONS[field]
        answer = prompt(question, default)
        if not answer:
            raise UsageError(f"no answer to: {question}", fix=f"answer it, or give {flag}")
        answers = replace(answers, **{field: answer})
    return answers


def _require_absent(path: Path) -> None:
    if os.path.lexists(path):
        raise UsageError(
            f"{path} exists already, and is not overwritten",
            why="nothing was written",
            fix="add a host to it with `ctl hosts add`, or run `ctl init` in another folder",
            code="exists",
        )


def _require_new(workspace: Workspace, path: Path, host: NewHost) -> None:
    origins = workspace.config.origins()
    for name in workspace.config.hosts:
        where = next((value for key, value in origins.items() if key.startswith(f"hosts.{name}.address")), "")
        # A shipped host of the same name is an example; a table of your own takes its place.
        if name == host.name and str(path) in where:
            raise UsageError(f"there is a host `{name}` already", why=where, fix="choose another name", code="exists")


def _require_enough(workspace: Workspace, host: NewHost) -> None:
    given = {key for key in (*REQUIRED, "gpus") if getattr(host, key, None) not in (None, ())}
    defaults = {key[0] for key in workspace.config.tables.defaults}
    missing = [key for key in (*REQUIRED, "gpus") if key in FLAGS and key not in given | defaults]
    if missing:
        raise UsageError(
            f"too little is said about `{host.name}`",
            why=f"neither a flag nor [defaults] gives {', '.join(missing)}",
            fix=f"add {', '.join(FLAGS[key] for key in missing)}",
        )


def _check(read: Callable[[], object]) -> None:
    try:
        read()
    except ConfigError as error:
        raise UsageError(error.what, why=error.why, fix=error.fix or "change the answer", code=error.code) from error


def _continued(before: bytes, text: str) -> bytes:
    """Return the bytes to append: with the file's own line ends, after an empty line."""
    newline = b"\r\n" if b"\r\n" in before else b"\n"
    gap = b"" if not before else newline if before.endswith(b"\n") else newline * 2
    return gap + text.encode().replace(b"\n", newline)


def _create(path: Path, text: str) -> None:
    with making(path), open(path, "x", encoding="utf-8") as stream:
        stream.write(text)


def _append(path: Path, before: bytes, added: bytes) -> None:
    """Append and sync; what could not be written whole is taken back."""
    make_folder(path.parent)
    with making(path), open(path, "ab") as stream:
        if stream.tell() != len(before):
            raise RefusedError(
                f"{path} was changed by somebody else meanwhile", why="nothing was written to it",
                fix="run the command again", code="file-changed",
            )  # fmt: skip
        try:
            stream.write(added)
            stream.flush()
            os.fsync(stream.fileno())
        except OSError:
            os.truncate(path, len(before))
            raise

"""hosts.toml and playbooks as `ctl hosts add` and `ctl init` write them: a key a line, each with what it means."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from controller.core.errors import UsageError
from controller.core.values import WHOLE_ADDRESS

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

COMMENT_COLUMN = 42
"""Where the explanations start, so that they can be read as a column of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHost:
    """A host that is to be written; what is None is left to `[defaults]` or to the ssh configuration."""

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    python: str | None = None
    workdir: str | None = None
    output_roots: Sequence[str] = ()
    gpus: int | None = None
    gpu_name: str | None = None
    playbook: str | None = None


def split_address(text: str) -> tuple[str | None, str, int | None]:
    """Return user, address and port of `[user@]address[:port]`. Raises UsageError."""
    parts = WHOLE_ADDRESS.fullmatch(text)
    if parts is None:
        raise UsageError(f"`{text}` is not an address", fix="write address, user@address or user@address:port")
    port = int(parts["port"]) if parts["port"] else None
    return parts["user"], parts["host"].strip("[]"), port


def host_table(host: NewHost) -> str:
    """Return the table of a host, for the end of hosts.toml."""
    rows: list[tuple[str, object, str]] = [("address", host.address, "a name, an IP address, or an ssh alias")]
    if host.port is not None:
        rows.append(("port", host.port, ""))
    if host.user is not None:
        rows.append(("user", host.user, ""))
    if host.gpus is not None:
        if host.gpus:
            rows.append(("gpus", host.gpus, "preflight compares it with what the driver reports"))
        else:
            rows.append(("accelerator", "cpu", "no GPU is used"))
    if host.gpu_name is not None:
        rows.append(("gpu_name", host.gpu_name, "so is this"))
    if host.python is not None:
        rows.append(("python", host.python, "of the environment that vLLM is installed in"))
    if host.workdir is not None:
        rows.append(("workdir", host.workdir, "payloads and run folders; a local disk"))
    if host.output_roots:
        rows.append(("output_roots", list(host.output_roots), "nothing outside is ever deleted"))
    if host.playbook is not None:
        rows.append(("playbook", host.playbook, "used when no --playbook is given"))
    lines = [f"[hosts.{_key(host.name)}]", *(_row(*row) for row in rows)]
    lines += [
        _row("# bootstrap_python", "python3", "any Python from 3.9 on; runs what needs no vLLM"),
        _row("# on_finish", "notify", 'or a command of this machine: ["program", "argument"]'),
        _row("# price_per_gpu_hour", 2.5, "shown with the GPU-hours of a summary"),
        f"# [hosts.{_key(host.name)}.secrets]",
        _explained('# HF_TOKEN = { env = "HF_TOKEN" }', "for the job's environment, never in a file"),
    ]
    return "\n".join(lines) + "\n"


def hosts_file(host: NewHost) -> str:
    """Return a whole hosts.toml with one host."""
    head = (
        "# Hosts that `ctl` operates; `ctl config show` prints every value that counts and where it comes from,\n"
        f"# `ctl hosts test {host.name}` looks whether the host is as this file says.\n"
        "schema = 1\n\n"
    )
    return head + host_table(host)


def playbook_file(*, name: str, model: str, data: str, output: str, gpus: int) -> str:
    """Return a commented playbook. `output` is a folder below an output root of the host."""
    sections: dict[str, list[tuple[str, object, str]]] = {
        "model": [
            ("path", model, "on the host; relative paths start at its workdir"),
            ("trust_remote_code", False, "true where the folder holds code (Kimi)"),
        ],
        "data": [
            ("path", data, "JSONL, Parquet, Arrow; or local:PATH, which is pushed"),
            ("max_samples", 1000, "raise it once the first summary looks right"),
            ("max_seq_len", 4096, "tokens of a sample; longer ones are cut"),
        ],
        "capture": [
            ("boundaries", "eagle3", "2, N//2, N-3, N layers completed; or a list"),
        ],
        "output": [
            ("path", output, "below one of the host's output_roots"),
            ("format", "speculators", "or speculators-0.3, specforge, modelopt"),
            ("stale", "fail", "or clear, quarantine (both shown and asked), resume"),
        ],
        "engine": [("tensor_parallel_size", max(1, gpus), "and any other vLLM engine argument")],
    }
    head = f"# What to extract; `ctl plan --playbook {name}` says what would be done.\n"
    tables = ("\n".join([f"[{name}]", *(_row(*row) for row in rows)]) for name, rows in sections.items())
    body = "\n\n".join(tables)
    return f'{head}schema = 1\nkind = "extract"\n\n{body}\n'


def _row(key: str, value: object, comment: str) -> str:
    return _explained(f"{key} = {_value(value)}", comment)


def _explained(assignment: str, comment: str) -> str:
    return f"{assignment:<{COMMENT_COLUMN - 1}} # {comment}" if comment else assignment


def _value(value: object) -> str:
    # Strings, whole numbers, booleans and lists of them are written alike in JSON and TOML.
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)

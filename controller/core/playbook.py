"""A playbook's text, and the flags that override it, to a checked `Playbook`."""

from __future__ import annotations

from typing import Any

from controller.core.command import CommandPlaybook
from controller.core.errors import ConfigError, UsageError
from controller.core.model import Overrides, Playbook
from controller.core.tomltext import Document, Key, dotted, parse
from controller.core.validation import NOT_IN_FILES, M, check_keys, keys_of, validate

OVERRIDDEN: dict[str, Key] = {
    "model": ("model", "path"),
    "data": ("data", "path"),
    "output": ("output", "path"),
    "stale": ("output", "stale"),
    "capture": ("capture", "path"),
    "canary": ("capture", "canary"),
    "rehearse": ("rehearse", "mode"),
    "max_samples": ("data", "max_samples"),
    "max_seq_len": ("data", "max_seq_len"),
    "data_kind": ("data", "kind"),
    "format": ("output", "format"),
    "store_dtype": ("capture", "store_dtype"),
    "boundaries": ("capture", "boundaries"),
    "layer_convention": ("capture", "layer_convention"),
}
"""Field of `Overrides` -> the key of the playbook that it replaces."""


def parse_playbook(name: str, path: str, text: str) -> Playbook | CommandPlaybook:
    """Return the playbook in `text`, of the kind that it says; `path` is where it was read from.

    Raises ConfigError naming file, line and key.
    """
    document = parse(path, text)
    if document.data.get("kind") == "command":
        return _checked(CommandPlaybook, document, name)
    engine = document.data.get("engine")
    places = {key: document.where(("engine", key)) for key in engine} if isinstance(engine, dict) else {}
    return _checked(Playbook, document, name, engine_places=places)


def _checked(model: type[M], document: Document, name: str, **filled_in: object) -> M:
    if NOT_IN_FILES & document.data.keys():  # the reader's own, which `validate` could not tell from the file's
        check_keys(document.data, keys_of(model), prefix=(), where=document.where)
    return validate(
        model, {**document.data, "name": name, "origin": document.path, **filled_in}, where=document.where
    )


def override(playbook: Playbook, overrides: Overrides) -> Playbook:
    """Return the playbook with the flags' values in place, checked again. Raises UsageError naming the flag."""
    given = {field: getattr(overrides, field) for field in OVERRIDDEN}
    given = {field: value for field, value in given.items() if value is not None}
    if not given:
        return playbook
    data: dict[str, Any] = playbook.model_dump(by_alias=True)
    flags: dict[Key, str] = {}
    for field, value in given.items():
        table, key = OVERRIDDEN[field]
        data[table][key] = value
        flags[(table, key)] = flags[(table,)] = f"--{field.replace('_', '-')}"
    try:
        return validate(Playbook, data, where=lambda key: flags.get(key[:2]) or flags.get(key[:1]) or dotted(key))
    except ConfigError as error:
        raise UsageError(error.what, why=error.why, fix=error.fix, data=error.data) from error

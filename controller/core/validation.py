"""From pydantic's errors to one ConfigError that names file, line and key, and the nearest valid key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from controller.core.errors import ConfigError
from controller.core.suggest import did_you_mean
from controller.core.tomltext import Document, Key, dotted

M = TypeVar("M", bound=BaseModel)

Where = Callable[[Key], str]
"""From a key to where it was set: `file:line`, a flag, an environment variable."""

NOT_IN_FILES = frozenset({"name", "origin", "engine_places"})
"""Fields that the reader fills in; in a file they are unknown keys."""


_ONE_OF = ("literal_error", "enum")
_WRITE = {
    "int_type": "write a whole number, without quotes",
    "int_from_float": "write a whole number, without a point",
    "float_type": "write a number, without quotes",
    "bool_type": "write true or false, without quotes",
    "string_type": 'write text in quotes: "..."',
    "tuple_type": "write a list: [...]",
    "list_type": "write a list: [...]",
    "dict_type": "write a table: {{ key = ... }}",
    "model_type": "write a table: {{ key = ... }}",
    "finite_number": "write a number other than inf and nan",
    "greater_than_equal": "write {ge} or more",
    "greater_than": "write more than {gt}",
    "less_than_equal": "write {le} or less",
    "less_than": "write less than {lt}",
    "too_short": "write at least {min_length}",
}
"""Type of pydantic's error (docs.pydantic.dev/latest/errors/validation_errors) -> how such a value is written."""

_SAYS = {
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_parsing_size": "it must be a whole number of fewer digits",
    "float_parsing": "it must be a number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "tuple_type": "it must be a list",
    "list_type": "it must be a list",
    "dict_type": "it must be a table",
    "model_type": "it must be a table",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
    "greater_than_equal": "it must be at least {ge}",
    "greater_than": "it must be more than {gt}",
    "less_than_equal": "it must be at most {le}",
    "less_than": "it must be less than {lt}",
    "too_short": "it must have at least {min_length} in it, and has {actual_length}",
}
"""Type of pydantic's error -> what is said of it, with the words of its context; of others it is pydantic's words."""

_QUOTED = re.compile(r"'([^']*)'")


def refusal(message: str, fix: str = "", *, key: str = "") -> PydanticCustomError:
    """Return the error that a validator raises to say what is wrong and what to do about it.

    `key` is the one in question, where the validator is of the table that holds it.
    """
    return PydanticCustomError("refused", "{message}", {"message": message, "fix": fix, "key": key})


def validate(model: type[M], data: Mapping[str, Any], *, where: Where, prefix: Key = ()) -> M:
    """Return `model` made from `data`; `prefix` goes before each key that an error names.

    Raises ConfigError: the first problem in detail, the others in `why` and in its data.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    # An unknown key comes first: it often is why another one is missing.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    raise _refusal([_problem(model, detail, prefix, where) for detail in details], where)


def check_keys(table: Mapping[str, Any], valid: Iterable[str], *, prefix: Key, where: Where) -> None:
    """Raise ConfigError for the keys of `table` that are not in `valid`, as `validate` does."""
    names = set(valid) - NOT_IN_FILES
    problems = [_unknown((*prefix, name), names, where) for name in table if name not in names]
    if problems:
        raise _refusal(problems, where)


def _refusal(problems: Sequence[_Problem], where: Where) -> ConfigError:
    first = problems[0]
    others = [": ".join(filter(None, (each.what, each.why or each.fix))) for each in problems[1:]]
    why = "; ".join(filter(None, [first.why, f"also {'; '.join(others)}" if others else ""]))
    record: dict[str, object] = {"key": dotted(first.key), "where": where(first.key)}
    return ConfigError(first.what, why=why, fix=first.fix, data={**record, "also": others} if others else record)


def fail(document: Document, key: Key, what: str, *, why: str = "", fix: str = "") -> NoReturn:
    """Raise ConfigError about `key` of a document."""
    where = document.where(key)
    raise ConfigError(f"{where}: {what}", why=why, fix=fix, data={"key": dotted(key), "where": where})


def keys_of(model: type[BaseModel]) -> set[str]:
    """Return the keys that a file may set in the table behind `model`."""
    return {field.alias or name for name, field in model.model_fields.items()} - NOT_IN_FILES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    key: Key
    what: str
    why: str = ""
    fix: str = ""


def _problem(model: type[BaseModel], detail: ErrorDetails, prefix: Key, where: Where) -> _Problem:
    inside = tuple(part for part in detail["loc"] if isinstance(part, str) and part != "[key]")
    named = _context(detail).get("key")  # by a validator of the whole table
    key = (*prefix, *inside, *([str(named)] if named else []))
    if detail["type"] == "missing":
        *table, name = key
        owner = f"`{dotted(table)}`" if table else "the file"
        return _Problem(key=key, what=f"{where(tuple(table))}: {owner} lacks `{name}`", fix=f"add `{name} = ...`")
    if detail["type"] == "extra_forbidden":
        return _unknown(key, _keys_at(model, inside[:-1]), where)
    return _Problem(
        key=key,
        what=f"{where(key)}: `{dotted(key)}` is not valid",
        why=says(detail),
        fix=_fix(detail),
    )


def says(detail: ErrorDetails) -> str:
    """Return what a value must be, in words of ours where there are some."""
    words = _SAYS.get(detail["type"])
    return detail["msg"] if words is None else words.format(**_context(detail))


def _context(detail: ErrorDetails) -> dict[str, Any]:
    """Return the context of an error; a whole limit has no point."""
    context: dict[str, Any] = detail.get("ctx", {})
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in context.items()
    }


def _fix(detail: ErrorDetails) -> str:
    """Return what a validator of ours says, or, where a word is to be one of a few, the nearest of them.

    The input is shown in no other case: it may be a secret.
    """
    context = _context(detail)
    if detail["type"] in _ONE_OF:
        words = _QUOTED.findall(str(context.get("expected", "")))
        return did_you_mean(str(detail["input"]), words, kind="values") if words else f"write {context['expected']}"
    return str(context.get("fix") or _WRITE.get(detail["type"], "").format(**context))


def _unknown(key: Key, valid: Iterable[str], where: Where) -> _Problem:
    return _Problem(
        key=key,
        what=f"{where(key)}: unknown key `{dotted(key)}`",
        fix=did_you_mean(key[-1], valid, kind="keys here"),
    )


def _keys_at(model: type[BaseModel], path: Key) -> set[str]:
    """Return the valid keys of the table at `path` below `model`, through fields and mappings of models."""
    current: Any = model
    for part in path:
        if isinstance(current, type) and issubclass(current, BaseModel):
            fields = {field.alias or name: field.annotation for name, field in current.model_fields.items()}
            current = fields.get(part)
        else:  # a mapping of models: the part is one of its keys
            current = get_args(current)[-1] if get_args(current) else None
    return keys_of(current) if isinstance(current, type) and issubclass(current, BaseModel) else set()

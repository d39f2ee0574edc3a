"""Whether vLLM would refuse the value of an engine argument, by the type that was read of its source.

vLLM has pydantic check its configurations, and in its lax way: "8" is an integer to it, and so is true. A value is
called wrong here only where that fails too.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping
from typing import Any

_INTEGER = re.compile(r"\s*[+-]?[\d_]+(\.[\d_]*)?\s*")
_WORDS = frozenset({"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"})
"""What pydantic takes for a bool of a string, in any case of the letters."""

NUMBERS = frozenset({"int", "float"})

_WRITTEN_LIMIT = 60
"""Characters of a value that a sentence repeats."""

_NOUNS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}
_BOUNDS = {
    "ge": (operator.ge, "of at least"), "gt": (operator.gt, "above"),
    "le": (operator.le, "of at most"), "lt": (operator.lt, "below"),
}  # fmt: skip


def refused(value: Any, wanted: Mapping[str, Any]) -> bool:
    """Say whether vLLM surely refuses a playbook's value; `wanted` is one entry of the report's `engine_types`."""
    if value in wanted["choices"] or value is None:
        return False
    taken = [kind for kind in wanted["types"] if _takes(kind, value)]
    if not taken:
        return True
    # A string that stands for a number is left to vLLM.
    is_number = isinstance(value, (int, float)) and set(taken) <= NUMBERS
    return is_number and not all(_BOUNDS[name][0](value, limit) for name, limit in wanted["bounds"].items())


def wants(wanted: Mapping[str, Any]) -> str:
    """Return what is taken, in words: `an integer of at least 1`, `true or false`, `one of "a", "b"`."""
    parts = [_NOUNS[kind] for kind in wanted["types"]]
    if wanted["choices"] and "str" not in wanted["types"]:
        parts.append("one of " + ", ".join(json.dumps(choice) for choice in wanted["choices"]))
    limits = " and ".join(f"{_BOUNDS[name][1]} {limit:g}" for name, limit in wanted["bounds"].items())
    return " or ".join(parts) + (f" {limits}" if limits else "")


def written(value: Any) -> str:
    """Return a value about as the playbook writes it, cut where it is long."""
    words = json.dumps(value, default=str, ensure_ascii=False)
    return words if len(words) <= _WRITTEN_LIMIT else words[: _WRITTEN_LIMIT - 1] + "…"


def _takes(kind: str, value: Any) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return value in (0, 1) if isinstance(value, (int, float)) else _is_word(value)
    if kind == "int":
        if isinstance(value, float):
            return value.is_integer()
        return isinstance(value, int) or (isinstance(value, str) and _INTEGER.fullmatch(value) is not None)
    return isinstance(value, (int, float)) or (isinstance(value, str) and _is_number(value))


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in _WORDS


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

"""The types of engine arguments: as recorded of eleven releases, of the installed one, and of odd sources."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from controller.core.enginevalues import refused
from controller.core.triage_model import ARGUMENTS_OF_FIELDS
from remote_payload.host.vllm_source import VllmSource
from remote_payload.host.vllm_types import engine_types, passed_on
from tools import make_compatibility

RELEASES: dict[str, Any] = json.loads(make_compatibility.FACTS.read_text())

ARGUMENTS = """
from vllm.config import PartConfig
def resolved(given, model):
    'Resolve auto.'
    if given != "auto":
        return given
    return model.kind
def lowered(given, model):
    if given != "auto":
        return given.lower()
    return model.kind
class EngineArgs:
    one: int = 1
    def create_engine_config(self):
        {before}
        part = self.create_part()
    def create_part(self):
        {local}
        return {made}
"""
CONFIG = """
from typing import Literal, Optional, Union
import torch
from pydantic import Field, SkipValidation, field_validator, model_validator
from pydantic.dataclasses import dataclass
Kind = Literal["a", "b"]
Number = int
{decorator}
class PartConfig:
    one: {annotation} = {default}
    {validator}
"""


def read(
    folder: Path,
    annotation: str = "int",
    *,
    before: str = "pass",
    local: str = "pass",
    made: str = "PartConfig(one=self.one)",
    decorator: str = "@dataclass",
    default: str = "1",
    validator: str = "pass",
) -> dict[str, Any] | None:
    for name, text in (
        ("engine/arg_utils.py", ARGUMENTS.format(before=before, local=local, made=made)),
        (
            "config.py",
            CONFIG.format(decorator=decorator, annotation=annotation, default=default, validator=validator),
        ),
    ):
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return engine_types(VllmSource(str(folder))).get("one")


def kept(version: str) -> dict[str, Any]:
    types: dict[str, Any] = RELEASES[version]["engine_types"]
    return types


def test_releases_are_read_as_they_take_them() -> None:
    """0.11 has pydantic skip what it sets itself, and every release has more quantizations than it names."""
    for version in RELEASES:
        types = kept(version)
        assert types["enforce_eager"] == {"types": ["bool"], "choices": [], "bounds": {}}
        assert types["gpu_memory_utilization"]["types"] == ["float"]
        assert "bfloat16" in types["dtype"]["choices"]
        assert "quantization" not in types
        if version == "0.11.0":
            assert "max_num_seqs" not in types
        else:
            assert types["gpu_memory_utilization"]["bounds"] == {"gt": 0, "le": 1}
            assert types["max_num_seqs"] == {"types": ["int"], "choices": [], "bounds": {"ge": 1}}


def installed() -> VllmSource:
    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return VllmSource(str(Path(spec.submodule_search_locations[0]).parent))


def test_the_installed_release_is_read_as_recorded() -> None:
    types = engine_types(installed())
    kinds = types["kv_cache_dtype"]
    assert [refused(value, kinds) for value in ("fp99", "fp8", "auto")] == [True, False, False]
    assert types["runner"]["choices"][:2] == ["auto", "generate"]
    assert types["mm_processor_cache_gb"]["types"] == ["float"]
    assert {name: types[name] for name in make_compatibility.TYPED if name in types} == kept("0.32.0")
    assert len(types) > 100
    assert not {"compilation_config", "additional_config", "limit_mm_per_prompt", "logits_processors"} & set(types)


@pytest.mark.parametrize(
    ("annotation", "types", "choices"),
    [
        ("int", ["int"], []),
        ("float | None", ["float"], []),
        ("Optional[bool]", ["bool"], []),
        ("Union[str, int, None]", ["str", "int"], []),
        ('"int | None"', ["int"], []),
        ("Kind", [], ["a", "b"]),
        ("Kind | torch.dtype", [], ["a", "b"]),
        ("str | Kind", ["str"], ["a", "b"]),
        ("Literal[1, 8, None]", [], [1, 8]),
        ('Literal["auto", Kind]', [], ["auto", "a", "b"]),
        ("InitVar[float | None]", ["float"], []),
    ],
)
def test_a_plain_type_is_told(tmp_path: Path, annotation: str, types: list[str], choices: list[Any]) -> None:
    assert read(tmp_path, annotation) == {"types": types, "choices": choices, "bounds": {}}


@pytest.mark.parametrize(
    "annotation",
    ["SkipValidation[int]", "list[int]", "int | list[int]", "dict", "Any", "Other", "Literal[1.5]", "None",
         "type[object] | str", "Optional[InitVar[int]]", 'Literal["a", Other]', 'Literal["a", Number]'],
)  # fmt: skip
def test_any_other_type_is_left_open(tmp_path: Path, annotation: str) -> None:
    assert read(tmp_path, annotation) is None


@pytest.mark.parametrize(
    ("default", "bounds"),
    [
        ("Field(default=1, ge=1)", {"ge": 1}),
        ("Field(default=0.9, gt=0, le=1.0)", {"gt": 0, "le": 1.0}),
        ("Field(default=1, ge=LIMIT)", {}),
        ("field(default=1)", {}),
    ],
)
def test_plain_limits_are_told(tmp_path: Path, default: str, bounds: dict[str, float]) -> None:
    assert read(tmp_path, default=default) == {"types": ["int"], "choices": [], "bounds": bounds}


def wrap(body: str, names: str = '"one"', mode: str = '"wrap"') -> str:
    return f"@field_validator({names}, mode={mode})\n    def check(cls, value, handler):\n        {body}"


@pytest.mark.parametrize(
    "validator",
    [
        wrap("return None if value is None else handler(value)"),
        wrap("if value is None: return value\n        return handler(value)"),
        wrap("return int(value)", mode='"after"'),
        wrap("return int(value)", names='"other"', mode='"before"'),
        '@model_validator(mode="after")\n    def check(self): return self',
    ],
)
def test_a_validator_that_leaves_the_value_to_pydantic_changes_nothing(tmp_path: Path, validator: str) -> None:
    assert read(tmp_path, validator=validator) is not None


@pytest.mark.parametrize(
    "validator",
    [
        wrap("return int(value)", mode='"before"'),
        wrap("return int(value)", mode='"plain"'),
        wrap("return int(value)", names='"*"', mode='"before"'),
        wrap("return int(value)", names="*NAMES", mode='"before"'),
        wrap("return int(value)", mode="MODE"),
        wrap("return handler(int(value))\n        return value"),
        wrap("value = 8\n        return handler(value)"),
        wrap("if value == 'eight': return 8\n        return handler(value)"),
        wrap("return 8 if value == 'eight' else handler(value)"),
        '@model_validator(mode="before")\n    def check(cls, data): return data',
        "def __init__(self, **given): pass",
    ],
)
def test_a_class_that_sees_the_value_first_leaves_it_open(tmp_path: Path, validator: str) -> None:
    assert read(tmp_path, validator=validator) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"made": "PartConfig(one=int(self.one))"},
        {"made": "PartConfig(one=self.one) if self.two else None"},
        {"made": "self.two and PartConfig(one=self.one)"},
        {"made": "self.one"},
        {"before": "self.one = int(self.one)"},
        {"before": "if self.two is None: self.one = 8"},
        {"before": "if self.two: return None"},
        {"before": "with self.two:\n            if self.two: return None"},
        {"before": "with self.two:\n            if self.two: PartConfig(one=self.one)", "made": "None"},
        {"before": "def make(): PartConfig(one=self.one)", "made": "None"},
        {"decorator": "@some.dataclass"},
        {"decorator": "@config"},
    ],
)
def test_what_does_not_reach_pydantic_as_it_is_is_left_open(tmp_path: Path, changes: dict[str, str]) -> None:
    assert read(tmp_path, **changes) is None


@pytest.mark.parametrize(
    "before",
    [
        "if self.one is None: self.one = 8",
        "if self.two: print(self.one)",
        "with self.two: print(self.one)",
        "with self.two:\n            if self.two: print(self.one)",
    ],
)
def test_a_default_of_vllms_own_leaves_a_given_value_alone(tmp_path: Path, before: str) -> None:
    assert read(tmp_path, before=before) is not None


@pytest.mark.parametrize(
    ("changes", "also"),
    [
        ({"made": "PartConfig(one=self.one if self.one is not None else self.two)"}, []),
        ({"made": "PartConfig(one=self.two if self.one is None else self.one)"}, []),
        ({"local": "given = self.one", "made": "PartConfig(one=given)"}, []),
        ({"made": "PartConfig(one=resolved(self.one, self.model))"}, ["auto"]),
        ({"local": "given = resolved(self.one, self.model)", "made": "PartConfig(one=given)"}, ["auto"]),
    ],
)
def test_a_value_that_takes_a_detour_is_told(tmp_path: Path, changes: dict[str, str], also: list[str]) -> None:
    """What the detour replaces is taken, whatever the field says."""
    assert read(tmp_path, "Kind", **changes) == {"types": [], "choices": ["a", "b", *also], "bounds": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"made": "PartConfig(one=self.one or self.two)"},
        {"made": "PartConfig(one=self.one if self.two is not None else self.two)"},
        {"made": "PartConfig(one=self.two if self.one is not None else self.one)"},
        {"local": "given = self.one; given = 8", "made": "PartConfig(one=given)"},
        {"local": "given = 8\n        if self.two: given = self.one", "made": "PartConfig(one=given)"},
        {"made": "PartConfig(one=given)"},
        {"made": "PartConfig(one=lowered(self.one, self.model))"},
        {"made": "PartConfig(one=resolved(self.model, self.one))"},
        {"made": "PartConfig(one=nobody(self.one))"},
    ],
)
def test_a_detour_that_may_change_the_value_leaves_it_open(tmp_path: Path, changes: dict[str, str]) -> None:
    assert read(tmp_path, "Kind", **changes) is None


def test_triage_knows_every_field_of_the_installed_release_that_has_another_name() -> None:
    found = {f"{each.config.name}.{each.field}": each.name for each in passed_on(installed())}
    assert found["CacheConfig.cache_dtype"] == "kv_cache_dtype"
    renamed = {field: name for field, name in found.items() if field.partition(".")[2] != name}
    assert renamed.items() <= ARGUMENTS_OF_FIELDS.items()


def test_vllms_own_decorator_counts_where_it_calls_pydantics(tmp_path: Path) -> None:
    config = "def config(cls): return dataclass(cls, config=None)\n@config"
    assert read(tmp_path, decorator=config) is not None
    assert read(tmp_path, decorator="def config(cls): return cls\n@config") is None


def test_no_vllm_tells_nothing(tmp_path: Path) -> None:
    assert engine_types(VllmSource(str(tmp_path))) == {}

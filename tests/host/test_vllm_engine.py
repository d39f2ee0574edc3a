"""Engine arguments and a GPU's ways through vLLM, read from the installed source and from odd expressions."""

from __future__ import annotations

import ast
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host.vllm_engine import engine_arguments, evaluate, gpu_paths
from remote_payload.host.vllm_source import VllmSource


@pytest.fixture(scope="module")
def source() -> VllmSource:
    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return VllmSource(str(Path(spec.submodule_search_locations[0]).parent))


def test_the_installed_engines_arguments(source: VllmSource) -> None:
    found = engine_arguments(source)
    assert found is not None
    assert {"model", "tensor_parallel_size", "enforce_eager", "max_model_len", "worker_cls", "compilation_config",
            "additional_config", "gpu_memory_utilization", "skip_tokenizer_init"} <= set(found)  # fmt: skip
    assert "from_cli_args" not in found
    assert "self" not in found


@pytest.mark.parametrize(
    ("capability", "mla", "symmetric"),
    [((12, 0), ["TRITON_MLA"], False), ((9, 0), ["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"], True)],
)
def test_what_the_installed_vllm_takes_on_a_gpu(
    source: VllmSource, capability: tuple[int, int], mla: list[str], symmetric: bool
) -> None:
    found = gpu_paths(source, capability)
    able = [item["name"] for item in found["mla"] if item["able"]]
    assert [name for name in able if "SPARSE" not in name] == mla
    assert "FLASH_ATTN" in [item["name"] for item in found["attention"] if item["able"]]
    assert (found["symmetric_memory"], found["custom_needs_nvlink"]) == (symmetric, True)


def test_a_release_without_such_lists_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    assert engine_arguments(VllmSource(str(tmp_path))) is None
    found = gpu_paths(VllmSource(str(tmp_path)), (12, 0))
    assert set(found.values()) == {None}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("c.major == 12", True),
        ("c.major in [9, 10]", False),
        ("c >= DeviceCapability(8, 0)", True),
        ("c < DeviceCapability(major=9, minor=0)", False),
        ("c is not None and c.major == 10", False),
        ("c.major == 10 and unknown()", False),
        ("c.major == 12 or unknown()", True),
        ("c.major == 12 and unknown()", None),
        ("not c.minor", True),
        ("c.major == other.major", None),
        ("c.major < 'x'", None),
        ("True", True),
        ("lambda: 1", None),
    ],
)
def test_conditions_over_the_capability(text: str, value: Any) -> None:
    assert evaluate(ast.parse(text, mode="eval").body, {"c": (12, 0)}) is value

"""A private name that vLLM has renamed fails with the name and the version: each of them, taken away in turn."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from support.extraction import REPOSITORY

from remote_payload.extract import expert_map, hooks, rotary, versions
from remote_payload.extract.errors import CaptureError


def lacking(names: tuple[str, ...], name: str, **fields: Any) -> SimpleNamespace:
    """An object that has all of `names` but one."""
    return SimpleNamespace(**{each: fields.get(each) for each in names if each != name})


def whole(names: tuple[str, ...], **fields: Any) -> SimpleNamespace:
    return lacking(names, "", **fields)


def worker(of: str, name: str) -> SimpleNamespace:
    """A worker, whole but for `name` of its part `of`."""

    def part(which: str, names: tuple[str, ...], **fields: Any) -> SimpleNamespace:
        return lacking(names, name if which == of else "", **fields)

    parallel = part("parallel_config", versions.PARALLEL_CONFIG, tensor_parallel_size=2)
    model = part("model_config", versions.MODEL_CONFIG, enforce_eager=True)
    config = part("vllm_config", versions.VLLM_CONFIG, cache_config=part("cache_config", versions.CACHE_CONFIG))
    return part(
        "worker", versions.WORKER_ATTRIBUTES, vllm_config=config, model_config=model, parallel_config=parallel
    )


def step(of: str, name: str) -> SimpleNamespace:
    def part(which: str, names: tuple[str, ...], **fields: Any) -> SimpleNamespace:
        return lacking(names, name if which == of else "", **fields)

    sampling = part("sampling", versions.SAMPLING)
    new = part("new", versions.STEP_NEW, sampling_params=sampling)
    cached = part("cached", versions.STEP_CACHED)
    return part("step", versions.STEP, scheduled_new_reqs=[new], scheduled_cached_reqs=cached)


def runner(of: str, name: str) -> SimpleNamespace:
    def part(which: str, names: tuple[str, ...], **fields: Any) -> SimpleNamespace:
        return lacking(names, name if which == of else "", **fields)

    state = part("state", versions.STATE)
    return part("runner", ("execute_model_state", "input_batch"), execute_model_state=state,
                input_batch=part("batch", versions.BATCH))  # fmt: skip


def require_llm(of: str, name: str) -> None:
    engine = lacking(versions.ENGINE, name if of == "engine" else "")
    versions.require_llm(lacking(versions.LLM, name if of == "llm" else "", llm_engine=engine))


CHECKS: dict[str, tuple[tuple[str, ...], Callable[[str], object]]] = {
    "LLM": (versions.LLM, lambda name: require_llm("llm", name)),
    "its engine": (versions.ENGINE, lambda name: require_llm("engine", name)),
    "worker": (versions.WORKER_ATTRIBUTES, lambda name: versions.require_worker(worker("worker", name))),
    "configuration": (versions.VLLM_CONFIG, lambda name: versions.require_worker(worker("vllm_config", name))),
    "model config": (versions.MODEL_CONFIG, lambda name: versions.require_worker(worker("model_config", name))),
    "parallel config": (
        versions.PARALLEL_CONFIG, lambda name: versions.require_worker(worker("parallel_config", name)),
    ),
    "cache config": (versions.CACHE_CONFIG, lambda name: versions.require_worker(worker("cache_config", name))),
    "model": (
        versions.MODEL, lambda name: versions.require_loaded(worker("", ""), lacking(versions.MODEL, name)),
    ),
    "step": (versions.STEP, lambda name: versions.require_step(step("step", name))),
    "new request": (versions.STEP_NEW, lambda name: versions.require_step(step("new", name))),
    "sampling": (versions.SAMPLING, lambda name: versions.require_step(step("sampling", name))),
    "cached requests": (versions.STEP_CACHED, lambda name: versions.require_step(step("cached", name))),
    "batch of a runner": (("input_batch",), lambda name: versions.require_executed(runner("runner", name))),
    "batch": (versions.BATCH, lambda name: versions.require_executed(runner("batch", name))),
    "state of a step": (versions.STATE, lambda name: versions.require_executed(runner("state", name))),
}  # fmt: skip


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, (names, _) in CHECKS.items() for name in names])
def test_each_name_is_missed(what: str, name: str) -> None:
    _, check = CHECKS[what]
    check("")  # nothing is missed where all is there
    with pytest.raises(CaptureError, match=rf"\b{name}\b") as caught:
        check(name)
    assert f"vLLM {vllm.__version__}" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "use"),
    [
        (versions.CPU_WORKER, lambda: versions.worker_class(cpu=True)),
        (versions.CPU_ROTARY, rotary.broken),
        (versions.CPU_ROTARY, rotary.repair),
        (versions.ALL_GATHER, lambda: hooks._gathered(None, 1)),  # type: ignore[arg-type]
        (expert_map.EXPERTS, expert_map.repair),
    ],
)
def test_each_module_and_its_name_is_missed(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], use: Callable[[], object]
) -> None:
    module, name = names
    monkeypatch.delattr(importlib.import_module(module), name)
    with pytest.raises(CaptureError, match=rf"module {module} has no {name}\b"):
        use()
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(CaptureError, match=f"vLLM {re.escape(vllm.__version__)} has no module {module}"):
        use()


def test_the_flag_of_compiled_modules_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.require_compiled_flag()
    module, _ = versions.COMPILED
    monkeypatch.setattr(versions, "COMPILED", (module, "do_not_compile_any_more"))
    with pytest.raises(CaptureError, match="sets no do_not_compile_any_more"):
        versions.require_compiled_flag()


def test_a_worker_class_lacks_a_method() -> None:
    for name in versions.WORKER_METHODS:
        with pytest.raises(CaptureError, match=rf"the worker class W has no {name},"):
            versions.require(lacking(versions.WORKER_METHODS, name), versions.WORKER_METHODS, "the worker class W")


def test_the_installed_vllm_has_the_cpu_worker() -> None:
    versions.require(versions.worker_class(cpu=True), versions.WORKER_METHODS, "the CPU worker")


PUBLIC = {"vllm", "vllm.platforms", "vllm.sampling_params"}
"""What vLLM documents or every user of its library imports."""


def test_nothing_private_is_imported_but_by_name() -> None:
    for path in (REPOSITORY / "remote_payload" / "extract").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            private = [name for name in modules if name.split(".")[0] == "vllm" and name not in PUBLIC]
            assert not private, f"{Path(path).name} imports {private}: use versions.named"

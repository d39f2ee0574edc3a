"""Real engines, started once each and shared: every fixture below costs one start (20 to 60 s)."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import consumers, faults, reference, releases
from support.extraction import REPOSITORY, Run, execute, make_run, write_lines
from support.stubengine import StubEngine

from tools import tiny_models

MAX_LENGTH = 300
ALL = list(range(tiny_models.LAYERS + 1))

collect_ignore = [] if releases.installed() == releases.OLDER else ["test_older_vllm.py"]
"""Needs the environment of `make test-older`."""

COMPILED = {"VLLM_CPU_CI_ENV": "1"}
"""vLLM traces the model into a graph as always, but skips the minute of C++ compilation."""


@pytest.fixture(scope="session")
def columns() -> Iterator[None]:
    """pyarrow, which the project's own environment need not have, for the rest of the session."""
    path = str(consumers.install("columns"))
    sys.path.append(path)
    yield
    sys.path.remove(path)


@pytest.fixture(scope="module")
def stub() -> Iterator[StubEngine]:
    """The job over a model of vLLM, for what is about supervision, files and races."""
    with StubEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: tiny_models.write(name, root)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of all kinds: long, short, one token, a shared prefix, chats, and records that must be refused."""
    root = tmp_path_factory.mktemp("data")
    tiny_models.chats(root / tiny_models.CHATS, count=12)
    chats = (root / tiny_models.CHATS).read_text().splitlines()
    generator = random.Random(7)
    lengths = (MAX_LENGTH, 1, 40, 129, 64, 17, MAX_LENGTH + 50)
    tokens = [[generator.randrange(10, 1000) for _ in range(length)] for length in lengths]
    tokens.append(tokens[0][:100] + tokens[2])
    refused = ["{ half a record", "", '{"input_ids": []}']
    return write_lines(
        root / "data.jsonl",
        [
            *chats[:6],
            *({"input_ids": ids, "id": f"tokens-{place}"} for place, ids in enumerate(tokens)),
            *refused,
            *chats[6:],
        ],
    )


@pytest.fixture(scope="session")
def launch(model: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run the job over the shared data set, whatever this vLLM can."""

    def run(name: str, *, env: dict[str, str] | None = None, fault: str | None = None, **extract: Any) -> Run:
        folder = tmp_path_factory.mktemp(name)
        environment = {"VLLM_CACHE_ROOT": str(folder / "cache"), **(env or {})}
        if fault:
            environment["PYTHONPATH"] = f"{REPOSITORY}:{faults.install(folder / 'fault', fault)}"
        fields = {"model": str(model(name)), "data": str(data), "max_seq_len": MAX_LENGTH, **extract}
        return execute(make_run(folder, **fields), "engine", **environment)

    return run


@pytest.fixture(scope="session")
def start(launch: Callable[..., Run]) -> Callable[..., Run]:
    """The same; a test of what this release of vLLM cannot run is skipped with the reason."""

    def run(name: str, **extract: Any) -> Run:
        if reason := releases.why_not(name, extract.get("engine") or {}):
            pytest.skip(reason)
        return launch(name, **extract)

    return run


@pytest.fixture(scope="session")
def expected(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[int]], Any]:
    """States by transformers, computed once a prompt."""
    models: dict[str, Any] = {}
    known: dict[tuple[str, tuple[int, ...]], Any] = {}

    def states(name: str, token_ids: list[int]) -> Any:
        if name not in models:
            models[name] = reference.load(model(name), tmp_path_factory.mktemp("reference"))
        key = (name, tuple(token_ids))
        if key not in known:
            known[key] = reference.states(models[name], token_ids)
        return known[key]

    return states


@pytest.fixture(scope="session")
def qwen_chunked(start: Any) -> Run:
    """Compiled, native states incomplete: the base path replaces them; prompts are cut over many steps."""
    engine = {"enforce_eager": False, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return start("qwen3-tiny", fault=faults.DROP_LAST, env=COMPILED, engine=engine, canary=True)


@pytest.fixture(scope="session")
def qwen_native(start: Any) -> Run:
    """Compiled and native; whole prompts."""
    engine = {"enforce_eager": False, "max_num_batched_tokens": 2048}
    return start(
        "qwen3-tiny", capture="native", fault=faults.COMPILE_FACTORS, env=COMPILED, engine=engine, canary=True
    )


@pytest.fixture(scope="session")
def deepseek_hidden(start: Any) -> Run:
    """A class without native states."""
    return start("deepseek-v3-tiny", fault=faults.HIDE_NATIVE, boundaries=ALL)


@pytest.fixture(scope="session")
def deepseek_filled(start: Any) -> Run:
    """Eager, and the last native state is dropped: hooks fill it in."""
    return start("deepseek-v3-tiny", fault=faults.DROP_LAST, boundaries=ALL)


@pytest.fixture(scope="session")
def deepseek_past_last(start: Any) -> Run:
    """Compiled, by a vLLM that drops the state after the last layer: one more layer makes it native."""
    engine = {"enforce_eager": False, "max_num_batched_tokens": 2048}
    return start("deepseek-v3-tiny", fault=faults.OLD_DEEPSEEK, env=COMPILED, engine=engine, boundaries=ALL[1:])


@pytest.fixture(scope="session")
def llama4_hooks(start: Any) -> Run:
    return start("deepseek-v3-llama4-tiny", capture="hooks", final_norm=True)


@pytest.fixture(scope="session")
def llama4_native(start: Any) -> Run:
    return start("deepseek-v3-llama4-tiny", capture="native")


@pytest.fixture(scope="session")
def kimi_hooks(start: Any) -> Run:
    engine = {"tensor_parallel_size": 2}
    return start("kimi-k25-tiny", capture="hooks", engine=engine, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


@pytest.fixture(scope="session")
def kimi_native(start: Any) -> Run:
    engine = {"tensor_parallel_size": 2}
    return start("kimi-k25-tiny", engine=engine, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, canary=True)


@pytest.fixture(scope="session")
def kimi_failed(start: Any) -> Run:
    """vLLM's MLA refuses the head dimension, at the first step after a load without complaint."""
    return start("kimi-k25-bad-rank", engine={"load_format": "dummy"})


@pytest.fixture(scope="session")
def qwen_moe(start: Any) -> Run:
    """Two ranks, each with half of the experts; native, and held against hooks by probe and canary."""
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    return start("qwen3-moe-tiny", engine=engine, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, canary=True)


@pytest.fixture(scope="session")
def deepseek_experts(start: Any) -> Run:
    """Two ranks, each with half of the experts, of a model that also has shared ones; hooks alone."""
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    return start("deepseek-v3-tiny", capture="hooks", engine=engine, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


@pytest.fixture(scope="session")
def mistral(start: Any) -> Run:
    return start("mistral-sliding-tiny", engine=releases.sliding_window(), canary=True)


@pytest.fixture(scope="session")
def llama(start: Any) -> Run:
    return start("llama-tiny", canary=True)


@pytest.fixture(scope="session")
def qwen_int8(start: Any) -> Run:
    return start("qwen3-int8-tiny", canary=True)

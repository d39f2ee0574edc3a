"""Rehearsals: what they prove, what they leave, what they must catch. Real engines on cut models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import faults, releases
from support.extraction import REPOSITORY, Run, execute, make_run

from remote_payload.extract.rehearse import cut_boundaries, prove_writable

MAX_LENGTH = 300
ENGINE = {"enforce_eager": True, "max_num_batched_tokens": 512, "max_num_seqs": 8}


@pytest.fixture(scope="session")
def rehearse(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Rehearse a job; `workdir` holds the cache of rehearsals and defaults to a new folder."""

    def run(model: Path, *, fault: str | None = None, workdir: Path | None = None, **extract: Any) -> Run:
        if reason := releases.why_not(model.name, extract.get("engine") or {}):
            pytest.skip(reason)
        folder = tmp_path_factory.mktemp("rehearsal")
        environment = {"VLLM_CACHE_ROOT": str(folder / "cache")}
        if fault:
            environment["PYTHONPATH"] = f"{REPOSITORY}:{faults.install(folder / 'fault', fault)}"
        fields = {"data": str(data), "max_seq_len": MAX_LENGTH, "rehearse": "always", "engine": ENGINE, **extract}
        made = make_run(folder, model=str(model), **fields)
        plan = json.loads((made.folder / "plan.json").read_text())
        plan["host"]["workdir"] = str(workdir or folder)
        (made.folder / "plan.json").write_text(json.dumps(plan))
        return execute(made, "rehearse", **environment)

    return run


@pytest.fixture(scope="session")
def rehearsed(rehearse: Any, model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    workdir = tmp_path_factory.mktemp("workdir")
    return rehearse(model("kimi-k25-tiny"), workdir=workdir), workdir


def problems(run: Run) -> str:
    return json.dumps([*run.events("problem"), *run.events("exception")])


@pytest.mark.engine
def test_kimi_is_rehearsed_on_its_own_weights(rehearsed: tuple[Run, Path]) -> None:
    run, _ = rehearsed
    assert run.code == 0, run.log[-4000:]
    result = json.loads((run.folder / "rehearsal.json").read_text())
    assert result["weights"] == "cut"
    assert result["layers"] == [0, 1, 2]
    assert result["boundaries"] == [1, 2, 3]
    assert {"loader", "values", "boundary identity"} <= set(result["proven"])
    assert "memory at full depth" in result["not_proven"]
    assert result["canary"]["figures"]["identity"] >= 0.99
    assert result["load_s"] > 0
    assert result["first_steps_s"] > 0


@pytest.mark.engine
@pytest.mark.slow
def test_three_layers_of_a_deep_checkpoint_in_shards_are_rehearsed(rehearse: Any, model: Any) -> None:
    source = model("deepseek-v3-deep-tiny")
    assert len(list(source.glob("model-*.safetensors"))) > 4
    run = rehearse(source)
    assert run.code == 0, run.log[-4000:]
    result = json.loads((run.folder / "rehearsal.json").read_text())
    assert (result["weights"], result["layers"], result["boundaries"]) == ("cut", [0, 1, 2], [1, 2, 3])
    whole = sum(path.stat().st_size for path in source.glob("model-*.safetensors"))
    assert 0 < result["copied_bytes"] + result["linked_bytes"] < whole // 3
    assert result["canary"]["figures"]["identity"] >= 0.99
    assert result["canary"]["figures"]["logits"] == 1.0
    assert set(result["canary"]["figures"]["boundary"]) == {"1", "2", "3"}  # against the hooks' own
    # What compiles in the first steps is told apart from the load.
    assert result["first_steps_s"] > 0
    assert 0 < result["load_s"] < result["seconds"]


@pytest.mark.engine
def test_a_rehearsal_leaves_nothing_but_its_result(rehearsed: tuple[Run, Path]) -> None:
    run, _ = rehearsed
    assert not (run.folder / "rehearsal").exists()
    assert not run.output.exists()
    assert {path.stem for path in (run.folder / "events").iterdir()} == {"rehearse"}


@pytest.mark.engine
def test_the_same_rehearsal_is_remembered_and_another_is_not(
    rehearsed: tuple[Run, Path], rehearse: Any, model: Any, tmp_path: Path
) -> None:
    first, workdir = rehearsed
    fields = json.loads((first.folder / "plan.json").read_text())["extract"]
    again = rehearse(model("kimi-k25-tiny"), workdir=workdir, output=fields["output"])
    assert again.code == 0, again.log[-4000:]
    assert "rehearsal: engine" not in again.log
    assert json.loads((again.folder / "rehearsal.json").read_text())["remembered"] is True
    # Other engine arguments are another rehearsal; this one fails at once, before an engine.
    other = rehearse(model("kimi-k25-tiny"), workdir=workdir, output=fields["output"], engine={"max_model_len": 10})
    assert other.code == 1


def test_small_models_are_not_rehearsed_by_themselves(rehearse: Any, model: Any) -> None:
    run = rehearse(model("qwen3-tiny"), rehearse="auto")
    assert run.code == 0
    (notice,) = run.events("notice")
    assert notice["code"] == "rehearsal-skipped"
    assert not (run.folder / "rehearsal.json").exists()


def test_a_model_that_is_still_to_be_downloaded_is_not_refused_by_itself(rehearse: Any) -> None:
    run = rehearse(Path("nobody/nothing"), rehearse="auto")
    assert run.code == 0
    (notice,) = run.events("notice")
    assert "not on this host yet" in notice["text"]
    demanded = rehearse(Path("nobody/nothing"), rehearse="always")
    assert demanded.code == 1
    assert "nobody/nothing is not on this host" in problems(demanded)


def test_too_small_a_max_model_len_is_caught(rehearse: Any, model: Any) -> None:
    run = rehearse(model("qwen3-tiny"), engine={**ENGINE, "max_model_len": MAX_LENGTH})
    assert run.code == 1
    assert f"must exceed max_seq_len {MAX_LENGTH}" in problems(run)
    assert not (run.folder / "rehearsal").exists()


def test_an_unwritable_output_is_caught(rehearse: Any, model: Any) -> None:
    # No user, root included, may create files below /proc/self.
    run = rehearse(model("qwen3-tiny"), output="/proc/self/task/out")
    assert run.code == 1
    assert "cannot be written" in problems(run)


def test_the_proof_of_a_writable_output_leaves_nothing(tmp_path: Path) -> None:
    prove_writable(str(tmp_path / "not" / "yet" / "there"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
def test_a_missing_topk_method_is_caught(rehearse: Any, model: Any, tmp_path: Path) -> None:
    folder = _copy(model("deepseek-v3-tiny"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["topk_method"]
    (folder / "config.json").write_text(json.dumps(config))
    run = rehearse(folder)
    assert run.code == 1
    assert "e_score_correction_bias" in problems(run)


@pytest.mark.engine
@pytest.mark.slow
def test_a_shard_that_the_loader_refuses_is_caught(rehearse: Any, model: Any, tmp_path: Path) -> None:
    folder = _copy(model("qwen3-tiny"), tmp_path)
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"] = state["model.layers.1.mlp.down_proj.weight"][:, :-8].contiguous()
    (folder / "model.safetensors").unlink()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    run = rehearse(folder)
    assert run.code == 1
    assert run.events("exception")
    assert "Traceback" in run.events("exception")[0]["traceback"]


@pytest.mark.engine
@pytest.mark.slow
def test_an_unsupported_mla_size_is_caught(rehearse: Any, model: Any) -> None:
    run = rehearse(model("kimi-k25-bad-rank"))
    assert run.code == 1
    assert "is not supported by MLA" in problems(run)
    assert "dummy weights" in json.dumps(run.events("notice"))


@pytest.mark.engine
@pytest.mark.slow
def test_a_state_count_short_by_one_is_caught(rehearse: Any, model: Any) -> None:
    run = rehearse(model("qwen3-tiny"), fault=faults.DROP_LAST, capture="native", engine={"enforce_eager": False})
    assert run.code == 1
    assert "does not prove boundaries [3]" in problems(run)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faults.RENAMED_WORKER_METHOD, "execute_model"),
        (faults.OTHER_LAYER_SIGNATURE, "scaling"),
        (faults.NO_EMBEDDING_METHOD, "embed_input_ids"),
    ],
)
def test_another_vllm_than_expected_is_caught(rehearse: Any, model: Any, fault: str, words: str) -> None:
    run = rehearse(model("qwen3-tiny"), fault=fault)
    assert run.code == 1, run.log[-3000:]
    assert words in problems(run)


def test_boundaries_of_the_cut_stand_for_the_wanted_ones() -> None:
    assert cut_boundaries((2, 30, 58, 61), 61, 3) == [1, 2, 3]
    assert cut_boundaries((0, 8), 8, 3) == [0, 3]
    assert cut_boundaries((5,), 8, 3) == [1, 2]


def _copy(source: Path, folder: Path) -> Path:
    target = folder / source.name
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target

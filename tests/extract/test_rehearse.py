"""Rehearsals: what they prove, what they leave, what they must catch. Real engines on cut models."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import faults, releases
from support.extraction import REPOSITORY, Run, execute, make_run

from remote_payload.extract.rehearsal_cache import rehearsal_key
from remote_payload.extract.rehearse import AUTO_BYTES, Rehearsal, cut_boundaries, prove_writable
from remote_payload.extract.settings import load_job
from remote_payload.host.files import read_json, write_json
from remote_payload.host.journal import EventWriter

MAX_LENGTH = 300
ENGINE = {"enforce_eager": True, "max_num_batched_tokens": 512, "max_num_seqs": 8}
KIMI = releases.stand_in("kimi-k25-tiny")


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
    return rehearse(model(KIMI), workdir=workdir), workdir


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
    figures = result["canary"]["figures"]
    assert figures["identity"] >= 0.99
    assert figures["logits"] == 1.0
    # What the native path gave, held against the hooks' own states of the same layers.
    assert result["capture_path"] == "native"
    assert set(figures["boundary"]) == {"1", "2", "3"}
    assert max(figures["boundary"].values()) <= 1e-5
    assert result["load_s"] > 0
    assert result["first_steps_s"] > 0


class Recorded(Rehearsal):
    """A rehearsal whose engine is said to have gone well. `planned`: what it was to run."""

    planned: dict[str, Any]

    def _execute(self, module: str) -> int:
        self.planned = read_json(self._inner.plan) or {}
        events = EventWriter(self._inner.events, "driver", "20260102-030405-abcdef", "here")
        for name, seconds in (("load", 20.0), ("probe", 180.0)):
            events.emit("phase", name=name, status="done", text="", seconds=seconds)
        write_json(self._inner.verify, {"problems": [], "boundaries": [1, 2, 3], "capture_path": "native"})
        return 0


@pytest.fixture
def recorded(data: Path, tmp_path: Path) -> Callable[..., tuple[Recorded, Run]]:
    def make(model: Path, **extract: Any) -> tuple[Recorded, Run]:
        fields = {"data": str(data), "rehearse": "fresh", "engine": ENGINE, **extract}
        made = make_run(tmp_path, model=str(model), **fields)
        plan = json.loads((made.folder / "plan.json").read_text())
        plan["host"]["workdir"] = str(tmp_path)
        events = EventWriter(str(made.folder / "events"), "rehearse", plan["run_id"], "here")
        return Recorded(load_job({"CTL_RUN_DIR": str(made.folder)}), plan, events), made

    return make


def test_it_runs_the_real_jobs_engine_on_the_real_data(recorded: Any, model: Any, data: Path) -> None:
    engine = {**ENGINE, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    rehearsal, made = recorded(model("kimi-k25-tiny"), engine=engine, shard=[2, 4], canary=False, format="specforge")
    rehearsal.run()
    real = json.loads((made.folder / "plan.json").read_text())["extract"]
    inner = rehearsal.planned["extract"]
    changed = {name for name in real if inner[name] != real[name]}
    assert changed == {"model", "output", "max_samples", "shard", "boundaries", "canary"}
    assert (inner["engine"], inner["data"]) == (engine, str(data))
    assert 0 < inner["max_samples"] <= 8
    assert (inner["canary"], inner["shard"]) == (True, [1, 1])
    result = json.loads((made.folder / "rehearsal.json").read_text())
    # What compiles in the first steps is told apart from the load.
    assert (result["load_s"], result["first_steps_s"]) == (20.0, 180.0)
    assert result["not_proven"] == ["memory at full depth", "the tensors of the other layers"]


def test_dummy_weights_are_said_to_prove_less(recorded: Any, model: Any, tmp_path: Path) -> None:
    source = _copy(model("qwen3-tiny"), tmp_path)
    os.rename(source / "model.safetensors", source / "pytorch_model.bin")
    rehearsal, made = recorded(source)
    rehearsal.run()
    assert rehearsal.planned["extract"]["engine"] == {**ENGINE, "load_format": "dummy"}
    result = json.loads((made.folder / "rehearsal.json").read_text())
    assert result["weights"] == "dummy"
    assert {"loader", "values", "boundary identity"} <= set(result["not_proven"])
    assert not {"loader", "values", "boundary identity"} & set(result["proven"])
    told = {event["code"]: event["text"] for event in made.events("notice")}
    assert "loader, values, boundary identity not proven" in told["rehearsal-dummy"]
    assert "loader, values, boundary identity" in told["rehearsed"]


def test_a_load_that_takes_long_is_rehearsed_by_itself(recorded: Any, model: Any, tmp_path: Path) -> None:
    source = _copy(model("qwen3-tiny"), tmp_path)
    with (source / "rest.pt").open("wb") as file:
        file.truncate(AUTO_BYTES)  # a hole: it takes no room
    rehearsal, made = recorded(source, rehearse="auto")
    rehearsal.run()
    assert json.loads((made.folder / "rehearsal.json").read_text())["remembered"] is False


def test_a_rehearsal_is_known_by_host_environment_architecture_and_payload(model: Any, tmp_path: Path) -> None:
    source = _copy(model("qwen3-tiny"), tmp_path)
    plan = json.loads((make_run(tmp_path, model=str(source)).folder / "plan.json").read_text())
    key = rehearsal_key(plan, str(source))
    assert rehearsal_key({**plan, "run_id": "20260102-030405-fedcba"}, str(source)) == key
    others = [
        {**plan, "host": {**plan["host"], "name": "another"}},
        {**plan, "job": {**plan["job"], "env": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}},
        {**plan, "payload": "1" * 64},
        *({**plan, "extract": {**plan["extract"], **change}} for change in (
            {"engine": {"max_num_seqs": 9}}, {"boundaries": [1]}, {"format": "specforge"}, {"data": "other.jsonl"},
        )),
    ]  # fmt: skip
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    keys = [key, rehearsal_key(plan, str(source)), *(rehearsal_key(each, str(source)) for each in others)]
    assert len(set(keys)) == len(keys)


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
    again = rehearse(model(KIMI), workdir=workdir, output=fields["output"])
    assert again.code == 0, again.log[-4000:]
    assert "rehearsal: engine" not in again.log
    assert json.loads((again.folder / "rehearsal.json").read_text())["remembered"] is True
    # Other engine arguments are another rehearsal; this one fails at once, before an engine.
    other = rehearse(model(KIMI), workdir=workdir, output=fields["output"], engine={"max_model_len": 10})
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
        # Where vLLM inspects the class anew it takes one without the method for no generating model at all.
        (faults.NO_EMBEDDING_METHOD, r"embed_input_ids|does not support `--runner generate`"),
    ],
)
def test_another_vllm_than_expected_is_caught(rehearse: Any, model: Any, fault: str, words: str) -> None:
    run = rehearse(model("qwen3-tiny"), fault=fault)
    assert run.code == 1, run.log[-3000:]
    assert re.search(words, problems(run))


@pytest.mark.engine
@pytest.mark.slow
def test_a_worker_that_fails_in_mid_capture_ends_the_rehearsal(
    rehearse: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTL_FAULT", "capture raises 0 2")
    run = rehearse(model("qwen3-tiny"), fault=faults.FAIL_AT, engine={**ENGINE, "max_num_batched_tokens": 64})
    ended = time.time()
    assert run.code == 1, run.log[-3000:]
    assert ended - float((run.folder.parent / "fault" / "when").read_text()) < 60
    first, *_ = run.events("exception")
    assert (first["where"], first["rank"]) == ("rehearsal: execute_model", 0)
    assert first["traceback"].endswith("RuntimeError: seeded fault: capture\n")
    (problem,) = run.events("problem")
    assert (problem["code"], problem["why"]) == ("rehearsal-failed", "RuntimeError: seeded fault: capture")
    assert not (run.folder / "rehearsal").exists()


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

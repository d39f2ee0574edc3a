"""Plans checked against the model before a load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.extraction import make_run

from remote_payload.extract.errors import ExceptionReporter
from remote_payload.extract.settings import (
    CONFIG_KEY,
    WORKER,
    CaptureSettings,
    ConfigError,
    ModelFacts,
    capture_settings,
    engine_arguments,
    load_job,
    read_model_facts,
    resolve_boundaries,
)
from remote_payload.host.files import read_lines
from remote_payload.host.journal import EventWriter

FACTS = ModelFacts(
    layers=8, hidden=128, vocabulary=1024, model_type="qwen3", multimodal=False, dtype="float32", residual_scale=1.0
)


def job_of(tmp_path: Path, **fields: Any) -> Any:
    return load_job({"CTL_RUN_DIR": str(make_run(tmp_path, **fields).folder)})


def arguments_of(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    job = job_of(tmp_path, **fields)
    return engine_arguments(job, capture_settings(job.spec, FACTS), FACTS)


@pytest.mark.parametrize(
    ("wanted", "layers", "boundaries"),
    [("eagle3", 8, (2, 4, 5, 8)), ("eagle3", 61, (2, 30, 58, 61)), ([8, 0], 8, (8, 0))],
)
def test_boundaries_are_resolved_in_the_order_asked_for(wanted: Any, layers: int, boundaries: Any) -> None:
    assert resolve_boundaries(wanted, layers) == boundaries


@pytest.mark.parametrize(
    ("wanted", "layers", "words"),
    [
        ("eagle3", 6, r"\[3\] twice"),
        ("eagle3", 4, r"twice"),
        ("eagle4", 8, "eagle3"),
        ([9], 8, "outside 0..8"),
        ([-1], 8, "outside"),
        ([True], 8, "outside"),
        ([2, 2], 8, "twice"),
        ([], 8, "no boundary"),
    ],
)
def test_impossible_boundaries_are_refused(wanted: Any, layers: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_boundaries(wanted, layers)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"capture": "magic"}, "auto, hooks, native"),
        ({"store_dtype": "int8"}, "store_dtype"),
        ({"format": "hdf5"}, "supported: speculators"),
        ({"final_norm": True, "boundaries": [2]}, "final_norm needs boundary 8"),
        ({"capture": "native", "boundaries": [0, 2]}, "boundary 0"),
    ],
)
def test_impossible_captures_are_refused(tmp_path: Path, fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        capture_settings(job_of(tmp_path, **fields).spec, FACTS)


def test_half_precision_that_scales_the_residual_is_refused(tmp_path: Path) -> None:
    scaled = ModelFacts(
        layers=8, hidden=1, vocabulary=1, model_type="deepseek_v3", multimodal=False, dtype=None, residual_scale=2.5
    )
    with pytest.raises(ConfigError, match=r"residual stream by 2\.5"):
        capture_settings(job_of(tmp_path, dtype="float16").spec, scaled)
    assert capture_settings(job_of(tmp_path, dtype="bfloat16").spec, scaled).layers == 8


@pytest.mark.parametrize(
    "engine",
    [
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"enable_prefix_caching": True},
        {"worker_cls": "x.Y"},
        {"speculative_config": {"method": "ngram"}},
        {"max_model_len": 512},
        {"compilation_config": 3},
    ],
)
def test_engine_arguments_that_break_the_capture_are_refused(tmp_path: Path, engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(engine))):
        arguments_of(tmp_path, engine=engine, max_seq_len=512)


def test_the_plan_wins_where_the_capture_does_not_depend_on_it(tmp_path: Path) -> None:
    engine = {"max_model_len": 600, "seed": 3, "additional_config": {"mine": 1}, "dtype": "bfloat16"}
    arguments = arguments_of(tmp_path, engine=engine, max_seq_len=512)
    assert (arguments["max_model_len"], arguments["seed"], arguments["dtype"]) == (600, 3, "bfloat16")
    assert (arguments["worker_cls"], arguments["enable_prefix_caching"]) == (WORKER, False)
    assert arguments["additional_config"]["mine"] == 1
    settings = CaptureSettings.from_dict(json.loads(json.dumps(arguments["additional_config"][CONFIG_KEY])))
    assert settings.boundaries == (2, 4, 5, 8)


@pytest.mark.parametrize(
    ("fields", "eager"),
    [
        ({"capture": "auto", "accelerator": "cuda"}, False),
        ({"capture": "hooks", "accelerator": "cuda"}, True),
        ({"capture": "auto", "accelerator": "cuda", "boundaries": [0, 8]}, True),
        ({"capture": "auto", "accelerator": "cpu"}, True),
        ({"capture": "auto", "accelerator": "cpu", "engine": {"enforce_eager": False}}, False),
    ],
)
def test_graphs_are_compiled_only_where_the_capture_can_use_them(tmp_path: Path, fields: Any, eager: bool) -> None:
    assert arguments_of(tmp_path, **fields).get("enforce_eager", False) is eager


def test_hooks_and_compiled_graphs_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contradicts"):
        arguments_of(tmp_path, capture="hooks", engine={"enforce_eager": False})


def test_model_facts_come_from_the_text_part_of_a_multimodal_model(tmp_path: Path, model: Any) -> None:
    facts = read_model_facts(job_of(tmp_path, model=str(model("kimi-k25-bad-rank"))).spec)
    assert (facts.layers, facts.hidden, facts.vocabulary, facts.multimodal) == (8, 128, 1024, True)
    assert (facts.dtype, facts.residual_scale) == ("float32", 2.5)


def test_a_model_without_a_configuration_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config"):
        read_model_facts(job_of(tmp_path, model=str(tmp_path)).spec)


def test_an_exception_is_reported_once_and_whole_though_its_message_is_empty(tmp_path: Path) -> None:
    events = EventWriter(str(tmp_path), "rank-3", "20260102-030405-abcdef", "here")
    reporter = ExceptionReporter(events, 3)
    try:
        try:
            raise KeyError("e_score_correction_bias")
        except KeyError as cause:
            raise AssertionError from cause
    except AssertionError as error:
        reporter.report(error, "load_model")
        reporter.report(error, "init")
    (event,) = read_lines(str(tmp_path / "rank-3.jsonl"))
    assert (event["exc_type"], event["message"], event["rank"], event["where"]) == (
        "AssertionError",
        "",
        3,
        "load_model",
    )
    assert "KeyError: 'e_score_correction_bias'" in event["traceback"]
    assert "direct cause" in event["traceback"]
    assert event["traceback"].rstrip().endswith("AssertionError")

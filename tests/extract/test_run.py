"""What a run leaves behind besides states: ledgers, events, notices, and the evidence of a failure."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from support.extraction import RUN_ID, Run, execute, header_of, make_run

from remote_payload.host.framing import file_digest
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST

PHASES = ("data", "load", "probe", "canary", "capture", "drain", "canary-end")


@pytest.mark.engine
def test_ranks_share_the_writing_by_index(kimi_hooks: Run) -> None:
    for rank in (0, 1):
        indexes = [record["index"] for record in kimi_hooks.ledger(f"rank-{rank}")]
        assert indexes
        assert all(index % 2 == rank for index in indexes)


@pytest.mark.engine
def test_ledger_lines_describe_their_files(qwen_native: Run) -> None:
    for record in qwen_native.ledger():
        path = qwen_native.output / record["file"]
        assert record["bytes"] == path.stat().st_size
        assert record["sha256"] == file_digest(str(path))
        assert [state["boundary"] for state in record["states"]] == [2, 4, 5, 8]
        for state in record["states"]:
            assert 0 < state["norm_mean"] <= state["norm_max"]
            assert (state["nan"], state["inf"], state["zero_rows"]) == (0, 0, 0)


@pytest.mark.engine
def test_files_describe_themselves(qwen_native: Run, model: Any) -> None:
    metadata = header_of(qwen_native.path(0))["__metadata__"]
    assert metadata["model"] == str(model("qwen3-tiny"))
    assert metadata["run_id"] == RUN_ID
    assert metadata["num_layers"] == "8"
    assert metadata["vllm_version"]
    assert json.loads(metadata["loss_spans"])  # a chat, rendered with a template that marks the assistant
    assert "loss_spans" not in header_of(qwen_native.path(6))["__metadata__"]  # tokens without a mask


@pytest.mark.engine
def test_what_was_compiled_is_found_again_by_the_next_run(qwen_native: Run) -> None:
    """By its key: nothing in it belongs to this run alone."""
    factors = json.loads((qwen_native.folder / "compile-factors.json").read_text())
    assert factors["VLLM_PROCESS_NAME_PREFIX"] == "ctl"
    here = str(qwen_native.folder.parent)
    assert [name for name, value in factors.items() if RUN_ID in str(value) or here in str(value)] == []


@pytest.mark.engine
def test_refused_and_cut_records_are_named(qwen_native: Run) -> None:
    records = qwen_native.ledger("driver")
    assert [(r["index"], r["line"], r["skipped"]) for r in records if "skipped" in r] == [
        (14, 15, "malformed"),
        (15, 17, "empty"),
    ]
    assert [(r["index"], r["notice"]) for r in records if "notice" in r] == [(12, "truncated")]
    assert not qwen_native.path(14).exists()
    notices = {event["code"]: event["text"] for event in qwen_native.events("notice")}
    assert notices["data-empty"] == "1 record was skipped (empty): line 17; see ledger/driver.jsonl"
    assert notices["data-malformed"] == "1 record was skipped (malformed): line 15; see ledger/driver.jsonl"
    assert notices["data-truncated"] == "1 record was cut to max_seq_len: line 13; see ledger/driver.jsonl"


@pytest.mark.engine
def test_phases_and_progress_are_told_in_order(qwen_native: Run) -> None:
    phases = [(event["name"], event["status"]) for event in qwen_native.events("phase")]
    assert phases == [(name, status) for name in PHASES for status in ("started", "done")]
    progress = qwen_native.events("progress")
    assert (progress[0]["done"], progress[-1]["done"]) == (0, 20)
    assert progress[-1]["tokens"] == sum(record["tokens"] for record in qwen_native.ledger())
    assert progress[-1]["skipped"] == 2


@pytest.mark.engine
@pytest.mark.parametrize(("fixture", "missing"), [("qwen_chunked", "[8]"), ("deepseek_filled", "[0, 8]")])
def test_a_dropped_native_state_is_noticed(request: pytest.FixtureRequest, fixture: str, missing: str) -> None:
    run: Run = request.getfixturevalue(fixture)
    (notice,) = [event for event in run.events("notice") if event["code"] == "native-unproved"]
    assert missing in notice["text"]


@pytest.mark.engine
def test_the_cpu_rotary_repair_is_announced_once(kimi_hooks: Run) -> None:
    assert len([event for event in kimi_hooks.events("notice") if event["code"] == "cpu-rotary"]) == 1


@pytest.mark.engine
def test_the_repair_of_experts_in_parallel_is_announced_and_in_the_summary(qwen_moe: Run) -> None:
    assert qwen_moe.code == 0, qwen_moe.log[-4000:]
    assert len([event for event in qwen_moe.events("notice") if event["code"] == "cpu-expert-map"]) == 1
    execute(qwen_moe, "summarize")
    assert json.loads((qwen_moe.folder / "verify.json").read_text())["repairs"] == ["cpu-rotary", "cpu-expert-map"]


@pytest.mark.engine
def test_an_error_of_the_engine_reaches_the_events_whole(kimi_failed: Run) -> None:
    assert kimi_failed.code == 1
    first, *_, last = kimi_failed.events("exception")
    assert first["writer"] == "rank-0"
    assert (first["rank"], first["exc_type"]) == (0, "ValueError")
    lines = first["traceback"].strip().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("ValueError: Head dimension ")
    assert lines[-1].endswith(" is not supported by MLA.")
    assert (last["writer"], last["rank"]) == ("driver", None)
    assert "Traceback (most recent call last):" in kimi_failed.log


@pytest.mark.engine
def test_a_failed_run_leaves_no_file_under_a_final_name(kimi_failed: Run) -> None:
    assert sorted(os.listdir(kimi_failed.output)) == [OUTPUT_LEDGER, OUTPUT_MANIFEST]
    assert {record["failed"] for record in kimi_failed.ledger("driver") if "failed" in record} == {"job-failed"}
    verified = execute(kimi_failed, "summarize")
    document = json.loads((kimi_failed.folder / "verify.json").read_text())
    assert verified.code == 1
    assert document["problems"][0]["code"] == "never-started"
    assert document["samples"]["written"] == 0


@pytest.mark.engine
def test_a_whole_run_verifies(kimi_native: Run) -> None:
    assert execute(kimi_native, "summarize").code == 0
    document = json.loads((kimi_native.folder / "verify.json").read_text())
    assert document["samples"] == {"expected": 20, "written": 20, "skipped": 2, "failed": 0, "missing": 0}
    assert document["shape"] == {"hidden": 128, "states": 4, "dtype": "float32"}
    assert document["tokens_per_s"] > 0
    assert document["timings"]["load_s"] > 0
    assert document["missing"] == []
    for state in document["states"]:
        assert 0 < state["norm_mean"] <= state["norm_max"]
        assert (state["nan"], state["inf"], state["zero_rows"]) == (0, 0, 0)
    assert sum(each["samples"] for each in document["token_lengths"]) == 20
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert sum(rank["files"] for rank in document["ranks"]) == 20
    assert sum(rank["bytes"] for rank in document["ranks"]) == document["bytes"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"boundaries": [2, 9]}, "boundaries [9] are outside 0..8"),
        ({"boundaries": [2, 2]}, "name [2] twice"),
        ({"format": "hdf5"}, "supported: speculators"),
        ({"engine": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size"),
        ({"capture": "native", "boundaries": [0, 8]}, "boundary 0"),
        ({"data": "absent.jsonl"}, "cannot read the data set absent.jsonl"),
    ],
)
def test_an_impossible_plan_ends_before_the_load(
    tmp_path: Any, model: Any, data: Any, fields: Any, words: str
) -> None:
    run = execute(make_run(tmp_path, model=str(model("qwen3-tiny")), **{"data": str(data), **fields}), "engine")
    assert run.code == 2
    assert words in run.log
    assert "Traceback" not in run.log
    (event,) = run.events("exception")
    assert words in event["message"]
    assert not [e for e in run.events("phase") if e["name"] == "load"]


@pytest.mark.engine
def test_resume_captures_only_what_is_not_there_whole(qwen_native: Run, tmp_path: Any, model: Any, data: Any) -> None:
    fields = json.loads((qwen_native.folder / "plan.json").read_text())["extract"]
    run = execute(make_run(tmp_path, **{**fields, "stale": "resume"}), "engine")
    assert run.code == 0, run.log[-4000:]
    assert {event["name"] for event in run.events("phase")} == {"data", "resume"}  # all is there: no engine
    assert not run.ledger()
    assert execute(run, "summarize").code == 0
    document = json.loads((run.folder / "verify.json").read_text())
    assert document["samples"] == {"expected": 20, "written": 20, "skipped": 2, "failed": 0, "missing": 0}

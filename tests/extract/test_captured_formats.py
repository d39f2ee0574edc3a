"""Formats and shards on a real engine: two starts, shared by all tests here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import consumers, releases
from support.extraction import REPOSITORY, Run, execute, header_of
from support.reference import relative_error

from tools import tiny_models

SKIPPED = {14, 15}
"""Indexes of the shared data set's refused records."""

TOLERANCE = 1e-5

DEEPSEEK = releases.stand_in("deepseek-v3-tiny")

FP8_TOLERANCE = 0.04
"""Relative L2 error of a row: 3 bits of mantissa round by a sixteenth at most, a thirtieth on average."""


@pytest.fixture(scope="session")
def specforge_share(start: Any) -> Run:
    """The second of two shares, in the format that wants the last state after the norm."""
    return start("qwen3-tiny", format="specforge", final_norm=True, shard=[2, 2])


@pytest.fixture(scope="session")
def speculators_fp8(start: Any) -> Run:
    path = os.pathsep.join([str(REPOSITORY), str(consumers.install("columns"))])
    engine = {"kv_cache_dtype": "auto"}
    return start(DEEPSEEK, store_dtype="fp8", engine=engine, env={"PYTHONPATH": path})


@pytest.mark.engine
def test_a_share_holds_its_own_samples_and_skips_and_no_others(specforge_share: Run) -> None:
    assert specforge_share.code == 0, specforge_share.log[-4000:]
    written = sorted(record["index"] for record in specforge_share.ledger())
    assert written == [index for index in range(1, 22, 2) if index not in SKIPPED]
    assert [r["index"] for r in specforge_share.ledger("driver") if "skipped" in r] == [15]
    assert execute(specforge_share, "summarize").code == 0
    document = json.loads((specforge_share.folder / "verify.json").read_text())
    assert document["samples"] == {"expected": 10, "written": 10, "skipped": 1, "failed": 0, "missing": 0}
    assert (document["shard"], document["data"]["records"]) == ([2, 2], 22)
    assert "12 chat records" in document["data"]["read_as"]
    assert "generation marks" in document["data"]["read_as"]


@pytest.mark.engine
def test_specforge_reads_the_models_own_normed_state(specforge_share: Run, expected: Any, tmp_path: Path) -> None:
    found = consumers.load("specforge", specforge_share.output, tmp_path / "o.pt", ("columns", "specforge"))
    assert len(found) == 10
    for sample in found:
        ids = sample["input_ids"][0]
        if len(ids) == 64:
            continue  # the consumer cuts there, the reference would not
        states, normed = expected("qwen3-tiny", ids.tolist())
        assert relative_error(sample["target"][0], normed) <= TOLERANCE
        auxiliary = torch.cat([states[boundary] for boundary in (2, 4, 5)], dim=1)
        assert relative_error(sample["hidden_state"][0], auxiliary) <= TOLERANCE


@pytest.mark.engine
def test_masks_of_chats_reach_the_files(specforge_share: Run) -> None:
    for record in specforge_share.ledger():
        data = torch.load(specforge_share.output / record["file"], weights_only=True)
        counted = int(data["loss_mask"].sum())
        if 6 <= record["index"] < 14:  # lists of tokens without a mask
            assert counted == record["tokens"]
        else:
            assert 0 < counted < record["tokens"]


@pytest.mark.engine
def test_what_the_data_set_calls_a_record_reaches_its_file_and_its_line(specforge_share: Run) -> None:
    for record in specforge_share.ledger():
        data = torch.load(specforge_share.output / record["file"], weights_only=True)["ctl"]
        name = f"tokens-{record['index'] - 6}" if 6 <= record["index"] < 14 else None
        assert data.get("record_id") == record.get("record_id") == name


@pytest.mark.engine
def test_files_say_boundary_convention_and_engine(specforge_share: Run, speculators_fp8: Run) -> None:
    path = specforge_share.output / specforge_share.ledger()[0]["file"]
    data = torch.load(path, weights_only=True)["ctl"]
    assert (data["boundaries"], data["layer_ids"], data["layer_convention"]) == (
        "[2, 4, 5, 8]", "[1, 3, 4, 7]", "specforge",
    )  # fmt: skip
    assert (data["quantization"], data["kv_cache_dtype"]) == ("none", "auto")
    assert data["attention_backend"] not in ("none", "unknown")
    assert data["moe_backend"] == "none"
    header = header_of(speculators_fp8.path(0))["__metadata__"]
    assert "MoE" in header["moe_backend"]
    assert json.loads(header["engine_key"]) == {"dtype": "float32", "kv_cache_dtype": "auto"}
    assert header["layer_ids"] == header["boundaries"] == "[2, 4, 5, 8]"


@pytest.mark.engine
def test_speculators_reads_fp8_states_with_their_data_set(
    speculators_fp8: Run, expected: Any, tmp_path: Path, columns: None
) -> None:
    assert speculators_fp8.code == 0, speculators_fp8.log[-4000:]
    out = speculators_fp8.output
    found = consumers.load("speculators", out, tmp_path / "o.pt", ("columns", "speculators-0.9"), "float32", "fp8")
    assert {int(sample["index"]) for sample in found} == {i for i in range(22) if i not in SKIPPED}
    for sample in found:
        states, _ = expected(DEEPSEEK, sample["input_ids"].tolist())
        wanted = torch.cat([states[boundary] for boundary in (2, 4, 5)], dim=1)
        assert relative_error(sample["hidden_states"], wanted) <= FP8_TOLERANCE
        last = sample["verifier_last_hidden_states"]
        assert relative_error(last, states[tiny_models.LAYERS]) <= FP8_TOLERANCE
    assert execute(speculators_fp8, "summarize").code == 0
    document = json.loads((speculators_fp8.folder / "verify.json").read_text())
    assert document["shape"]["dtype"] == "fp8"


def test_all_zero_masks_and_empty_results_end_before_the_load(start: Any, tmp_path: Path) -> None:
    for lines, words in ((['{"input_ids": [5], "loss_mask": [0]}'], "zero throughout"), (["x"], "not one sample")):
        (tmp_path / "d.jsonl").write_text("\n".join(lines))
        run = start("qwen3-tiny", data=str(tmp_path / "d.jsonl"))
        assert run.code == 2
        assert words in run.log
        assert not [event for event in run.events("phase") if event["name"] == "load"]

"""How many tokens a data set holds: exact where it is small, and honest about its error where it is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.probing import quiet

from remote_payload.host import probe_lengths as probe_lengths_module
from remote_payload.host.lengths import count_ids, measure
from remote_payload.host.probe_data import probe_data
from remote_payload.host.probe_lengths import probe_lengths
from tools import tiny_models


def write(path: Path, lengths: list[int]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": [7] * length}) + "\n" for length in lengths))
    return path


def spec(path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data": str(path), "data_kind": "auto", "max_samples": None, "max_seq_len": 4096, "over_long": "truncate",
        "model": "/nowhere", "revision": None, "trust_remote_code": False, **changes,
    }  # fmt: skip


def test_a_small_file_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [5, 300, 0, 17])
    found = probe_lengths(quiet, spec(path, max_seq_len=100), probe_data(quiet, str(path)), None, {})["lengths"]
    assert found == {"samples": 3, "tokens": 122, "error": 0, "looked_at": 4, "longest": 100, "how": "all"}
    skipped = probe_lengths(
        quiet, spec(path, max_seq_len=100, over_long="skip"), probe_data(quiet, str(path)), None, {}
    )
    assert skipped["lengths"]["tokens"] == 22
    first = probe_lengths(quiet, spec(path, max_samples=2), probe_data(quiet, str(path)), None, {})["lengths"]
    assert (first["samples"], first["tokens"]) == (2, 305)


@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_a_large_file_is_estimated_within_its_error(tmp_path: Path, order: str) -> None:
    """Sorted by length, where a mean of lines picked by place would be far off."""
    lengths = [10 + (number * 37 % 997) for number in range(4000)]
    if order == "sorted":
        lengths.sort()
    path = write(tmp_path / "data.jsonl", lengths)
    found = measure(str(path), count_ids(4096, "truncate"), max_samples=None, whole_below=1000, seconds=60)
    assert found is not None
    assert found.how == "sampled"
    assert 0 < found.error < 0.1 * sum(lengths)
    assert abs(found.tokens - sum(lengths)) <= 2 * found.error
    assert found.samples == pytest.approx(4000, rel=0.2)


def test_only_the_lines_that_will_be_read_are_sampled(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [20] * 3000 + [2000] * 300)
    found = measure(str(path), count_ids(4096, "truncate"), max_samples=3000, whole_below=1000, seconds=60)
    assert found is not None
    assert found.longest == 20
    assert found.tokens == pytest.approx(60_000, rel=0.05)


def test_few_chats_have_a_bound_and_need_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    tiny_models.chats(path, count=12)
    found = probe_lengths(quiet, spec(path, max_seq_len=50), probe_data(quiet, str(path)), None, {})["lengths"]
    assert (found["how"], found["samples"], found["tokens"]) == ("bound", 12, 600)


def test_many_chats_are_rendered_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_lengths_module, "START_S", 200.0)  # on a busy machine transformers takes a minute
    model = tiny_models.write("kimi-k25-tiny", tmp_path)
    path = tmp_path / "chats.jsonl"
    tiny_models.chats(path, count=12)
    few = path.read_bytes()
    path.write_bytes(few * (1 + (1 << 20) // len(few)))
    data = probe_data(quiet, str(path))
    asked = spec(path, model=str(model), max_seq_len=300)
    assert "not there" in probe_lengths(quiet, asked, data, None, {})["error"]
    answer = probe_lengths(quiet, asked, data, sys.executable, {})
    assert answer["error"] is None
    found = answer["lengths"]
    assert found["how"] == "sampled"
    assert found["samples"] == pytest.approx(data["lines"], rel=0.2)
    assert 0 < found["tokens"] < data["bytes"]
    broken = probe_lengths(quiet, spec(path, model=str(tmp_path / "none")), data, sys.executable, {})
    assert broken["lengths"] is None
    assert broken["error"]

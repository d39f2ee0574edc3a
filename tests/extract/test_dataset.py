"""From records to token ids, with every refusal accounted for."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.extraction import write_lines

from remote_payload.extract.dataset import Sample, Samples, Skip, read_samples
from remote_payload.extract.settings import ConfigError


def read(path: Path, skips: list[Skip] | None = None, **options: Any) -> Samples:
    collected = skips if skips is not None else []
    defaults = {"max_samples": None, "max_seq_len": 100, "vocabulary": 1024, "tokenizer": None}
    kind = options.pop("kind", "auto")
    return read_samples(str(path), kind, skip=collected.append, **{**defaults, **options}).samples


@pytest.fixture
def tokenizer(model: Any) -> Callable[[], Any]:
    from transformers import AutoTokenizer

    return lambda: AutoTokenizer.from_pretrained(model("kimi-k25-bad-rank"))


def test_indexes_are_record_numbers_and_survive_skips(tmp_path: Path) -> None:
    lines = [{"input_ids": [5]}, "", "{ half", {"input_ids": []}, {"input_ids": [1, 2], "loss_mask": [0, 1]}]
    skips: list[Skip] = []
    samples = read(write_lines(tmp_path / "d.jsonl", lines), skips)
    assert [(s.index, s.token_ids, s.loss_spans()) for s in samples] == [(0, [5], None), (3, [1, 2], [[1, 2]])]
    assert [(s.index, s.line, s.code) for s in skips] == [(1, 3, "malformed"), (2, 4, "empty")]
    assert list(samples) == list(samples)  # as often as needed


def test_who_looks_at_samples_disturbs_nobody_else() -> None:
    """The driver's watch may give up a run while the main thread still feeds it."""
    one, two, three = (
        Sample(index=0, token_ids=[5, 6], loss_mask=b"\0\1", record_id="talk-1"),
        Sample(index=2, token_ids=[7], loss_mask=None),
        Sample(index=3, token_ids=[8, 9], loss_mask=None, record_id="Gespräch"),
    )
    samples = Samples()
    samples.add(one)
    samples.add(two)
    first = iter(samples)
    assert next(first) == one
    assert list(samples.records()) == [(0, "talk-1"), (2, None)]
    samples.add(three)
    assert list(samples) == [one, two, three]
    assert next(first) == two
    assert list(samples.records()) == [(0, "talk-1"), (2, None), (3, "Gespräch")]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ([1, 2], "not a JSON object"),
        ({"text": "hello"}, "no input_ids"),
        ({"input_ids": [1, "2"]}, "not a list of integers"),
        ({"input_ids": [1, True]}, "not a list of integers"),
        ({"input_ids": [1, 1024]}, "token id 1024 is outside"),
        ({"input_ids": [-1]}, "token id -1 is outside"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask"),
        ({"messages": "hello"}, "the chat is not JSON"),
        ({"messages": []}, "no message"),
        ({"messages": [{"role": "user", "content": None}]}, "neither text nor a list of parts"),
        ({"conversations": [{"from": "stranger", "value": "t5"}]}, "unknown speaker 'stranger'"),
    ],
)
def test_a_malformed_record_is_skipped_with_its_reason(tmp_path: Path, record: Any, why: str) -> None:
    skips: list[Skip] = []
    samples = read(write_lines(tmp_path / "d.jsonl", [record, {"input_ids": [1]}]), skips)
    assert len(samples) == 1
    assert why in skips[0].why


def test_a_long_sample_is_cut_and_reported(tmp_path: Path) -> None:
    skips: list[Skip] = []
    record = {"input_ids": list(range(9)), "loss_mask": [1] * 9}
    (sample,) = read(write_lines(tmp_path / "d.jsonl", [record]), skips, max_seq_len=4)
    assert (sample.token_ids, sample.loss_spans()) == ([0, 1, 2, 3], [[0, 4]])
    assert [skip.code for skip in skips] == ["truncated"]


def test_max_samples_counts_valid_ones_and_reads_no_further(tmp_path: Path) -> None:
    lines = [{"input_ids": [1]}, "{", {"input_ids": [2]}, "{"]
    skips: list[Skip] = []
    assert [s.index for s in read(write_lines(tmp_path / "d.jsonl", lines), skips, max_samples=2)] == [0, 2]
    assert len(skips) == 1


def test_chats_of_both_shapes_render_alike(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "t7 t8"}, {"role": "assistant", "content": "t9"}]
    sharegpt = [{"from": "human", "value": "t7 t8"}, {"from": "gpt", "value": "t9"}]
    path = write_lines(tmp_path / "d.jsonl", [{"messages": messages}, {"conversations": sharegpt}])
    one, other = read(path, tokenizer=tokenizer)
    assert one.token_ids == other.token_ids == [0, 1003, 7, 8, 1005, 1004, 9, 1005]
    assert one.loss_spans() == [[6, 8]]  # what the assistant says, and its end


@pytest.mark.parametrize(("kind", "index"), [("tokens", 0), ("chat", 1), ("auto", None)])
def test_the_kind_says_which_records_are_wanted(tmp_path: Path, tokenizer: Any, kind: str, index: int | None) -> None:
    chat = {"messages": [{"role": "user", "content": "t7"}, {"role": "assistant", "content": "t8"}]}
    path = write_lines(tmp_path / "d.jsonl", [{"input_ids": [1]}, chat])
    assert [s.index for s in read(path, kind=kind, tokenizer=tokenizer)] == ([0, 1] if index is None else [index])


def test_a_chat_that_the_template_refuses_is_skipped(tmp_path: Path, tokenizer: Any) -> None:
    def refusing() -> Any:
        made = tokenizer()
        made.chat_template = "{{ raise_exception('roles must alternate') }}"
        return made

    skips: list[Skip] = []
    lines = [{"messages": [{"role": "user", "content": "t7"}]}, {"input_ids": [1]}]
    read(write_lines(tmp_path / "d.jsonl", lines), skips, tokenizer=refusing)
    assert skips[0].code == "template"
    assert "roles must alternate" in skips[0].why


@pytest.mark.parametrize(
    ("name", "lines", "options", "words"),
    [
        ("d.jsonl", ["{", {"input_ids": []}], {}, "gives not one sample: 2 records read"),
        ("d.jsonl", [], {}, "not one sample"),
        ("d.jsonl", [{"input_ids": [1]}], {"kind": "images"}, "auto, tokens, chat"),
    ],
)
def test_what_cannot_be_read_at_all_is_a_configuration_error(
    tmp_path: Path, name: str, lines: list[Any], options: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(write_lines(tmp_path / name, lines), **options)


def test_the_histogram_counts_every_sample(tmp_path: Path) -> None:
    lines = [{"input_ids": [1] * length} for length in (1, 64, 65, 5000)]
    bins = read(write_lines(tmp_path / "d.jsonl", lines), max_seq_len=6000).histogram()
    assert [b["samples"] for b in bins if b["samples"]] == [2, 1, 1]
    assert bins[0] == {"up_to": 64, "samples": 2}


def test_samples_of_equal_tokens_are_counted() -> None:
    """Whatever their masks and names: the states would be the same."""
    samples = Samples()
    for index, (ids, mask) in enumerate([([1, 2], None), ([1, 2], b"\0\1"), ([2, 1], None), ([1, 2], None)]):
        samples.add(Sample(index=index, token_ids=ids, loss_mask=mask, record_id=str(index)))
    assert samples.repeated() == 2
    assert samples.share((2, 2)).repeated() == 1


def test_the_tokens_file_is_closed_with_its_samples_whenever_they_go() -> None:
    """Also where a cycle kept them: a warning of an open file would be charged to whatever runs then."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cycle: list[object] = [Samples()]
        cycle.append(cycle)
        del cycle
        gc.collect()
    assert not [str(warning.message) for warning in told if "_io.BufferedRandom" in str(warning.message)]

"""Data sets of every kind to samples, with each refusal named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import consumers
from support.chat_tokenizers import PLAIN, STRIPPING, fast_tokenizer
from support.extraction import write_lines
from support.probing import quiet

from remote_payload.extract import arrow
from remote_payload.extract.dataset import DataSet, Sample, Skip, is_mine, read_samples
from remote_payload.extract.records import LINE_LIMIT, open_source
from remote_payload.extract.refused import Refused
from remote_payload.extract.settings import ConfigError
from remote_payload.host.broken import probe_broken
from remote_payload.host.probe_data import probe_data

CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]}
MASKED = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


def read(path: Path, *, template: str = PLAIN, kind: str = "auto", **options: Any) -> tuple[DataSet, list[Skip]]:
    skipped: list[Skip] = []
    options = {"max_samples": None, "max_seq_len": 100, "vocabulary": 1000, **options}
    data = read_samples(str(path), kind, tokenizer=lambda: fast_tokenizer(template), skip=skipped.append, **options)
    return data, skipped


def codes(skipped: list[Skip]) -> list[tuple[int, int, str]]:
    return [(skip.index, skip.line, skip.code) for skip in skipped]


def test_every_refused_record_is_named_by_index_and_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    lines = [
        json.dumps(MASKED).encode(), b"", b"{ half", b'{"input_ids": [1], "x": "\xff"}', b"[1]",
        b'{"input_ids": []}', b'{"input_ids": [1000]}', b'{"input_ids": [1, true]}',
        b'{"input_ids": [1, 2], "loss_mask": [1]}', b'{"other": 1}', b'{"messages": []}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"conversations": [{"from": "?", "value": "x"}]}',
        b'{"input_ids": [7]}',
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines) + b"\n")
    data, skipped = read(path)
    assert codes(skipped) == [
        (1, 3, "malformed"), (2, 4, "encoding"), (3, 5, "malformed"), (4, 6, "empty"), (5, 7, "malformed"),
        (6, 8, "malformed"), (7, 9, "malformed"), (8, 10, "malformed"), (9, 11, "empty"), (10, 12, "multimodal"),
        (11, 13, "encoding"), (12, 14, "malformed"),
    ]  # fmt: skip
    assert [(s.index, s.token_ids, s.loss_mask) for s in data.samples] == [
        (0, [5, 6, 7], b"\x00\x01\x01"),
        (13, [7], None),
    ]
    assert (data.indexes, data.unmasked, data.container) == (14, 1, "jsonl")
    assert "byte 25 is 0xff" in skipped[1].why
    assert (data.blank.count, data.blank.records()[0]["lines"]) == (1, [2])
    # Preflight, which has no tokenizer, says the same of what it can see.
    found = probe_broken(str(path), "auto", None)
    seen = {"malformed": [3, 5, 10], "encoding": [4], "blank": [2]}
    assert {each["code"]: each["lines"] for each in found["faults"]} == seen
    assert (found["lines"], found["whole"]) == (15, True)
    told = {skip.line: skip.why for skip in skipped}
    assert all(each["why"] == told.get(each["lines"][0], "") for each in found["faults"])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"input_ids": [1, 2]', "not JSON: Expecting ',' delimiter at column 21, the end, of the line"),
        (b'{"input_ids" [1]}', "not JSON: Expecting ':' delimiter at column 14 of the line"),
        (b"[" * 100_000, "not JSON: nested too deeply, at some place of the line"),
        (
            b'{"input_ids": [' + b"1" * 5000 + b"]}",
            "not JSON: Exceeds the limit (4300 digits) for integer string conversion, at some place of the line",
        ),
        (b'{"other": 1}', "no input_ids, messages or conversations in it"),
        (
            b'{"messages": "[1,\\n2"}',
            "the chat is not JSON: Expecting ',' delimiter at column 6, the end, of its text",
        ),
    ],
)
def test_a_reason_speaks_of_the_line_and_never_of_lines_within_it(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(MASKED).encode() + b"\n" + line + b"\n")
    _, (skip,) = read(path)
    assert (skip.line, skip.why) == (2, why)


def test_the_first_refused_lines_are_told_and_all_are_counted() -> None:
    refused = Refused()
    for line in range(1, 12):
        refused.add(Skip(index=line, line=line * 2, code="malformed", why=""))
    for index in (20, 21):  # two parts of one chat
        refused.add(Skip(index=index, line=30, code="truncated", why=""))
    found = refused.document()
    assert (refused.skipped, found["skipped"], found["noted"]) == (11, {"malformed": 11}, {"truncated": 2})
    assert found["skipped_lines"] == {"malformed": [2, 4, 6, 8, 10, 12, 14, 16]}
    assert found["noted_lines"] == {"truncated": [30]}
    assert list(refused.notices("jsonl")) == [
        (
            "malformed",
            "11 records were skipped (malformed): lines 2, 4, 6, 8, 10, 12, 14, 16 and more; see ledger/driver.jsonl",
        ),
        ("truncated", "2 records were cut to max_seq_len: line 30; see ledger/driver.jsonl"),
    ]
    assert "rows 2, 4" in dict(refused.notices("arrow"))["malformed"]


def test_a_line_without_end_is_one_record(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"x": "' + b"a" * LINE_LIMIT + b'"}\n{"input_ids": [1]}\n')
    data, skipped = read(path)
    assert codes(skipped) == [(0, 1, "over-long")]
    assert data.samples.indexes[0] == 1


@pytest.mark.parametrize(("over_long", "kept"), [("truncate", [[5, 6], [1]]), ("skip", [[1]])])
def test_over_long_samples_are_cut_or_skipped_as_asked(tmp_path: Path, over_long: str, kept: Any) -> None:
    path = write_lines(tmp_path / "d.jsonl", [MASKED, {"input_ids": [1]}])
    data, skipped = read(path, max_seq_len=2, over_long=over_long)
    assert [sample.token_ids for sample in data.samples] == kept
    assert codes(skipped) == [(0, 1, "truncated" if over_long == "truncate" else "over-long")]


def test_a_sample_that_counts_for_nothing_is_kept_and_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 0]}, MASKED])
    data, skipped = read(path)
    assert len(data.samples) == 2
    assert codes(skipped) == [(0, 1, "no-loss")]


def test_a_mask_of_zeros_throughout_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 0]}] * 3)
    with pytest.raises(ConfigError, match="the loss mask of all 3 samples is zero"):
        read(path)


@pytest.mark.parametrize("lines", [[], ["{ half"], [{"input_ids": []}]])
def test_an_empty_result_is_an_error(tmp_path: Path, lines: list[Any]) -> None:
    with pytest.raises(ConfigError, match="not one sample"):
        read(write_lines(tmp_path / "d.jsonl", lines))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([MASKED, CHAT]),
        json.dumps([MASKED, CHAT], indent=2),
        "\ufeff" + json.dumps({"version": 1, "data": [MASKED, CHAT]}, indent=1),
        json.dumps({"version": 1, "data": [MASKED, CHAT]}),
        json.dumps({"about": "x" * 8192, "data": [MASKED, CHAT]}),
        json.dumps({"meta": {"data": [1]}, "\u00e4": "", "data": [MASKED, CHAT]}, indent=1),
    ],
)
def test_a_json_array_is_recognised_by_its_contents(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text, encoding="utf-8")
    data, skipped = read(tmp_path / "d.json")
    assert (data.container, data.kinds, skipped) == ("json", {"tokens": 1, "chat": 1}, [])
    assert data.methods == {"prefix": 1}
    found = probe_data(quiet, str(tmp_path / "d.json"))  # preflight says the same
    assert (found["container"], found["kind"]) == ("json", "tokens")


def test_one_record_is_jsonl_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(json.dumps({**MASKED, "notes": [{"by": "x"}]}))
    data, _ = read(tmp_path / "d.json")
    assert (data.container, data.kinds) == ("jsonl", {"tokens": 1})


def test_a_document_on_one_line_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "d").write_text(json.dumps({"data": [MASKED]}) + "\n\n")
    assert read(tmp_path / "d")[0].container == "json"


def test_a_record_keeps_the_name_that_the_data_set_gives_it(tmp_path: Path) -> None:
    names = [
        {"id": 7},
        {"uuid": "u-1", "id": "x"},
        {"conversation_id": "c"},
        {},
        {"id": ["no name"]},
        {"id": "x" * 999},
    ]
    write_lines(tmp_path / "d.jsonl", [{**MASKED, **name} for name in names])
    data, _ = read(tmp_path / "d.jsonl")
    assert [sample.record_id for sample in data.samples] == ["7", "u-1", "c", None, None, None]
    assert [sample.record_id for sample in data.samples.share((2, 2))] == ["u-1", None, None]


@pytest.mark.parametrize(("text", "line"), [('[\n{"a": 1},\n{"b" 2}\n]', 3), ('[\n{"a": 1}\n', None)])
def test_a_damaged_array_is_an_error_with_its_line(tmp_path: Path, text: str, line: int | None) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(ConfigError, match=f"line {line}" if line else "cut off|ends there|does not end"):
        read(tmp_path / "d.json")


def test_sharegpt_is_the_same_chat(tmp_path: Path) -> None:
    sharegpt = {
        "system": "be brief",
        "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "world"}],
    }
    openai = {"messages": [{"role": "system", "content": "be brief"}, *CHAT["messages"]]}
    parts = {
        "messages": [{"role": "system", "content": [{"type": "text", "text": "be "}, "brief"]}, *CHAT["messages"]]
    }
    data, skipped = read(write_lines(tmp_path / "d.jsonl", [sharegpt, openai, parts]))
    assert not skipped
    assert len({(tuple(sample.token_ids), sample.loss_mask) for sample in data.samples}) == 1


def test_tool_turns_of_sharegpt_reach_the_template(tmp_path: Path) -> None:
    record = {
        "tools": '[{"function": {"name": "look"}}]',
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "seen"},
            {"from": "gpt", "value": "done"},
        ],
    }
    data, skipped = read(write_lines(tmp_path / "d.jsonl", [record]))
    (sample,) = data.samples
    text = fast_tokenizer(PLAIN).decode(sample.token_ids)
    assert not skipped
    assert text == '<|user|>q<|end|><|assistant|>[look({"x": 1})]<|end|><|tool|>seen<|end|><|assistant|>done<|end|>'


def test_a_split_chat_takes_an_index_for_each_part(tmp_path: Path) -> None:
    thinking = {
        "messages": [
            {"role": "user", "content": "one"}, {"role": "assistant", "content": "<think>a</think>two"},
            {"role": "user", "content": "three"}, {"role": "assistant", "content": "<think>b</think>four"},
        ]
    }  # fmt: skip
    data, skipped = read(write_lines(tmp_path / "d.jsonl", [thinking, CHAT]), template=STRIPPING)
    assert list(data.samples.indexes) == [0, 1, 2]
    assert codes(skipped) == [(0, 1, "split")]


def test_the_kind_can_be_prescribed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [MASKED, CHAT])
    assert [len(read(path, kind=kind)[0].samples) for kind in ("auto", "tokens", "chat")] == [2, 1, 1]
    with pytest.raises(ConfigError, match=r"data\.kind is one of"):
        read(path, kind="text")


def test_shards_share_all_samples_without_double(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"input_ids": [number + 1]} for number in range(10)])
    data, _ = read(path, max_samples=7)
    shares = [list(data.samples.share((number, 3)).indexes) for number in (1, 2, 3)]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]
    assert is_mine(8, (3, 3))


def test_an_unreadable_path_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match=r"neither state.json"):
        read(tmp_path)


# ------------------------------------------------------------------------------------------ column stores


def test_parquet_is_read_whatever_its_name(tmp_path: Path, columns: None) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [MASKED, {"input_ids": []}, {"input_ids": [9], "loss_mask": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.bin")
    data, skipped = read(tmp_path / "data.bin")
    assert [(s.index, s.token_ids, s.loss_mask) for s in data.samples] == [(0, [5, 6, 7], b"\0\1\1"), (2, [9], None)]
    assert codes(skipped) == [(1, 2, "empty")]
    chats = [
        {**CHAT, "tools": None},
        {"messages": [*CHAT["messages"], {"role": "user", "content": "x", "name": "n"}]},
    ]
    folder = tmp_path / "parts"
    folder.mkdir()
    for place, chat in enumerate(chats):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([chat]), folder / f"{place}.parquet")
    data, skipped = read(folder)
    assert (data.container, data.kinds, skipped) == ("parquet", {"chat": 2}, [])


def test_a_cut_parquet_file_is_an_error(tmp_path: Path, columns: None) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([MASKED]), tmp_path / "d.parquet")
    whole = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot read the Parquet file"):
        read(tmp_path / "d.parquet")


def test_a_folder_of_datasets_is_read(tmp_path: Path, columns: None) -> None:
    """Written by `datasets` itself, as `speculators prepare-data` does."""
    consumers.load("arrow", tmp_path / "prepared", tmp_path / "o.pt", ("columns",))
    data, skipped = read(tmp_path / "prepared")
    assert [(s.token_ids, s.loss_mask) for s in data.samples] == [
        ([5, 6, 7], b"\0\1\1"),
        ([8, 9], b"\0\1"),
        ([3], b"\1"),
    ]
    assert (data.container, skipped) == ("arrow", [])


def test_what_is_written_beside_the_files_is_read_again(tmp_path: Path, columns: None) -> None:
    rows = [Sample(index=1, token_ids=[5, 6], loss_mask=None), Sample(index=3, token_ids=[7], loss_mask=b"\1")]
    arrow.write_data_set(str(tmp_path), rows, indexes=5, fingerprint="f")
    values = [record.value for record in open_source(str(tmp_path)).records()]
    assert [value["input_ids"] for value in values] == [[], [5, 6], [], [7], []]
    assert [value["loss_mask"] for value in values] == [[], [1, 1], [], [1], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(arrow.FILES)


def test_without_pyarrow_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        read(tmp_path / "d.parquet")

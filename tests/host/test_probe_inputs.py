"""The model folder and the data set: whole, damaged and absent."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.probing import quiet

from remote_payload.host import broken
from remote_payload.host.broken import probe_broken
from remote_payload.host.model_keys import compare_keys, empty_layers
from remote_payload.host.probe_data import probe_data
from remote_payload.host.probe_model import probe_model
from remote_payload.host.textdata import json_error


def safetensors(tensors: int = 2, size: int = 100, names: Sequence[str] = ()) -> bytes:
    names = names or [f"t{number}" for number in range(tensors)]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number, name in enumerate(names):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [number * size, (number + 1) * size]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(len(names) * size)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint in the layout of Kimi-K2.5: the text model's sizes are nested, two shards and an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "dtype": "bfloat16",
            "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "max_position_embeddings": 262144,
            "quantization_config": {"quant_method": "compressed-tensors"}}  # fmt: skip
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text,
              "vision_config": {"hidden_size": 1152, "num_attention_heads": 16}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (folder / name).write_bytes(safetensors())
    weights = {"weight_map": {"t0": names[0], "t1": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


class TestModel:
    def test_a_whole_checkpoint(self, model: Path) -> None:
        found = probe_model(quiet, str(model))
        assert found["config"] == {
            "error": None, "model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"],
            "num_hidden_layers": 61, "hidden_size": 7168, "dtype": "bfloat16", "quantization": "compressed-tensors",
            "attention_heads": 64, "kv_heads": None, "head_dim": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "max_positions": 262144, "rope": None, "experts": None, "draft_layers": None, "empty_layers": [],
            "vision_heads": 16,
        }  # fmt: skip
        assert found["shards"] == {
            "index": True, "error": None, "files": 2, "missing": [], "empty": [], "truncated": [], "absent": [],
            "keys": None,  # no tensor of it is of a layer
        }  # fmt: skip
        assert found["tokenizer"] == ["tokenizer_config.json"]
        assert found["total_bytes"] == sum(path.stat().st_size for path in model.iterdir())

    @pytest.mark.parametrize("damage", ["missing", "empty", "cut", "cut header", "no header", "garbage", "dangling"])
    def test_a_damaged_shard_is_named(self, model: Path, damage: str) -> None:
        shard = model / "model-00002-of-00002.safetensors"
        whole = shard.read_bytes()
        if damage in ("missing", "dangling"):
            shard.unlink()
        if damage == "dangling":  # as in a hub cache whose download was interrupted
            shard.symlink_to("../blobs/none")
        content = {
            "empty": b"", "cut": whole[:-1], "cut header": whole[:40], "no header": whole[:5],
            "garbage": struct.pack("<Q", 4) + b"\xff\xfe{}" + whole,
        }.get(damage)  # fmt: skip
        if content is not None:
            shard.write_bytes(content)
        shards = probe_model(quiet, str(model))["shards"]
        if damage in ("missing", "dangling"):
            assert shards["missing"] == [shard.name]
        elif damage == "empty":
            assert shards["empty"] == [shard.name]
        else:
            assert [item["file"] for item in shards["truncated"]] == [shard.name]

    def test_a_header_that_contradicts_itself(self, model: Path) -> None:
        header = {"t": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}
        text = json.dumps(header).encode()
        (model / "model-00002-of-00002.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(20))
        (found,) = probe_model(quiet, str(model))["shards"]["truncated"]
        assert found["why"] == "its header contradicts itself at t"

    def test_a_tensor_that_only_the_index_knows(self, model: Path) -> None:
        index = model / "model.safetensors.index.json"
        weights = json.loads(index.read_text())
        weights["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
        index.write_text(json.dumps(weights))
        assert probe_model(quiet, str(model))["shards"]["absent"] == ["lm_head.weight"]

    @pytest.mark.parametrize("index", [True, False])
    def test_tensors_are_held_against_the_configuration(self, model: Path, index: bool) -> None:
        config = json.loads((model / "config.json").read_text())
        config["text_config"].update(num_hidden_layers=3, n_routed_experts=2)
        (model / "config.json").write_text(json.dumps(config))
        names = [f"language_model.model.layers.{n}.mlp.experts.{e}.up_proj.weight" for n in (1, 2) for e in (0, 1)]
        names.remove("language_model.model.layers.2.mlp.experts.1.up_proj.weight")
        names += ["language_model.model.layers.2.norm.weight", "vision_tower.encoder.blocks.26.norm.weight"]
        for path in model.glob("*.safetensors*"):
            path.unlink()
        (model / "model-1.safetensors").write_bytes(safetensors(names=names))
        if index:
            weights = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
            (model / "model.safetensors.index.json").write_text(json.dumps(weights))
        assert probe_model(quiet, str(model))["shards"]["keys"] == {
            "layers": 2, "missing": [0], "beyond": [], "experts": {"layer": 2, "found": 1, "wrong": [1]}
        }  # fmt: skip

    def test_layers_of_a_draft_model_are_no_more_than_told(self) -> None:
        names = [f"model.layers.{number}.mlp.weight" for number in range(5)]
        assert compare_keys(names, 4, None, 1) == {"layers": 5, "missing": [], "beyond": [], "experts": None}
        assert compare_keys(names, 4, None, None) == {"layers": 5, "missing": [], "beyond": [4], "experts": None}
        assert compare_keys(["transformer.h.0.attn.weight"], 1, 8, None) == {
            "layers": 1,
            "missing": [],
            "beyond": [],
            "experts": None,
        }  # fmt: skip - experts in one tensor have no number
        assert compare_keys(names, None, None, None) is None
        assert compare_keys(["blk.weight", "vision.layers.0.weight"], 4, None, None) is None

    def test_layers_that_compute_nothing_have_no_tensor(self, model: Path) -> None:
        """Nemotron-NAS: layer 2 leaves out all, layers 1 and 3 a part; layer 0 is missing all the same."""
        config = json.loads((model / "config.json").read_text())
        whole, none = {"no_op": False, "n_heads_in_group": 8}, {"no_op": True, "n_heads_in_group": None}
        blocks = [(whole, whole), (none, whole), (none, none), (whole, none)]
        config["text_config"].update(
            num_hidden_layers=4, block_configs=[{"attention": attention, "ffn": ffn} for attention, ffn in blocks]
        )
        (model / "config.json").write_text(json.dumps(config))
        names = ["model.layers.1.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.weight"]
        for path in model.glob("*.safetensors*"):
            path.unlink()
        (model / "model-1.safetensors").write_bytes(safetensors(names=names))
        found = probe_model(quiet, str(model))
        assert found["config"]["empty_layers"] == [2]
        assert found["shards"]["keys"] == {"layers": 2, "missing": [0], "beyond": [], "experts": None}

    @pytest.mark.parametrize(
        "blocks", [None, "all", [], [None], [{"attention": {"no_op": True}}], [{"attention": True, "ffn": True}]]
    )
    def test_odd_block_configurations_leave_out_no_layer(self, blocks: Any) -> None:
        assert empty_layers({"num_hidden_layers": 1, "block_configs": blocks}) == []

    def test_a_list_of_another_length_excuses_no_missing_layer(self) -> None:
        empty = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
        assert empty_layers({"num_hidden_layers": 2, "block_configs": [empty, {}]}) == [0]
        assert empty_layers({"num_hidden_layers": 3, "block_configs": [empty, {}]}) == []

    def test_code_that_the_configuration_wants_run(self, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        config["auto_map"] = {
            "AutoConfig": "configuration_kimi.KimiConfig",
            "AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None],
            "AutoModel": "somebody/model--modeling_other.Model",
        }
        (model / "config.json").write_text(json.dumps(config))
        (model / "configuration_kimi.py").write_text("")
        assert probe_model(quiet, str(model))["remote_code"] == {
            "files": ["configuration_kimi.py", "tokenization_kimi.py"], "missing": ["tokenization_kimi.py"],
        }  # fmt: skip

    def test_no_index_no_config_no_model(self, model: Path, tmp_path: Path) -> None:
        (model / "model.safetensors.index.json").write_text("{}")
        assert "weight_map" in probe_model(quiet, str(model))["shards"]["error"]
        (model / "model.safetensors.index.json").unlink()
        assert probe_model(quiet, str(model))["shards"]["files"] == 2
        (model / "config.json").write_text("{")
        assert probe_model(quiet, str(model))["config"]["error"]
        assert probe_model(quiet, str(tmp_path / "none"))["exists"] is False


class TestData:
    @pytest.mark.parametrize(
        ("content", "kind", "lines"),
        [
            (b'{"input_ids": [1, 2]}\n{"input_ids": [3]}\n', "tokens", 2),
            (b'\n\n{"messages": []}', "chat", 3),
            (b'{"conversations": [{"from": "human", "value": "hi"}]}\n', "chat", 1),
            (b'{"text": "hi"}\n', "unknown", 1),
            (b'{ damaged\n\n{"text": 1}\n"x"\n{"input_ids": [3]}\n', "tokens", 5),
            (b'{"messages": "[{}]"}\n', "chat", 1),
            (b'\xef\xbb\xbf{"input_ids": [1]}\n', "tokens", 1),
            (b'[1]\n{"input_ids": [1]}\n', "tokens", 2),
            (b"\x00\xff not json\n", "unknown", 1),
            (b"", "unknown", 0),
        ],
    )
    def test_kind_and_lines(self, tmp_path: Path, content: bytes, kind: str, lines: int) -> None:
        path = tmp_path / "data.jsonl"
        path.write_bytes(content)
        found = probe_data(quiet, str(path))
        assert (found["kind"], found["lines"], found["counted"]) == (kind, lines, True)
        assert found["bytes"] == len(content)

    @pytest.mark.parametrize(
        ("content", "container", "kind"),
        [
            (b"[1, 2, 3]\n", "json", "unknown"),
            (b'\xef\xbb\xbf[\n {"messages": []},\n {', "json", "chat"),
            (b'{"version": [1], "about": {"data": [{}]}, "data": [{"messages": []}, {"x": 1}]}\n', "json", "chat"),
            (b'{"version": 1, "data": [{"text": 1}]}', "json", "unknown"),
            (b"PAR1 cut off", "parquet", "unknown"),
            (b"PAR1 columns: input_ids, loss_mask" + (33).to_bytes(4, "little") + b"PAR1", "parquet", "tokens"),
        ],
    )
    def test_what_is_not_of_lines_is_told_by_its_contents(
        self, tmp_path: Path, content: bytes, container: str, kind: str
    ) -> None:
        path = tmp_path / "data.jsonl"
        path.write_bytes(content)
        found = probe_data(quiet, str(path))
        assert (found["container"], found["kind"], found["lines"]) == (container, kind, None)

    def test_a_folder_of_datasets_names_its_columns(self, tmp_path: Path) -> None:
        (tmp_path / "state.json").write_text("{}")
        features = {"features": {"input_ids": {}, "loss_mask": {}}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(features))
        found = probe_data(quiet, str(tmp_path))
        assert (found["container"], found["kind"]) == ("arrow", "tokens")
        (tmp_path / "state.json").unlink()
        assert probe_data(quiet, str(tmp_path))["container"] == ""

    def test_a_large_file_is_estimated(self, tmp_path: Path) -> None:
        path = tmp_path / "data.jsonl"
        line = b'{"input_ids": [1]}' + b" " * 2029 + b"\n"  # 2 KiB
        with path.open("wb") as file:
            file.write(line * (1 << 14))
            file.truncate(1 << 29)
        found = probe_data(quiet, str(path))
        assert found["counted"] is False
        assert found["lines"] == pytest.approx((1 << 29) / 2048, rel=0.05)

    def test_absent_and_folder(self, tmp_path: Path) -> None:
        assert probe_data(quiet, str(tmp_path / "none"))["exists"] is False
        assert probe_data(quiet, str(tmp_path))["lines"] is None

    def test_an_indented_document_is_what_its_records_are(self, tmp_path: Path) -> None:
        path = tmp_path / "data.json"
        path.write_text(json.dumps({"version": 1, "data": [{"conversations": [{}]}]}, indent=1))
        found = probe_data(quiet, str(path))
        assert (found["container"], found["kind"], found["keys"]) == ("json", "chat", ["conversations"])

    def test_broken_lines_are_counted_as_far_as_the_job_reads(self, tmp_path: Path) -> None:
        path = tmp_path / "data.jsonl"
        good = b'{"input_ids": [1]}\n'
        path.write_bytes(good + b"\n" + b"{ half\n" * 20 + good + b'{"messages": []}\n' + good)
        found = probe_broken(str(path), "tokens", None)
        assert (found["lines"], found["whole"]) == (25, True)
        blank, malformed = found["faults"]
        assert (blank["code"], blank["count"], blank["lines"]) == ("blank", 1, [2])
        assert (malformed["count"], malformed["lines"]) == (21, [3, 4, 5, 6, 7, 8, 9, 10])
        assert malformed["why"].startswith("not JSON: Expecting property name")
        assert probe_broken(str(path), "tokens", 1) == {"lines": 1, "whole": True, "faults": []}
        assert sum(each["count"] for each in probe_broken(str(path), "auto", None)["faults"]) == 21

    def test_a_look_for_broken_lines_ends_in_time_however_long_they_are(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, good = tmp_path / "data.jsonl", b'{"input_ids": [1]}\n'
        ticks = itertools.count()
        monkeypatch.setattr(broken, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        path.write_bytes(good * 10)
        assert probe_broken(str(path), "auto", None, seconds=3.5) == {"lines": 3, "whole": False, "faults": []}
        monkeypatch.setattr(broken, "LINE_LIMIT", 64)
        path.write_bytes(good + b"x" * 64_000 + b"\n" + good)
        ticks = itertools.count()
        found = probe_broken(str(path), "auto", None, seconds=5.5)
        assert (found["lines"], found["whole"], found["faults"][0]["code"]) == (2, False, "over-long")
        assert next(ticks) < 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": "b', "Unterminated string starting at column 7"),
        ('{"a": "\n"}', "Invalid control character at column 8"),
        ('{"a" 1}', "Expecting ':' delimiter at column 6"),
        ("[1", "Expecting ',' delimiter at column 3, the end,"),
    ],
)
def test_what_json_says_of_a_text_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="line 1") as caught:
        json.loads(text)
    assert json_error(caught.value, text) == said

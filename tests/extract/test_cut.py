"""Cutting a checkpoint: configuration, names, bytes; no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import reference

from remote_payload.extract.cut import (
    INDEX,
    BadCheckpointError,
    CannotCutError,
    cut_checkpoint,
    cut_config,
    dummy_checkpoint,
    renamed,
)

KIMI: dict[str, Any] = {
    "text_config": {
        "num_hidden_layers": 61, "first_k_dense_replace": 1, "n_routed_experts": 384, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    },
    "quantization_config": {"ignore": ["lm_head", "re:.*self_attn.*", "language_model.model.layers.0.mlp.up_proj",
                                       "language_model.model.layers.44.mlp"]},
}  # fmt: skip


def test_kimi_keeps_its_dense_layer_and_two_with_experts() -> None:
    small, layers = cut_config(KIMI)
    assert layers == (0, 1, 2)
    assert small["text_config"]["num_hidden_layers"] == 3
    assert small["text_config"]["first_k_dense_replace"] == 1
    ignored = small["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "re:.*self_attn.*", "language_model.model.layers.0.mlp.up_proj"]


def test_deepseek_keeps_one_of_its_three_dense_layers_and_loses_its_draft_layer() -> None:
    config = {
        "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_nextn_predict_layers": 1,
        "quantization_config": {"modules_to_not_convert": ["model.layers.3.mlp.gate", r"re:model\.layers\.4\.x"]},
    }  # fmt: skip
    small, layers = cut_config(config)
    assert layers == (0, 3, 4)
    assert (small["first_k_dense_replace"], small["num_nextn_predict_layers"]) == (1, 0)
    assert small["quantization_config"]["modules_to_not_convert"] == [
        "model.layers.1.mlp.gate",
        r"re:model\.layers\.2\.x",
    ]
    assert renamed("model.layers.3.mlp.gate.weight", "model.layers", layers) == "model.layers.1.mlp.gate.weight"
    assert renamed("model.layers.61.embed_tokens.weight", "model.layers", layers) is None
    assert renamed("lm_head.weight", "model.layers", layers) == "lm_head.weight"


def test_both_kinds_of_attention_are_kept() -> None:
    types = ["sliding_attention", "full_attention"] * 12
    small, layers = cut_config({"num_hidden_layers": 24, "layer_types": types})
    assert layers == (0, 1, 2, 3)
    assert small["layer_types"] == types[:4]
    gemma = [*["sliding_attention"] * 5, "full_attention"] * 2
    assert cut_config({"num_hidden_layers": 12, "layer_types": gemma})[1] == (0, 1, 5, 11)


def test_types_that_go_on_behind_the_last_layer_tell_the_kinds_all_the_same() -> None:
    gemma = [*["sliding_attention"] * 5, "full_attention"] * 2
    small, layers = cut_config({"num_hidden_layers": 12, "layer_types": [*gemma, "full_attention"]})
    assert layers == (0, 1, 5, 11)
    assert small["layer_types"] == [gemma[layer] for layer in layers]
    assert cut_config({"num_hidden_layers": 12, "layer_types": gemma[:3]})[1] == (0, 1, 2)


def test_a_dense_model_keeps_three_layers_and_a_stride_cannot_be_cut() -> None:
    assert cut_config({"num_hidden_layers": 32})[1] == (0, 1, 2)
    with pytest.raises(CannotCutError, match="stride"):
        cut_config({"num_hidden_layers": 32, "decoder_sparse_step": 2})


def blocks(*left_out: str) -> list[dict[str, Any]]:
    return [{part: {"no_op": part in each} for part in ("attention", "ffn")} for each in left_out]


def test_blocks_of_each_kind_are_kept_and_one_without_tensors_is_no_fault(tmp_path: Path) -> None:
    """Nemotron-NAS. The first two whole layers, and what leaves out the attention, the MLP, or both."""
    import torch

    kinds = ["", "", "", "attention", "", "attention ffn", "ffn", ""]
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "block_configs": blocks(*kinds)}))
    parts = {"attention": "self_attn.q_proj", "ffn": "mlp.up_proj"}
    save_file(
        {
            f"model.layers.{number}.{name}.weight": torch.full((2, 2), float(number))
            for number, kind in enumerate(kinds)
            for part, name in parts.items()
            if part not in kind
        },
        model / "model.safetensors",
    )
    assert cut_checkpoint(str(model), str(tmp_path / "cut")).layers == (0, 1, 3, 5, 6)
    small = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert small["block_configs"] == blocks("", "", "attention", "attention ffn", "ffn")
    written = json.loads((tmp_path / "cut" / INDEX).read_text())["weight_map"]
    assert sorted(written) == [
        "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.mlp.up_proj.weight", "model.layers.4.self_attn.q_proj.weight",
    ]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Five layers over three shards; the second holds only what a cut needs, under names that stay."""
    import torch

    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "n_routed_experts": 4}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    shards = {
        "model-1.safetensors": [f"model.layers.{n}.mlp.weight" for n in range(5)],
        "model-2.safetensors": ["model.embed_tokens.weight", "model.layers.0.norm.weight"],
        "model-3.safetensors": ["lm_head.weight", "model.layers.5.draft.weight", "model.layers.2.scale"],
        "model-4.safetensors": ["model.layers.1.norm.weight", "model.layers.4.norm.weight"],
    }
    index = {}
    for shard, names in shards.items():
        save_file({name: torch.randn(7, 3) for name in names}, folder / shard)
        index.update(dict.fromkeys(names, shard))
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def test_the_cut_holds_exactly_the_needed_tensors(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "cut"
    cut = cut_checkpoint(str(checkpoint), str(target))
    assert cut.layers == (0, 2, 3)
    found = {name: value for path in target.glob("*.safetensors") for name, value in load_file(path).items()}
    real = {name: value for path in checkpoint.glob("*.safetensors") for name, value in load_file(path).items()}
    origin = {
        "model.layers.0.mlp.weight": "model.layers.0.mlp.weight",
        "model.layers.1.mlp.weight": "model.layers.2.mlp.weight",
        "model.layers.2.mlp.weight": "model.layers.3.mlp.weight",
        "model.layers.0.norm.weight": "model.layers.0.norm.weight",
        "model.layers.1.scale": "model.layers.2.scale",
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert set(found) == set(origin)
    assert all(found[new].equal(real[old]) for new, old in origin.items())
    assert json.loads((target / INDEX).read_text())["weight_map"].keys() == set(origin)
    assert (target / "model-2.safetensors").is_symlink()
    assert not (target / "model-1.safetensors").is_symlink()
    assert (target / "tokenizer.json").is_symlink()
    assert cut.copied == 5 * 7 * 3 * 4
    assert cut.linked == (checkpoint / "model-2.safetensors").stat().st_size


def test_a_shard_that_is_cut_off_is_found_without_reading_it(checkpoint: Path, tmp_path: Path) -> None:
    shard = checkpoint / "model-3.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(BadCheckpointError, match=r"model-3\.safetensors has \d+ bytes, its header says"):
        cut_checkpoint(str(checkpoint), str(tmp_path / "cut"))


def test_a_missing_shard_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model-2.safetensors").unlink()
    with pytest.raises(BadCheckpointError, match=r"model-2\.safetensors is named in the index"):
        cut_checkpoint(str(checkpoint), str(tmp_path / "cut"))


def test_weights_of_another_kind_are_rehearsed_as_dummies(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / INDEX).unlink()
    for shard in checkpoint.glob("*.safetensors"):
        shard.rename(shard.with_suffix(".bin"))
    with pytest.raises(CannotCutError, match="safetensors"):
        cut_checkpoint(str(checkpoint), str(tmp_path / "cut"))
    assert dummy_checkpoint(str(checkpoint), str(tmp_path / "dummy")) == (0, 2, 3)
    assert json.loads((tmp_path / "dummy" / "config.json").read_text())["num_hidden_layers"] == 3


@pytest.mark.parametrize("name", ["kimi-k25-tiny", "deepseek-v3-tiny", "qwen3-moe-tiny", "mistral-sliding-tiny"])
def test_a_cut_model_computes_what_the_real_one_does_up_to_there(name: str, model: Any, tmp_path: Path) -> None:
    """The kept layers are the real model's first ones here, so the states after them must be its states."""
    cut = cut_checkpoint(str(model(name)), str(tmp_path / "cut"))
    kept = len(cut.layers)
    assert cut.layers == tuple(range(kept))
    assert kept in (2, 3)
    (shard,) = (tmp_path / "cut").glob("*.safetensors")
    shard.rename(shard.with_name("model.safetensors"))  # the reference reads one file
    (tmp_path / "cut" / INDEX).unlink()
    prompt = list(range(20, 60))
    small, _ = reference.states(reference.load(tmp_path / "cut", tmp_path / "scratch-cut"), prompt)
    whole, _ = reference.states(reference.load(model(name), tmp_path / "scratch"), prompt)
    assert len(small) == kept + 1
    assert all(reference.relative_error(one, other) == 0 for one, other in zip(small, whole, strict=False))

"""Each format, read by the trainer that it is for, through that trainer's own released code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import consumers
from support.samples import HIDDEN, Made, make_sample

from remote_payload.extract import arrow
from remote_payload.extract.dataset import Sample

LENGTHS = {0: 7, 1: 12, 3: 1, 4: 9}
"""Index 2 was skipped: a hole."""


def write_all(folder: Path, form: str, **options: object) -> dict[int, Made]:
    return {index: make_sample(folder, form, index, tokens, **options) for index, tokens in LENGTHS.items()}


def write_arrow(folder: Path, made: dict[int, Made]) -> None:
    rows = [Sample(index=i, token_ids=each.ids, loss_mask=bytes(each.mask)) for i, each in sorted(made.items())]
    arrow.write_data_set(str(folder), rows, indexes=5, fingerprint="a1")


@pytest.mark.parametrize("fp8", [False, True])
def test_speculators_trains_from_what_is_written(tmp_path: Path, columns: None, fp8: bool) -> None:
    folder = tmp_path / "out"
    made = write_all(folder, "speculators", fp8=fp8)
    write_arrow(folder, made)
    words = ("bfloat16", "fp8") if fp8 else ("bfloat16",)
    found = consumers.load("speculators", folder, tmp_path / "o.pt", ("columns", "speculators-0.9"), *words)
    assert [int(sample["index"]) for sample in found] == sorted(LENGTHS)
    for sample in found:
        expected = made[int(sample["index"])]
        assert sample["input_ids"].tolist() == expected.ids
        assert sample["loss_mask"].tolist() == expected.mask
        read = torch.cat([sample["hidden_states"], sample["verifier_last_hidden_states"]], dim=1)
        if fp8:
            # 3 bits of mantissa: half a step is a sixteenth; then bf16's own rounding of value and scale.
            torch.testing.assert_close(read, expected.states.flatten(1), rtol=0.08, atol=0.01)
        else:
            assert read.equal(expected.states.flatten(1))


def test_speculators_03_trains_from_what_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    made = write_all(folder, "speculators-0.3")
    found = consumers.load("speculators_03", folder, tmp_path / "o.pt", ("speculators-0.3",), "bfloat16")
    assert sorted(int(sample["index"]) for sample in found) == sorted(LENGTHS)
    for sample in found:
        expected = made[int(sample["index"])]  # its loader aligns token x+1 with the state before it
        assert sample["input_ids"].tolist() == expected.ids[1:]
        assert sample["loss_mask"].tolist() == expected.mask[1:]
        assert sample["hidden_states"].equal(expected.states[:-1, :-1].flatten(1))
        assert sample["verifier_last_hidden_states"].equal(expected.states[1:, -1])


def test_specforge_trains_from_what_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    made = write_all(folder, "specforge")
    made[2001] = make_sample(folder, "specforge", 2001, 5)
    assert (folder / "rows_2000-4000" / "data_2001.ckpt").is_file()
    found = consumers.load("specforge", folder, tmp_path / "o.pt", ("columns", "specforge"))
    assert sorted(int(sample["index"]) for sample in found) == sorted(made)
    for sample in found:
        expected = made[int(sample["index"])]
        assert sample["tokens"] == len(expected.ids)
        assert sample["input_ids"].tolist() == [expected.ids]
        assert sample["loss_mask"].tolist() == [[*expected.mask[:-1], 0]]  # its trainer drops the last
        assert sample["hidden_state"][0].equal(expected.states[:, :-1].flatten(1))
        assert sample["target"][0].equal(expected.states[:, -1])


@pytest.mark.parametrize(("final_norm", "name"), [(True, None), (False, "talk-1")])
def test_model_optimizer_finds_its_documented_keys(tmp_path: Path, final_norm: bool, name: str | None) -> None:
    made = make_sample(tmp_path, "modelopt", 4, 9, final_norm=final_norm, record_id=name)
    data = torch.load(tmp_path / "4.pt", weights_only=True)
    assert data["conversation_id"] == (name or "4")
    assert data["input_ids"].tolist() == made.ids
    assert data["loss_mask"].tolist() == made.mask
    assert data["hidden_states"].shape == (9, HIDDEN)
    assert data["hidden_states"].equal(made.states[:, -1])
    assert data["aux_hidden_states"].equal(made.states[:, :-1].flatten(1))
    assert data["hidden_states_prenorm"] is not final_norm

"""`ctl convert`'s job: it writes what it read, by the other format's rules, and refuses what it cannot keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import consumers
from support.samples import HIDDEN, LAYERS, Made, make_sample

from remote_payload.extract import convert
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.final_norm import load_final_norm
from remote_payload.extract.formats import format_named
from remote_payload.extract.settings import ConfigError
from remote_payload.host.files import read_json, read_lines

LENGTHS = {0: 7, 1: 12, 3: 1}


def write_model(folder: Path, kind: str = "qwen3") -> torch.Tensor:
    """A checkpoint's final norm, sharded, beside a vision tower's norm that is another's."""
    folder.mkdir(exist_ok=True)
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
    config = {"model_type": "outer", "text_config": {"model_type": kind, "rms_norm_eps": 1e-6}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": weight}, folder / "b.safetensors")
    save_file(
        {"vision.norm.weight": torch.ones(2), "model.layers.0.norm.weight": torch.ones(2)}, folder / "a.safetensors"
    )
    places = {"model.norm.weight": "b.safetensors", "vision.norm.weight": "a.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return weight


class Conversions:
    """One extraction, made up, and conversions of it, each in a run folder."""

    def __init__(self, root: Path, form: str, **options: Any) -> None:
        self.root, self.source = root, root / "source"
        self.made: dict[int, Made] = {
            index: make_sample(self.source, form, index, tokens, **options) for index, tokens in LENGTHS.items()
        }
        self.weight = write_model(root / "model")
        run = root / "extracted"
        (run / "ledger").mkdir(parents=True)
        spec = {"output": str(self.source), "format": form, "model": str(root / "model")}
        (run / "plan.json").write_text(json.dumps({"extract": spec}))
        (run / "verify.json").write_text(json.dumps({"data": {"records": 5}}))
        lines = [json.dumps(each.line) + "\n" for each in self.made.values()]
        (run / "ledger" / "rank-0.jsonl").write_text("".join(lines))

    def run(self, to: str, *, verify: bool = False) -> int:
        """Run the job, or its verify step, and return its exit code."""
        run = self.root / "converted"
        for folder in ("ledger", "events"):
            (run / folder).mkdir(parents=True, exist_ok=True)
        words = ["--run", str(self.root / "extracted"), "--output", str(self.root / "converted-out"), "--to", to]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CTL_RUN_DIR", str(run))
            patch.setattr("sys.argv", ["convert", *words, *(["--verify"] if verify else [])])
            return convert.main()

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight).to(states.dtype)


def test_to_specforge_the_final_norm_is_applied(tmp_path: Path) -> None:
    source = Conversions(tmp_path, "speculators")
    assert source.run("specforge") == 0
    for index, made in source.made.items():
        path = tmp_path / "converted-out" / f"rows_0-2000/data_{index}.ckpt"
        data = torch.load(path, weights_only=True)
        assert data["aux_hidden_state"][0].equal(made.states[:, :-1].flatten(1))
        torch.testing.assert_close(data["hidden_state"][0], source.normed(made.states[:, -1]), rtol=0.01, atol=1e-3)
        assert data["input_ids"].tolist() == made.ids
        assert data["loss_mask"].tolist() == made.mask
        assert data["ctl"]["final_norm"] == "true"
        assert json.loads(data["ctl"]["boundaries"]) == [2, 4, 5, 8]
        assert (json.loads(data["ctl"]["layer_ids"]), data["ctl"]["layer_convention"]) == ([1, 3, 4, 7], "specforge")
    assert source.run("specforge", verify=True) == 0
    document = read_json(str(tmp_path / "converted" / "verify.json"))
    assert document is not None
    assert document["samples"] == {"expected": 3, "written": 3, "skipped": 0, "failed": 0, "missing": 0}
    assert (document["final_norm"], document["num_layers"]) == (True, LAYERS)
    assert document["shape"] == {"hidden": HIDDEN, "states": 4, "dtype": "bfloat16"}
    lines = read_lines(str(tmp_path / "converted" / "ledger" / "rank-0.jsonl"))
    last = document["states"][-1]
    assert [state["boundary"] for state in document["states"]] == document["boundaries"] == [2, 4, 5, 8]
    assert last["norm_max"] == max(line["states"][-1]["norm_max"] for line in lines)
    events = read_lines(str(tmp_path / "converted" / "events" / "driver.jsonl"))
    assert events[-1]["done"] == events[-1]["total"] == 3


def test_states_are_kept_bit_for_bit_and_the_data_set_is_written(tmp_path: Path, columns: None) -> None:
    source = Conversions(tmp_path, "speculators-0.3")
    assert source.run("speculators") == 0
    for index, made in source.made.items():
        found = load_file(tmp_path / "converted-out" / f"hs_{index}.safetensors")
        assert found["hidden_states"].equal(made.states)
        assert found["token_ids"].tolist() == made.ids
    # With the data set that speculators needs beside them, read by speculators itself.
    out = tmp_path / "converted-out"
    found = consumers.load("speculators", out, tmp_path / "o.pt", ("columns", "speculators-0.9"), "bfloat16")
    assert [int(sample["index"]) for sample in found] == [0, 1, 3]
    assert [sample["loss_mask"].tolist() for sample in found] == [made.mask for made in source.made.values()]


@pytest.mark.parametrize(
    ("form", "options", "to", "words"),
    [
        ("specforge", {}, "speculators", "cannot be undone"),
        ("speculators", {"fp8": True}, "modelopt", "fp8 states were rounded"),
        ("speculators", {"boundaries": [2, 4]}, "speculators-0.3", "needs the model's last boundary, 8"),
    ],
)
def test_what_would_lose_something_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, options: Any, to: str, words: str
) -> None:
    assert Conversions(tmp_path, form, **options).run(to) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "converted-out").exists()


def test_files_of_other_shapes_are_a_problem(tmp_path: Path) -> None:
    source = Conversions(tmp_path, "speculators")
    wider = make_sample(source.source, "speculators", 1, LENGTHS[1], hidden=2 * HIDDEN)
    run = tmp_path / "extracted" / "ledger" / "rank-0.jsonl"
    lines = {**source.made, 1: wider}.values()
    run.write_text("".join(json.dumps(each.line) + "\n" for each in lines))
    assert source.run("speculators-0.3") == 0
    assert source.run("speculators-0.3", verify=True) == 1
    document = read_json(str(tmp_path / "converted" / "verify.json"))
    assert document is not None
    assert [problem["code"] for problem in document["problems"]] == ["mixed-shapes"]


def test_records_keep_their_own_names(tmp_path: Path) -> None:
    source = Conversions(tmp_path, "speculators", record_id="talk-1")
    assert source.run("modelopt") == 0
    data = torch.load(tmp_path / "converted-out" / "1.pt", weights_only=True)
    assert (data["conversation_id"], data["ctl"]["record_id"]) == ("talk-1", "talk-1")
    lines = read_lines(str(tmp_path / "converted" / "ledger" / "rank-0.jsonl"))
    assert [line["record_id"] for line in lines] == ["talk-1"] * len(LENGTHS)


def test_a_norm_that_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    write_model(tmp_path, kind="gemma3_text")
    with pytest.raises(ConfigError, match="not known to be a plain RMS norm"):
        load_final_norm(str(tmp_path))


def test_a_damaged_sample_stops_the_conversion_and_is_named(tmp_path: Path) -> None:
    source = Conversions(tmp_path, "speculators")
    path = source.source / "hs_1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CaptureError, match=r"sample 1: it has \d+ bytes, its header promises"):
        source.run("modelopt")
    (event,) = [e for e in read_lines(str(tmp_path / "converted/events/driver.jsonl")) if e["type"] == "exception"]
    assert "sample 1: " in event["message"]
    assert source.run("modelopt", verify=True) == 1


def test_the_verify_step_finds_a_file_that_was_changed(tmp_path: Path) -> None:
    source = Conversions(tmp_path, "speculators")
    assert source.run("modelopt") == 0
    path = tmp_path / "converted-out" / "3.pt"
    path.write_bytes(path.read_bytes()[:-20])
    assert source.run("modelopt", verify=True) == 1
    document = read_json(str(tmp_path / "converted" / "verify.json"))
    assert document is not None
    assert document["samples"]["failed"] == 1
    assert LAYERS in document["boundaries"]
    assert format_named("modelopt").final_norm

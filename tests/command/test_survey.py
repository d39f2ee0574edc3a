"""What a command wrote, as its verify step finds it: real files of every kind, good and bad ones."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import consumers
from support.commandhost import CommandHost

from remote_payload.survey import __main__ as survey
from remote_payload.survey import child

RUN_ID = "20260102-030405-abcdef"


@pytest.fixture(scope="module")
def arrow() -> Iterator[None]:
    """pyarrow, also for the child that reads."""
    path = str(consumers.install("columns"))
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(path)
    patch.setenv("PYTHONPATH", path)
    yield
    patch.undo()


def look(*paths: Path, sample: int = 16, **expect: Any) -> dict[str, Any]:
    return survey.survey(
        {"paths": [str(path) for path in paths], "files": [], "sample_files": sample, "expect": expect}, RUN_ID
    )


def codes(found: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in found["problems"]]


def test_equal_files_are_counted_together_and_lengths_are_ranges(tmp_path: Path) -> None:
    for index, tokens in enumerate((7, 512, 30)):
        states = [torch.zeros(tokens, 16, dtype=torch.bfloat16) for _ in range(4)]
        torch.save(
            {"input_ids": torch.arange(tokens), "hidden_states": states, "loss_mask": torch.ones(tokens)},
            tmp_path / f"data_{index}.pt",
        )
        save_file({"hidden_states": torch.zeros(tokens, 4, 8)}, tmp_path / f"hs_{index}.safetensors")
    (tmp_path / ".hidden.pt").write_text("never looked at")
    (tmp_path / "notes.txt").write_text("another kind")
    found = look(tmp_path)
    assert found["problems"] == []
    groups = {group["kind"]: group for group in found["survey"]["groups"]}
    assert groups["torch"]["files"] == groups["safetensors"]["files"] == 3
    rows = {row["name"]: row for row in groups["torch"]["tensors"]}
    assert rows["hidden_states[*]"] == {
        "name": "hidden_states[*]", "dtype": "bfloat16", "shape": [[7, 512], 16], "count": 12, "shapes": 3,
    }  # fmt: skip
    assert (rows["input_ids"]["dtype"], rows["input_ids"]["shape"]) == ("int64", [[7, 512]])
    assert groups["safetensors"]["tensors"][0]["shape"] == [[7, 512], 4, 8]
    assert (found["survey"]["files"], found["survey"]["other_files"]) == (7, 1)
    assert len(json.dumps(found)) < 4000


def test_npy_parquet_and_jsonl(tmp_path: Path, arrow: None) -> None:
    import pyarrow
    import pyarrow.parquet

    np.save(tmp_path / "d2t.npy", np.array([[1.0, np.nan, np.inf]], dtype=np.float32))
    table = pyarrow.table({"id": [1, 2, 3], "score": [0.5, float("nan"), None]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "chat.jsonl").write_text('{"id": 1, "loss": 0.5}\n\n{"id": "x", "loss": NaN}\n')
    found = look(tmp_path)["survey"]
    groups = {group["kind"]: group for group in found["groups"]}
    assert groups["npy"]["tensors"][0]["dtype"] == "float32"
    assert groups["npy"]["tensors"][0]["shape"] == [1, 3]
    assert groups["parquet"]["records"] == 3
    assert [(row["name"], row["dtype"]) for row in groups["parquet"]["tensors"]] == [
        ("id", "int64"),
        ("score", "double"),
    ]
    assert groups["jsonl"]["records"] == 2
    assert [row["dtype"] for row in groups["jsonl"]["tensors"]] == ["int or str", "float"]
    assert (found["nan"]["nan"], found["nan"]["inf"], found["records"]) == (3, 1, 5)


def test_nan_is_found_by_the_bits_of_every_float(tmp_path: Path) -> None:
    values = torch.tensor([1.0, float("nan"), -2.0, float("-nan"), 0.0, float("inf")])
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
    for number, dtype in enumerate(kinds):
        save_file({"x": values.to(dtype)}, tmp_path / f"{number}.safetensors")
        torch.save({"x": values.to(dtype)}, tmp_path / f"{number}.pt")
    found = look(tmp_path)["survey"]["nan"]
    nan = sum(int(values.to(dtype).float().isnan().sum()) for dtype in kinds)
    inf = sum(int(values.to(dtype).float().isinf().sum()) for dtype in kinds)
    assert nan > 2 * len(kinds) - 1
    assert (found["nan"], found["inf"]) == (2 * nan, 2 * inf)
    assert (found["files"], found["of_files"], found["values"]) == (12, 12, 72)


def test_nan_is_looked_for_in_a_stated_sample(tmp_path: Path) -> None:
    for index in range(20):
        value = float("nan") if index in (1, 19) else 1.0
        save_file({"x": torch.full((2,), value)}, tmp_path / f"f_{index:02}.safetensors")
    nan = look(tmp_path, sample=4, nan=0)
    assert nan["survey"]["nan"]["files"] == 4
    assert nan["survey"]["nan"]["of_files"] == 20
    assert nan["survey"]["nan"]["nan"] == 2, "the last is always in the sample"
    assert nan["survey"]["nan"]["first"].endswith("f_19.safetensors")
    assert codes(nan) == ["expect-nan"]


class Harm:
    def __reduce__(self) -> Any:
        return (Path.write_text, (Path(sys.argv[0]).parent / "harmed", "x"))


def test_bad_files_are_named_and_run_nothing(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(100)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-1])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    torch.save({"x": torch.zeros(1000)}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:900])
    (tmp_path / "half.jsonl").write_text('{"a": 1}\n{"a"\n')
    (tmp_path / "not.npy").write_text("text")
    found = look(tmp_path)
    assert codes(found) == ["damaged-files"]
    damaged = {Path(each["path"]).name for each in found["survey"]["damaged"]}
    assert damaged == {"cut.safetensors", "empty.safetensors", "cut.pt", "half.jsonl", "not.npy"}

    other = tmp_path / "other"
    other.mkdir()
    (other / "harm.pt").write_bytes(pickle.dumps(Harm()))
    torch.save({"optimizer": Harm()}, other / "optimizer.pt")
    found = look(other)
    assert found["problems"] == []
    assert (found["survey"]["unread"][0]["kind"], found["survey"]["unread"][0]["files"]) == ("torch", 2)
    assert "only its own program may load" in found["survey"]["unread"][0]["why"]
    assert not (Path(sys.argv[0]).parent / "harmed").exists()


def test_a_file_that_takes_all_memory_or_time_costs_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.jsonl").write_text('{"a": "' + "x" * (64 << 20) + '"}\n')
    (tmp_path / "good.jsonl").write_text("{}\n")
    (tmp_path / "bomb.jsonl").write_text("[" * 100_000 + "\n")
    os.mkfifo(tmp_path / "hangs.jsonl")  # reading it never ends, like a disk that hangs
    with child.Reader() as reader:
        assert "facts" in reader.ask(str(tmp_path / "good.jsonl"), nan=True)
        assert "damaged" in reader.ask(str(tmp_path / "bomb.jsonl"), nan=True)
        monkeypatch.setattr(child, "START_S", 1.0)
        assert "killed its reader" in reader.ask(str(tmp_path / "hangs.jsonl"), nan=True)["damaged"]
        monkeypatch.undo()
        assert "facts" in reader.ask(str(tmp_path / "good.jsonl"), nan=True)


@pytest.mark.parametrize(
    ("expect", "problems"),
    [
        ({"files": 2, "bytes": {"min": 100}, "nan": 0}, []),
        ({"files": 3}, ["expect-files"]),
        ({"files": {"max": 1}}, ["expect-files"]),
        ({"records": {"min": 1}}, ["expect-records"]),
        ({"tensors": {"states": {"dtype": "float32", "shape": ["*", 4]}}}, []),
        ({"tensors": {"states": {"dtype": "bfloat16"}}}, ["expect-dtype"]),
        ({"tensors": {"states": {"shape": ["*", 5]}}}, ["expect-shape"]),
        ({"tensors": {"states": {"shape": [3, 4]}}}, ["expect-shape"]),
        ({"tensors": {"states": {"shape": ["*"]}}}, ["expect-shape"]),
        ({"tensors": {"other": {}}}, ["expect-tensor"]),
    ],
)
def test_what_is_expected(tmp_path: Path, expect: dict[str, Any], problems: list[str]) -> None:
    for tokens in (3, 9):
        save_file({"states": torch.zeros(tokens, 4)}, tmp_path / f"{tokens}.safetensors")
    assert codes(look(tmp_path, **expect)) == problems


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python without numpy, torch or pyarrow, for the child that reads."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    executable = str(tmp_path / "bare/bin/python")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", executable)
    return executable


def test_values_that_nothing_can_look_at_satisfy_no_expectation(tmp_path: Path, bare: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_file({"x": torch.tensor([float("nan")])}, out / "a.safetensors")
    found = look(out, nan=0)
    assert codes(found) == ["expect-nan"]
    assert found["problems"][0]["what"] == f"nan: not looked at: in 1 file: no numpy in {bare}"
    assert found["survey"]["unread"] == [
        {"kind": "safetensors", "files": 1, "why": f"values not looked at: no numpy in {bare}"}
    ]
    assert codes(look(out, nan={"max": 5})) == ["expect-nan"]
    assert codes(look(out, files=1, tensors={"x": {"dtype": "float32"}})) == [], "its header says these"


@pytest.mark.parametrize("expect", [{"nan": 0}, {"records": {"max": 9}}, {"tensors": {"x": {"dtype": "float32"}}}])
def test_files_that_nothing_can_read_satisfy_no_expectation(
    tmp_path: Path, bare: str, expect: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_file({"x": torch.zeros(3)}, out / "a.safetensors")
    np.save(out / "x.npy", np.zeros(3))
    (out / "x.parquet").write_bytes(b"PAR1")
    found = look(out, **expect)
    (name,) = expect
    assert f"expect-{name.removesuffix('s') if name == 'tensors' else name}" in codes(found)
    assert "not looked at" in found["problems"][0]["what"]
    assert bare in found["problems"][0]["what"]
    assert {row["kind"] for row in found["survey"]["unread"]} == {"npy", "parquet", "safetensors"}
    assert found["survey"]["nan"]["of_files"] == 3
    size = sum(path.stat().st_size for path in out.iterdir())
    assert codes(look(out, files=3, bytes={"min": size, "max": size})) == [], "what needs no reading is known"


@pytest.mark.parametrize("expect", [{"nan": 0}, {"records": {"max": 9}}])
def test_nothing_satisfies_no_expectation(tmp_path: Path, expect: dict[str, Any]) -> None:
    assert codes(look(tmp_path, **expect)) == [f"expect-{next(iter(expect))}"], "an empty folder"
    save_file({"ids": torch.arange(3)}, tmp_path / "ids.safetensors")
    assert codes(look(tmp_path, **expect)) == [f"expect-{next(iter(expect))}"], "neither floats nor records"
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n')
    assert codes(look(tmp_path, **expect)) == []


def test_nan_hides_neither_in_complex_numbers_nor_in_nested_columns(tmp_path: Path, arrow: None) -> None:
    import pyarrow
    import pyarrow.parquet

    bad = torch.tensor([complex(1, float("nan"))])
    save_file({"x": bad}, tmp_path / "a.safetensors")
    torch.save({"x": bad}, tmp_path / "a.pt")
    rows = pyarrow.table({"states": [[[1.0], [float("nan")]], []], "part": [{"loss": float("nan")}, {"loss": 1.0}]})
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    assert look(tmp_path)["survey"]["nan"]["nan"] == 4

    other = tmp_path / "other"
    other.mkdir()
    torch.save({"x": torch.zeros(2).to_sparse()}, other / "sparse.pt")
    np.save(other / "named.npy", np.zeros(2, dtype=[("loss", "f4")]))
    found = look(other, nan=0)
    assert codes(found) == ["expect-nan"]
    assert {row["kind"] for row in found["survey"]["unread"]} == {"torch", "npy"}


def test_the_verify_step_fails_a_run_that_lacks_what_it_promised(host: CommandHost) -> None:
    text = (
        'argv = ["{python}", "-c", "import sys; open(sys.argv[1] + \'/a.jsonl\', \'w\').write(\'{}\')", "{output}"]\n'
        f'outputs = [{{ path = "{host.outputs}/o", stale = "clear" }}]\n'
        "success = { files = ['{output}/*.jsonl', '{output}/b.jsonl'] }\nsummary = { expect = { records = 2 } }\n"
    )
    started = time.monotonic()
    ended = host.finish(host.playbook(text))
    assert ended["end_reason"] == "verify-failed", time.monotonic() - started
    problems = [problem["code"] for problem in ended["summary"]["problems"]]
    assert problems == ["missing-file", "expect-records", "verify-failed"]
    assert ended["summary"]["problems"][0]["what"] == f"{host.outputs}/o/b.jsonl was not written"
    assert f"`ctl logs {ended['run_id']} --tail 50`" in ended["summary"]["problems"][0]["fix"]
    assert ended["summary"]["survey"]["groups"][0]["example"] == "a.jsonl"

"""Every format: inspected as written, refused when cut or changed; nothing that a file holds is ever executed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.samples import from_fp8, make_sample

from remote_payload.extract import arrow
from remote_payload.extract.formats import NAMES, HalfFileError, format_named, why_unfit
from remote_payload.extract.quantize import to_fp8
from remote_payload.extract.spill import Spill
from remote_payload.host.layout import WRITTEN_PATHS

CASES = [*((form, False) for form in NAMES), ("speculators", True)]


@pytest.mark.parametrize(("form", "fp8"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_file_is_inspected_and_read_as_it_was_written(
    tmp_path: Path, form: str, fp8: bool, dtype: torch.dtype
) -> None:
    made = make_sample(tmp_path, form, 5, 7, dtype=dtype, fp8=fp8)
    layout, path = format_named(form), str(tmp_path / made.line["file"])
    facts = layout.inspect(path)
    assert facts.shape == (7, 4, 16)
    assert facts.token_sha256 == made.line["token_sha256"]
    assert facts.bytes == os.path.getsize(path) == made.line["bytes"]
    assert facts.metadata["boundaries"] == "[2, 4, 5, 8]"
    sample = layout.read(path)
    assert (sample.shape, sample.dtype, list(sample.loss_mask)) == (facts.shape, facts.dtype, made.mask)
    if fp8:
        assert sample.scales is not None
        values = torch.frombuffer(sample.hidden, dtype=torch.float8_e4m3fn).view(sample.shape)
        states = from_fp8(values, torch.frombuffer(sample.scales, dtype=torch.float32), torch.float32)
        torch.testing.assert_close(states, made.states.float(), rtol=0.07, atol=0.01)
    else:
        assert bytes(sample.hidden) == made.states.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("form", "fp8"), CASES)
def test_a_file_cut_anywhere_is_no_file(tmp_path: Path, form: str, fp8: bool) -> None:
    made = make_sample(tmp_path, form, 0, 3, fp8=fp8)
    path = tmp_path / made.line["file"]
    whole = path.read_bytes()
    for length in [0, 7, 8, len(whole) // 3, len(whole) // 2, len(whole) - 30, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(HalfFileError):
            format_named(form).inspect(str(path))
    path.write_bytes(whole + b"\0")
    if form == "speculators":
        with pytest.raises(HalfFileError):
            format_named(form).inspect(str(path))
    with pytest.raises(FileNotFoundError):
        format_named(form).inspect(str(tmp_path / "absent"))


@pytest.mark.parametrize("form", [form for form in NAMES if form != "speculators"])
def test_a_changed_byte_of_a_torch_file_is_noticed_where_it_is_read(tmp_path: Path, form: str) -> None:
    made = make_sample(tmp_path, form, 0, 3)
    path = tmp_path / made.line["file"]
    data = bytearray(path.read_bytes())
    place = data.find(struct.pack("<q", made.ids[1]))
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(HalfFileError, match="CRC"):
        format_named(form).inspect(str(path))


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


def test_code_in_a_torch_file_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "data_0.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data_0/data.pkl", pickle.dumps({"input_ids": Harmful()}))
    with pytest.raises(HalfFileError, match=r"posix\.system"):
        format_named("speculators-0.3").inspect(str(path))
    buffer = io.BytesIO()
    torch.save({"input_ids": torch.zeros(3), "extra": Path("x")}, buffer)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(HalfFileError, match="pathlib"):
        format_named("speculators-0.3").inspect(str(path))


def test_another_dict_of_tensors_is_no_sample(tmp_path: Path) -> None:
    torch.save({"input_ids": torch.zeros(3, dtype=torch.int64)}, tmp_path / "data_0.pt")
    for form in NAMES[1:]:
        with pytest.raises(HalfFileError, match="no whole sample"):
            format_named(form).inspect(str(tmp_path / "data_0.pt"))


def test_a_head_can_be_made_to_fit(tmp_path: Path) -> None:
    """A long sample's rows are written before its head is known."""
    layout = format_named("speculators")
    made = make_sample(tmp_path, "speculators", 0, 3)
    path = tmp_path / made.line["file"]
    sample = layout.read(str(path))
    assert layout.head is not None
    assert layout.head(sample, 64) is None
    head = layout.head(sample, 4096)
    assert head is not None
    path.write_bytes(head + bytes(sample.hidden) + sample.token_ids)
    assert layout.inspect(str(path)).token_sha256 == made.line["token_sha256"]


@pytest.mark.parametrize(
    ("form", "facts", "words"),
    [
        ("specforge", {"final_norm": False}, "expect the last state after the final norm"),
        ("speculators-0.3", {"final_norm": True}, "expect the last state before the final norm"),
        ("modelopt", {"boundaries": [2, 4]}, "needs the model's last boundary"),
        ("specforge", {"dtype": "F8_E4M3", "final_norm": True}, "has no F8_E4M3"),
        ("modelopt", {"final_norm": False}, None),
        ("speculators", {"boundaries": [0, 3], "final_norm": False}, None),
        ("speculators", {"dtype": "F8_E4M3"}, None),
    ],
)
def test_states_that_consumers_would_misread_are_unfit(form: str, facts: dict[str, Any], words: str | None) -> None:
    facts = {"boundaries": [2, 4, 8], "layers": 8, "final_norm": True, "dtype": "BF16", **facts}
    reason = why_unfit(format_named(form), **facts)
    assert (words in reason) if words and reason else (words is reason)


def test_fp8_keeps_zeros_and_the_largest_value() -> None:
    states = torch.zeros(3, 2, 8)
    states[1, 0, 3], states[2] = 1e30, torch.linspace(-5, 5, 16).view(2, 8)
    values, scales = to_fp8(states)
    assert scales.shape == (3,)
    restored = from_fp8(values, scales, torch.float32)
    assert restored[0].eq(0).all()
    torch.testing.assert_close(restored[1, 0, 3], states[1, 0, 3])
    torch.testing.assert_close(restored[2], states[2], rtol=0.07, atol=0.02)


@pytest.mark.parametrize("form", NAMES)
def test_every_path_that_is_written_is_known_as_ours(tmp_path: Path, form: str) -> None:
    """What is not would be left by every clear, as somebody else's."""
    layout = format_named(form)
    for index in (0, 7, 123_456):
        make_sample(tmp_path, form, index, 3)
        spill = Spill(str(tmp_path), layout, index, 3, 4, 8)
        spill.write(0, 0, memoryview(bytes(8)))  # half-written, as a killed run leaves it
    for name in arrow.FILES:
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert len(found) >= 6 + len(arrow.FILES)
    assert [path for path in found if not WRITTEN_PATHS.fullmatch(path)] == []

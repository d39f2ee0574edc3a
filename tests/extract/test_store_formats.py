"""The store with formats and dtypes that need more than rows: masks, scales, folders of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.samples import from_fp8

from remote_payload.extract.admission import SAMPLE_OVERHEAD_BYTES, SPAN_BYTES, Room
from remote_payload.extract.dataset import Sample
from remote_payload.extract.formats import SCALE_BYTES, format_named
from remote_payload.extract.quantize import ROWS, to_fp8
from remote_payload.extract.store import SampleStore
from remote_payload.host.files import read_lines
from remote_payload.host.framing import file_digest
from remote_payload.host.journal import Journal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 8


def make_store(folder: Path, form: str, dtype: torch.dtype, **options: Any) -> SampleStore:
    def metadata(buffer: Any, states: Any, digest: str) -> dict[str, str]:
        told = {"index": str(buffer.index), "states": json.dumps(states), "final_norm": "true"}
        return told if buffer.loss_spans is None else {**told, "loss_spans": json.dumps(buffer.loss_spans)}

    return SampleStore(
        output=str(folder / "out"), form=format_named(form), boundaries=(2, 4), hidden=HIDDEN, dtype=dtype,
        device=DEVICE, ledgers=[Journal(str(folder / "rank-0.jsonl"))], metadata=metadata,
        **options,
    )  # fmt: skip


def write(store: SampleStore, index: int, spans: list[list[int]] | None) -> torch.Tensor:
    """Write a sample of three tokens in two steps, and return its states."""
    states = torch.randn(3, 2, HIDDEN, device=DEVICE)
    buffer = store.open(index, [7, 8, 9], spans)
    for start, count in ((0, 2), (2, 1)):
        block = store.block(list(states.unbind(1)), [(start, count)])
        store.copy(block, [(buffer, start, count)])
    store.finish(buffer)
    store.drain()
    return states.cpu()


def test_scales_follow_their_rows_over_several_steps(tmp_path: Path) -> None:
    store = make_store(tmp_path, "speculators", torch.float8_e4m3fn)
    states = write(store, 5, None)
    found = load_file(tmp_path / "out" / "hs_5.safetensors")
    restored = from_fp8(found["hidden_states"], found["hidden_states_scales"][:, 0, 0], torch.float32)
    torch.testing.assert_close(restored, states, rtol=0.07, atol=0.02)
    (line,) = read_lines(str(tmp_path / "rank-0.jsonl"))
    # Measured before they were rounded.
    assert line["states"][0]["norm_mean"] == pytest.approx(float(states[:, 0].norm(dim=-1).mean()), rel=1e-5)


@pytest.mark.parametrize(("spans", "mask"), [([[1, 2]], [0, 1, 0]), (None, [1, 1, 1])])
@pytest.mark.parametrize("form", ["speculators-0.3", "specforge", "modelopt"])
def test_the_mask_is_stored_where_the_format_has_one(tmp_path: Path, form: str, spans: Any, mask: list[int]) -> None:
    store = make_store(tmp_path, form, torch.float32)
    states = write(store, 2001, spans)
    (line,) = read_lines(str(tmp_path / "rank-0.jsonl"))
    sample = format_named(form).read(str(tmp_path / "out" / line["file"]))
    assert list(sample.loss_mask) == mask
    assert bytes(sample.hidden) == states.numpy().tobytes()


@pytest.mark.parametrize("form", ["speculators", "speculators-0.3", "specforge", "modelopt"])
def test_a_sample_larger_than_the_pool_is_streamed_in_every_format(tmp_path: Path, form: str) -> None:
    fp8 = form == "speculators"  # its scales make it the one file with a head that cannot go before the rows
    row = 2 * HIDDEN * (1 if fp8 else 4)
    store = make_store(tmp_path, form, torch.float8_e4m3fn if fp8 else torch.float32, buffer_bytes=16 * row)
    states = torch.randn(100, 2, HIDDEN, device=DEVICE)
    buffer = store.open(2001, list(range(100)), [[1, 3]])
    assert buffer is not None
    for start, end in ((0, 33), (33, 100)):
        block = store.block(list(states.unbind(1)), [(start, end - start)])
        assert store.copy(block, [(buffer, start, end - start)]) == []
    store.finish(buffer)
    store.drain()
    assert store.pool.peak <= 16 * row
    (line,) = read_lines(str(tmp_path / "rank-0.jsonl"))
    path = tmp_path / "out" / line["file"]
    sample = format_named(form).read(str(path))
    assert (line["bytes"], line["sha256"]) == (path.stat().st_size, file_digest(str(path)))
    assert sample.token_ids == torch.arange(100).numpy().tobytes()
    assert [file.name for file in (tmp_path / "out").rglob("*") if file.is_file()] == [path.name]
    if fp8:
        found = load_file(path)
        restored = from_fp8(found["hidden_states"], found["hidden_states_scales"][:, 0, 0], torch.float32)
        torch.testing.assert_close(restored, states.cpu(), rtol=0.07, atol=0.02)
    else:
        assert bytes(sample.hidden) == states.cpu().numpy().tobytes()
        assert list(sample.loss_mask) == [0, 1, 1, *[0] * 97]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("form", "fp8"),
    [
        ("speculators", False),
        ("speculators", True),
        ("speculators-0.3", False),
        ("specforge", False),
        ("modelopt", False),
    ],
)
def test_a_file_takes_no_more_than_is_reserved_for_it(tmp_path: Path, form: str, fp8: bool, streamed: bool) -> None:
    """Every second token counts, which makes the longest description; streamed rows lie on the disk twice where
    the file's head cannot go before them."""
    tokens, dtype = 3000, torch.float8_e4m3fn if fp8 else torch.float32
    row = 2 * HIDDEN * dtype.itemsize
    buffer_bytes = 16 * row if streamed else 2 * tokens * row
    store = make_store(tmp_path, form, dtype, buffer_bytes=buffer_bytes)
    sample = Sample(index=3, token_ids=list(range(tokens)), loss_mask=b"\0\1" * (tokens // 2))
    buffer = store.open(sample.index, sample.token_ids, sample.loss_spans())
    assert buffer is not None
    assert (buffer.spill is not None) == streamed
    states = torch.randn(tokens, 2, HIDDEN, device=DEVICE)
    assert store.copy(store.block(list(states.unbind(1)), [(0, tokens)]), [(buffer, 0, tokens)]) == []
    store.finish(buffer)
    store.drain()
    (line,) = read_lines(str(tmp_path / "rank-0.jsonl"))
    shape = format_named(form)
    room = Room(
        output=str(tmp_path), ranks=1, row_bytes=store.row_bytes, buffer_bytes=buffer_bytes,
        side_bytes=shape.side_bytes + (SCALE_BYTES if fp8 else 0), rewrites=shape.head is None or fp8,
    )  # fmt: skip
    twice = tokens * row if streamed and room.rewrites else 0
    assert line["bytes"] + twice <= room.file_bytes(sample)
    assert room.file_bytes(sample) <= line["bytes"] + twice + SAMPLE_OVERHEAD_BYTES + tokens * SPAN_BYTES


def test_quantising_in_pieces_changes_nothing() -> None:
    states = torch.randn(2 * ROWS + 3, 1, HIDDEN)
    values, scales = to_fp8(states)
    last, last_scale = to_fp8(states[-3:])
    assert values[-3:].view(torch.uint8).equal(last.view(torch.uint8))
    assert scales[-3:].equal(last_scale)

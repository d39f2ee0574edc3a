"""A log that grows, in segments, with a gap: every byte once, every line with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller import logreader
from controller.logreader import LogReader
from controller.runfolder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "log").mkdir()
    return RunFolder(tmp_path)


def write(folder: RunFolder, segment: int, data: bytes) -> None:
    with open(folder.path / "log" / f"{segment:06d}.log", "ab") as stream:
        stream.write(data)


def test_lines_have_their_places_also_over_the_border_of_segments(folder: RunFolder) -> None:
    write(folder, 1, b"one\ntw")
    write(folder, 2, b"o\nthree\n")
    assert list(LogReader(folder).lines()) == [((1, 0), b"one\n"), ((1, 4), b"two\n"), ((2, 2), b"three\n")]


def test_what_was_read_is_not_read_again_and_an_unfinished_line_waits(folder: RunFolder) -> None:
    reader = LogReader(folder)
    write(folder, 1, b"one\nhal")
    assert list(reader.lines()) == [((1, 0), b"one\n")]
    write(folder, 1, b"f\n")
    assert list(reader.lines()) == [((1, 4), b"half\n")]
    assert list(reader.unfinished()) == []
    write(folder, 1, b"no end")
    assert list(reader.lines()) == []
    assert list(reader.unfinished()) == [((1, 9), b"no end")]


def test_a_progress_bar_is_one_line(folder: RunFolder) -> None:
    write(folder, 1, b"10 %\r20 %\r\n")
    assert [line for _, line in LogReader(folder).lines()] == [b"10 %\r20 %\r\n"]


def test_a_log_without_line_ends_is_not_held_whole(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logreader, "BLOCK_BYTES", 100)
    monkeypatch.setattr(logreader, "LONGEST_LINE_BYTES", 250)
    write(folder, 1, b"x" * 1000 + b"\nshort\n")
    lines = list(LogReader(folder).lines())
    assert [(place, len(line)) for place, line in lines] == [
        ((1, 0), 300), ((1, 300), 300), ((1, 600), 300), ((1, 900), 101), ((1, 1001), 6),
    ]  # fmt: skip
    assert b"".join(line for _, line in lines) == b"x" * 1000 + b"\nshort\n"


def test_reading_stops_at_the_sizes_that_were_seen(folder: RunFolder) -> None:
    reader = LogReader(folder)
    write(folder, 1, b"one\n")
    seen = reader.sizes()
    write(folder, 1, b"two\n")
    assert b"".join(data for _, data in reader.pieces(seen)) == b"one\n"
    assert b"".join(data for _, data in reader.pieces()) == b"two\n"


def test_missing_bytes_are_told_once_in_their_place(folder: RunFolder) -> None:
    write(folder, 1, b"before\n")
    write(folder, 3, b"after\n")
    gap = {"segment": 2, "bytes": 99, "sha256": "0" * 64}
    (folder.path / "log" / "gaps.jsonl").write_text(json.dumps(gap) + "\n")
    reader = LogReader(folder)
    places = [(place, line) for place, line in reader.lines()]
    assert [place for place, _ in places] == [(1, 0), None, (3, 0)]
    assert b"99 bytes" in places[1][1]
    assert list(reader.lines()) == []

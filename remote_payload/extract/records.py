"""Data sets on disk to records: JSONL, a JSON array, Parquet files, and folders that `datasets` wrote (Arrow).

Which of them it is, is read from the contents, never from the name. A record's `line` is its line in a text file,
its row (from 1) in the others. A record that cannot be read is still a record, with the reason in place of a value,
so that whoever counts loses none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from remote_payload.extract.settings import ConfigError
from remote_payload.host.broken import Faults
from remote_payload.host.codes import BLANK
from remote_payload.host.textdata import LINE_LIMIT, Fault, lists_of_records, parse_record, text_container

PARQUET_MAGIC = b"PAR1"
ARROW_FILE_MAGIC = b"ARROW1"

ROWS = 256
"""Rows of a column store turned into Python objects at a time."""


class Malformed(Exception):
    """A record that is skipped. `code` is stable, `why` is for a person."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`value` is the record's object, or the reason why there is none."""

    line: int
    value: dict[str, Any] | Malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A data set that can be read: `container` is "jsonl", "json", "parquet" or "arrow".

    `blank` has the blank lines, which are no records, of what was read; it is to be read once.
    """

    container: str
    records: Callable[[], Iterator[Record]]
    blank: Faults = field(default_factory=Faults)


def open_source(path: str) -> Source:
    """Find out what `path` holds. Raises ConfigError if it cannot be read or is none of the kinds."""
    try:
        if os.path.isdir(path):
            return _folder(path)
        with open(path, "rb") as file:
            start = file.read(len(ARROW_FILE_MAGIC))
    except OSError as error:
        raise ConfigError(f"cannot read the data set {path}: {error.strerror}") from error
    if start.startswith(PARQUET_MAGIC):
        return Source(container="parquet", records=lambda: _parquet([path]))
    if start.startswith(ARROW_FILE_MAGIC):
        raise ConfigError(f"{path} is a single Arrow file: name the folder that `save_to_disk` wrote")
    if text_container(path) == "json":
        return Source(container="json", records=lambda: _json_array(path))
    blank = Faults()
    return Source(container="jsonl", records=lambda: _json_lines(path, blank), blank=blank)


# ------------------------------------------------------------------------------------------------ text


def _json_lines(path: str, blank: Faults) -> Iterator[Record]:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(LINE_LIMIT + 1):
            number += 1
            if len(line) > LINE_LIMIT:
                while line and not line.endswith(b"\n"):
                    line = file.readline(LINE_LIMIT)
                yield Record(line=number, value=Malformed("over-long", f"the line is longer than {LINE_LIMIT} bytes"))
            elif line.strip():
                found = parse_record(line)
                yield Record(line=number, value=Malformed(*found) if isinstance(found, Fault) else found)
            else:
                blank.add(number, Fault(BLANK, ""))


def _json_array(path: str) -> Iterator[Record]:
    """Yield the elements of an array, or of the one array of objects inside an object. Raises ConfigError.

    A syntax error spoils everything after it, so it is the data set's, not a record's.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from error
    decoder, place = json.JSONDecoder(), _skip_space(text, 0)
    if text[place] == "{":
        place = _only_array(path, text)
    place, line, counted = _skip_space(text, place + 1), 1, 0
    while place < len(text) and text[place] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON in the record at line {line}: {error}") from error
        found = value if isinstance(value, dict) else Malformed("malformed", "not a JSON object")
        yield Record(line=line, value=found)
        place = _skip_space(text, end)
        if place < len(text) and text[place] == ",":
            place = _skip_space(text, place + 1)
        elif place >= len(text) or text[place] != "]":
            raise ConfigError(f"{path} is not JSON after the record at line {line}: an array goes on or ends there")
    if place >= len(text):
        raise ConfigError(f"{path} is cut off: its array does not end")
    if text[place + 1 :].strip(" \t\r\n}") and text.lstrip().startswith("["):
        raise ConfigError(f"{path} goes on after its array")


def _only_array(path: str, text: str) -> int:
    """Return where the only list of objects in a JSON object begins, as in {"version": 1, "data": [...]}."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    lists = lists_of_records(document)
    if len(lists) != 1:
        raise ConfigError(f"{path} is one JSON object with {len(lists)} lists of records: one is needed")
    decoder, place = json.JSONDecoder(), _skip_space(text, 0) + 1
    while True:  # over the keys of the object itself: an inner one may have the same name
        key, place = decoder.raw_decode(text, _skip_space(text, place))
        place = _skip_space(text, _skip_space(text, place) + 1)  # the colon
        if key == lists[0]:
            return place
        _, place = decoder.raw_decode(text, place)
        place = _skip_space(text, place) + 1  # the comma: the key is yet to come


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


# ------------------------------------------------------------------------------------------- column stores


def _folder(path: str) -> Source:
    names = sorted(os.listdir(path))
    if "dataset_dict.json" in names:
        splits = [name for name in names if os.path.isdir(os.path.join(path, name))]
        raise ConfigError(f"{path} holds several data sets: name one of {', '.join(splits)} below it")
    if "state.json" in names:
        return Source(container="arrow", records=lambda: _arrow(path))
    parquet = [os.path.join(path, name) for name in names if name.endswith(".parquet")]
    if parquet:
        return Source(container="parquet", records=lambda: _parquet(parquet))
    raise ConfigError(f"{path} is a folder with neither state.json (of `save_to_disk`) nor .parquet files")


def _parquet(paths: list[str]) -> Iterator[Record]:
    require_pyarrow("a Parquet data set")
    import pyarrow
    import pyarrow.parquet

    number = 0
    for path in paths:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(ROWS):
                    for record in _rows(batch, number):
                        number += 1
                        yield record
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ConfigError(f"cannot read the Parquet file {path} after row {number}: {error}") from error


def _arrow(path: str) -> Iterator[Record]:
    require_pyarrow("an Arrow data set")
    import pyarrow

    with open(os.path.join(path, "state.json"), "rb") as file:
        state = json.load(file)
    if any(name.startswith("indices") for name in os.listdir(path)):
        raise ConfigError(
            f"{path} is a view with reordered rows: write it again with `flatten_indices().save_to_disk`"
        )
    number = 0
    for name in (entry["filename"] for entry in state["_data_files"]):
        part = os.path.join(path, os.path.basename(name))
        try:
            with pyarrow.memory_map(part) as mapped, pyarrow.ipc.open_stream(mapped) as reader:
                for batch in reader:
                    for start in range(0, batch.num_rows, ROWS):
                        for record in _rows(batch.slice(start, ROWS), number):
                            number += 1
                            yield record
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ConfigError(f"cannot read the Arrow file {part} after row {number}: {error}") from error


def _rows(batch: Any, before: int) -> Iterator[Record]:
    for row, value in enumerate(batch.to_pylist(), before + 1):
        yield Record(line=row, value=value)


def require_pyarrow(what: str) -> None:
    """Raise ConfigError, saying what needs it, if the host's environment has no pyarrow."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what} needs pyarrow in the host's environment: `python -m pip install pyarrow` there, or use JSONL"
        ) from error

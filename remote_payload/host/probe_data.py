"""The `data` section: what a data set is, by its contents, and how long its records are, without a tokenizer."""

from __future__ import annotations

import json
import os
import struct
from typing import Any, Dict, Iterable, List, Tuple

from remote_payload.host.sections import Note
from remote_payload.host.textdata import FIRST_BYTES, first_records, text_container

CONFIG_LIMIT = 1 << 24
COUNT_LIMIT = 1 << 28
"""256 MiB: the lines of a larger file are not counted; that would take longer than the rest of the probe."""

MAX_NAMED = 20

PARQUET_MAGIC = b"PAR1"

KNOWN_COLUMNS = ("conversations", "input_ids", "loss_mask", "messages", "tools")


def probe_data(note: Note, path: str) -> Dict[str, Any]:
    """Return {"path", "exists", "bytes", "lines", "counted", "container", "kind", "keys"}.

    `container` is "jsonl", "json", "parquet" or "arrow", by contents; "" for a folder that is none. `kind` is
    "tokens", "chat" or "unknown", by the first record that is either, or the columns; `keys` are that record's, else
    those of the very first. `lines` is exact if `counted`, else (a large file) estimated from its beginning; null
    where there are none to count.
    """
    note(path)
    answer: Dict[str, Any] = {
        "path": path, "exists": os.path.exists(path), "bytes": 0, "lines": None, "counted": False, "container": "",
        "kind": "unknown", "keys": [],
    }  # fmt: skip
    if os.path.isdir(path):
        _probe_folder(path, answer)
    if not os.path.isfile(path):
        return answer
    size = os.path.getsize(path)
    answer["bytes"] = size
    with open(path, "rb") as file:
        if file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC:
            answer.update(container="parquet", keys=_parquet_columns(path, size))
            answer["kind"] = _kind_of_keys(answer["keys"])
            return answer
        answer["container"] = text_container(path)
        file.seek(0)
        answer["kind"], answer["keys"] = _kind_of_records(first_records(file, answer["container"]))
        if answer["container"] == "json":
            return answer
        file.seek(0)
        counted, lines, last = 0, 0, b"\n"
        while counted < size and (size < COUNT_LIMIT or counted < FIRST_BYTES):
            block = file.read(1 << 20)
            if not block:
                break
            counted, lines, last = counted + len(block), lines + block.count(b"\n"), block[-1:]
    whole = counted >= size
    lines += whole and last != b"\n"
    answer["counted"] = whole
    answer["lines"] = lines if whole else round(lines * size / counted)
    return answer


def _probe_folder(path: str, answer: Dict[str, Any]) -> None:
    """Fill in what a folder of `datasets`, or one of Parquet files, says about itself."""
    names = sorted(os.listdir(path))
    answer["bytes"] = sum(_size(os.path.join(path, name)) for name in names)
    if "state.json" in names:
        answer["container"] = "arrow"
        with open(os.path.join(path, "dataset_info.json"), "rb") as file:
            features = json.loads(file.read(CONFIG_LIMIT)).get("features") or {}
        answer["keys"] = sorted(features)[:MAX_NAMED]
    else:
        parquet = [os.path.join(path, name) for name in names if name.endswith(".parquet")]
        if parquet:
            answer["container"] = "parquet"
            answer["keys"] = _parquet_columns(parquet[0], os.path.getsize(parquet[0]))
    answer["kind"] = _kind_of_keys(answer["keys"])


def _parquet_columns(path: str, size: int) -> List[str]:
    """Return the columns that matter, by their names in the file's footer; its encoding is not decoded."""
    with open(path, "rb") as file:
        file.seek(max(size - 8, 0))
        tail = file.read(8)
        if len(tail) < 8 or tail[4:] != PARQUET_MAGIC:
            return []
        (length,) = struct.unpack("<I", tail[:4])
        file.seek(max(size - 8 - min(length, CONFIG_LIMIT), 0))
        footer = file.read(min(length, CONFIG_LIMIT))
    return [name for name in KNOWN_COLUMNS if name.encode() in footer]


def _kind_of_keys(keys: List[str]) -> str:
    if "input_ids" in keys:
        return "tokens"
    return "chat" if "messages" in keys or "conversations" in keys else "unknown"


def _kind_of_records(records: Iterable[Any]) -> Tuple[str, List[str]]:
    """Judge by the first record that the job would take: it skips what is damaged, and so does this."""
    first: List[str] = []
    for record in records:
        kind, keys = _kind(record)
        if kind != "unknown":
            return kind, keys
        first = first or keys
    return "unknown", first


def _kind(record: Any) -> Tuple[str, List[str]]:
    if not isinstance(record, dict):
        return "unknown", []
    keys = sorted(record)[:MAX_NAMED]
    if isinstance(record.get("input_ids"), list):
        return "tokens", keys
    if any(isinstance(record.get(key), (list, str)) for key in ("messages", "conversations")):  # also as JSON text
        return "chat", keys
    return "unknown", keys


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0

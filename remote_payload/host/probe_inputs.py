"""The sections `model` and `data`: whether what the job reads is there and whole, without loading it."""

from __future__ import annotations

import json
import os
import struct
from typing import Any, Dict, List, Optional, Tuple

from remote_payload.host.sections import Note

HEADER_LIMIT = 1 << 26
"""64 MiB, of a safetensors header: the largest seen (a shard of a trillion parameters) is below 1 MiB."""

CONFIG_LIMIT = 1 << 24
LINE_LIMIT = 1 << 24
"""16 MiB: the first record of a data set is read up to here."""

COUNT_LIMIT = 1 << 28
"""256 MiB: the lines of a larger file are not counted; that would take longer than the rest of the probe."""

MAX_NAMED = 20

PARQUET_MAGIC = b"PAR1"

KNOWN_COLUMNS = ("conversations", "input_ids", "loss_mask", "messages", "tools")

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model", "vocab.json", "merges.txt",
)  # fmt: skip


def probe_model(note: Note, path: str) -> Dict[str, Any]:
    """Return {"path", "exists", "config", "shards", "tokenizer": [file], "total_bytes"}.

    `config`: {error, model_type, architectures, num_hidden_layers, hidden_size, dtype, quantization}, also out of
    `text_config`. `shards`: {index (whether there is one), error, files, missing, empty, truncated: [{file, why}]},
    judged by each safetensors header against the file's size.
    """
    note(path)
    if not os.path.isdir(path):
        return {"path": path, "exists": False, "config": None, "shards": None, "tokenizer": [], "total_bytes": 0}
    names = sorted(os.listdir(path))
    return {
        "path": path,
        "exists": True,
        "config": _config(os.path.join(path, "config.json")),
        "shards": _shards(note, path, names),
        "tokenizer": [name for name in TOKENIZER_FILES if name in names],
        "total_bytes": sum(_size(os.path.join(path, name)) or 0 for name in names),
    }


def probe_data(note: Note, path: str) -> Dict[str, Any]:
    """Return {"path", "exists", "bytes", "lines", "counted", "container", "kind", "keys"}.

    `container` is "jsonl", "json", "parquet" or "arrow", by contents; "" for a folder that is none. `kind` is
    "tokens", "chat" or "unknown", by the first record or the columns; `keys` are theirs. `lines` is exact if
    `counted`, else (the file is large) estimated from its beginning; null where there are none to count.
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
        start = file.read(LINE_LIMIT).lstrip(b"\xef\xbb\xbf \t\r\n")
        if start.startswith(PARQUET_MAGIC):
            answer.update(container="parquet", keys=_parquet_columns(path, size))
            answer["kind"] = _kind_of_keys(answer["keys"])
            return answer
        if start.startswith(b"["):
            answer["container"] = "json"
            answer["kind"], answer["keys"] = _kind(_first_element(start))
            return answer
        answer["container"] = "jsonl"
        file.seek(0)
        answer["kind"], answer["keys"] = _kind(_first_record(file))
        file.seek(0)
        counted, lines, last = 0, 0, b"\n"
        while counted < size and (size < COUNT_LIMIT or counted < LINE_LIMIT):
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
    answer["bytes"] = sum(_size(os.path.join(path, name)) or 0 for name in names)
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


def _first_element(start: bytes) -> Any:
    """Return the first element of a JSON array, as far as its beginning holds it whole."""
    try:
        text = start[1:].decode("utf-8", "ignore").lstrip()
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        return None


def _kind_of_keys(keys: List[str]) -> str:
    if "input_ids" in keys:
        return "tokens"
    return "chat" if "messages" in keys or "conversations" in keys else "unknown"


def _config(path: str) -> Dict[str, Any]:
    answer: Dict[str, Any] = {
        "error": None, "model_type": None, "architectures": [], "num_hidden_layers": None, "hidden_size": None,
        "dtype": None, "quantization": None,
    }  # fmt: skip
    try:
        with open(path, "rb") as file:
            config = json.loads(file.read(CONFIG_LIMIT))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        answer["error"] = str(error)
        return answer
    text = config.get("text_config")
    places = [text, config] if isinstance(text, dict) else [config]

    def first(*keys: str) -> Any:
        return next((place[key] for place in places for key in keys if place.get(key) is not None), None)

    quantization = first("quantization_config", "compression_config")
    answer.update(
        model_type=config.get("model_type"),
        architectures=config.get("architectures") or [],
        num_hidden_layers=first("num_hidden_layers", "n_layer"),
        hidden_size=first("hidden_size", "n_embd"),
        dtype=first("dtype", "torch_dtype"),
        quantization=quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else None,
    )
    return answer


def _shards(note: Note, folder: str, names: List[str]) -> Dict[str, Any]:
    answer: Dict[str, Any] = {
        "index": False, "error": None, "files": 0, "missing": [], "empty": [], "truncated": [],
    }  # fmt: skip
    try:
        expected, answer["index"] = _expected_shards(folder, names)
    except (OSError, ValueError) as error:
        answer.update(index=True, error=str(error))
        return answer
    answer["files"] = len(expected)
    for name in expected:
        path = os.path.join(folder, name)
        note(path)
        size = _size(path)
        if size is None:
            answer["missing"].append(name)
        elif size == 0:
            answer["empty"].append(name)
        elif name.endswith(".safetensors"):
            why = _truncation(path, size)
            if why:
                answer["truncated"].append({"file": name, "why": why})
    return answer


def _expected_shards(folder: str, names: List[str]) -> Tuple[List[str], bool]:
    """Return the weight files that there should be, and whether an index says so. Raises ValueError, OSError."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if index in names:
            with open(os.path.join(folder, index), "rb") as file:
                content = json.load(file)
            weights = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
                raise ValueError("%s has no weight_map" % index)
            return sorted(set(weights.values())), True
    for suffix in (".safetensors", ".bin"):
        found = [name for name in names if name.endswith(suffix)]
        if found:
            return found, False
    return [], False


def _truncation(path: str, size: int) -> Optional[str]:
    """Return why a safetensors file cannot be whole: 8 bytes of header length, the header, then data to its end."""
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                return "%d bytes are too few" % size
            (length,) = struct.unpack("<Q", prefix)
            if length > HEADER_LIMIT or 8 + length > size:
                return "its header would take %d bytes of %d" % (length, size)
            header = json.loads(file.read(length))
        ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return "its header cannot be read: %s: %s" % (type(error).__name__, error)
    expected = 8 + length + max(ends, default=0)
    return None if expected == size else "it has %d bytes, its header tells of %d" % (size, expected)


def _size(path: str) -> Optional[int]:
    """Return a file's size, links followed (a hub cache holds links to blobs); None if there is none."""
    try:
        return os.path.getsize(path) if os.path.isfile(path) else None
    except FileNotFoundError:
        return None


def _first_record(file: Any) -> Any:
    while True:
        line = file.readline(LINE_LIMIT)
        if not line:
            return None
        if line.strip():
            try:
                return json.loads(line)
            except ValueError:
                return None


def _kind(record: Any) -> Tuple[str, List[str]]:
    if not isinstance(record, dict):
        return "unknown", []
    keys = sorted(record)[:MAX_NAMED]
    if isinstance(record.get("input_ids"), list):
        return "tokens", keys
    if isinstance(record.get("messages"), list) or isinstance(record.get("conversations"), list):
        return "chat", keys
    return "unknown", keys

"""The `model` section: whether the checkpoint is there and whole, and what its configuration says of its size."""

from __future__ import annotations

import json
import os
import struct
from typing import Any, Dict, List, Optional, Set, Tuple

from remote_payload.host.model_keys import compare_keys, empty_layers
from remote_payload.host.sections import Note

HEADER_LIMIT = 1 << 26
"""64 MiB, of a safetensors header: the largest seen (a shard of a trillion parameters) is below 1 MiB."""

CONFIG_LIMIT = 1 << 24
MAX_NAMED = 20

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of an element, by the safetensors format's names. A type that is not among them is not judged by its size."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model", "vocab.json", "merges.txt",
)  # fmt: skip

SIZES = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "dtype": ("dtype", "torch_dtype"),
    "attention_heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "rope": ("rope_scaling", "rope_parameters"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "draft_layers": ("num_nextn_predict_layers",),
}
"""Name in the report -> keys of config.json, or of its text_config, that say it."""

VISION_HEADS = ("num_attention_heads", "vt_num_attention_heads", "num_heads")
"""Keys of config.json's vision_config that say its heads: transformers' name, Kimi's, and that of Qwen's towers."""


def probe_model(note: Note, path: str) -> Dict[str, Any]:
    """Return {"path", "exists", "config", "shards", "tokenizer", "remote_code", "total_bytes", "weight_bytes"}.

    `config`: {error, model_type, architectures, quantization, empty_layers, vision_heads (of a vision tower), and
    SIZES, also out of `text_config`}. `shards`: {index (whether there is one), error, files, missing, empty,
    truncated: [{file, why}], absent: [tensor that the index names and its shard's header lacks], keys: `compare_keys`
    of all tensors}: every header is read and compared with the file's size. `remote_code`: {"files": [Python files
    that the configuration or tokenizer wants run], "missing": [...]}.
    """
    note(path)
    if not os.path.isdir(path):
        return {"path": path, "exists": False, "config": None, "shards": None, "tokenizer": [],
                "remote_code": {"files": [], "missing": []}, "total_bytes": 0, "weight_bytes": 0}  # fmt: skip
    names = sorted(os.listdir(path))
    config = _config(os.path.join(path, "config.json"))
    shards, weight_bytes = _shards(note, path, names, config)
    return {
        "path": path,
        "exists": True,
        "config": config,
        "shards": shards,
        "tokenizer": [name for name in TOKENIZER_FILES if name in names],
        "remote_code": _remote_code(path, names),
        "weight_bytes": weight_bytes,
        "total_bytes": sum(_size(os.path.join(path, name)) or 0 for name in names),
    }


def _config(path: str) -> Dict[str, Any]:
    answer: Dict[str, Any] = {
        "error": None, "model_type": None, "architectures": [], "quantization": None,
        "empty_layers": [], "vision_heads": None, **dict.fromkeys(SIZES),
    }  # fmt: skip
    try:
        with open(path, "rb") as file:
            config = json.loads(file.read(CONFIG_LIMIT))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        answer["error"] = str(error)
        return answer
    text, vision = config.get("text_config"), config.get("vision_config")
    places, vision = (
        [text, config] if isinstance(text, dict) else [config],
        vision if isinstance(vision, dict) else {},
    )

    def first(*keys: str) -> Any:
        return next((place[key] for place in places for key in keys if place.get(key) is not None), None)

    quantization = first("quantization_config", "compression_config")
    answer.update(
        model_type=config.get("model_type"),
        architectures=config.get("architectures") or [],
        quantization=quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else None,
        empty_layers=empty_layers(places[0]),
        vision_heads=next((vision[key] for key in VISION_HEADS if key in vision), None),
        **{name: first(*keys) for name, keys in SIZES.items()},
    )
    return answer


def _remote_code(folder: str, names: List[str]) -> Dict[str, List[str]]:
    """Return the files that `auto_map` of the configuration and the tokenizer refer to ("FILE.Class")."""
    wanted: Set[str] = set()
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        if name not in names:
            continue
        try:
            with open(os.path.join(folder, name), "rb") as file:
                content = json.loads(file.read(CONFIG_LIMIT))
        except (OSError, ValueError):
            continue  # `config` says so; a tokenizer's is read by nobody before the job
        mapped = content.get("auto_map") if isinstance(content, dict) else None
        for value in mapped.values() if isinstance(mapped, dict) else ():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, str) and "." in each and "--" not in each:  # "REPOSITORY--FILE.Class" is not here
                    wanted.add(each.rpartition(".")[0].replace(".", "/") + ".py")
    return {"files": sorted(wanted), "missing": sorted(name for name in wanted if name not in names)}


def _shards(note: Note, folder: str, names: List[str], config: Dict[str, Any]) -> Tuple[Dict[str, Any], int]:
    answer: Dict[str, Any] = {
        "index": False, "error": None, "files": 0, "missing": [], "empty": [], "truncated": [], "absent": [],
        "keys": None,
    }  # fmt: skip
    weight_bytes = 0
    try:
        expected, answer["index"] = _expected_shards(folder, names)
    except (OSError, ValueError) as error:
        answer.update(index=True, error=str(error))
        return answer, 0
    answer["files"] = len(expected)
    keys: Set[str] = set().union(*expected.values())
    for name in sorted(expected):
        path = os.path.join(folder, name)
        note(path)
        size = _size(path)
        weight_bytes += size or 0
        if size is None:
            answer["missing"].append(name)
        elif size == 0:
            answer["empty"].append(name)
        elif name.endswith(".safetensors"):
            tensors, why = _read_header(path, size)
            if why:
                answer["truncated"].append({"file": name, "why": why})
            else:
                answer["absent"] += sorted(expected[name] - tensors)
                keys |= tensors
    if answer["index"] or not (answer["missing"] or answer["empty"] or answer["truncated"]):
        answer["keys"] = compare_keys(
            keys, config["num_hidden_layers"], config["experts"], config["draft_layers"], config["empty_layers"]
        )
    answer["absent"] = answer["absent"][:MAX_NAMED]
    return answer, weight_bytes


def _expected_shards(folder: str, names: List[str]) -> Tuple[Dict[str, Set[str]], bool]:
    """Return the weight files that there should be with the tensors that an index places in each, if there is one.

    Raises ValueError, OSError.
    """
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if index in names:
            with open(os.path.join(folder, index), "rb") as file:
                content = json.load(file)
            weights = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
                raise ValueError("%s has no weight_map" % index)
            expected: Dict[str, Set[str]] = {}
            for tensor, name in weights.items():
                expected.setdefault(name, set()).add(tensor)
            return expected, True
    for suffix in (".safetensors", ".bin"):
        found: Dict[str, Set[str]] = {name: set() for name in names if name.endswith(suffix)}
        if found:
            return found, False
    return {}, False


def _read_header(path: str, size: int) -> Tuple[Set[str], Optional[str]]:
    """Return the tensors of a safetensors file, and why it cannot be whole.

    The format: 8 bytes of header length, the header as JSON, then the tensors without a gap to the file's end.
    """
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                return set(), "%d bytes are too few" % size
            (length,) = struct.unpack("<Q", prefix)
            if length > HEADER_LIMIT or 8 + length > size:
                return set(), "its header would take %d bytes of %d" % (length, size)
            header = json.loads(file.read(length))
        tensors = {name: item for name, item in header.items() if name != "__metadata__"}
        end = 0
        for name, item in sorted(tensors.items(), key=lambda pair: pair[1]["data_offsets"]):
            first, last = item["data_offsets"]
            bits = DTYPE_BITS.get(item["dtype"])
            for extent in item["shape"] if bits else ():
                bits *= extent
            if first != end or last < first or (bits is not None and -(-bits // 8) != last - first):
                return set(), "its header contradicts itself at %s" % name
            end = last
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return set(), "its header cannot be read: %s: %s" % (type(error).__name__, error)
    expected = 8 + length + end
    return set(tensors), None if expected == size else "it has %d bytes, its header tells of %d" % (size, expected)


def _size(path: str) -> Optional[int]:
    """Return a file's size, links followed (a hub cache holds links to blobs); None if there is none."""
    try:
        return os.path.getsize(path) if os.path.isfile(path) else None
    except FileNotFoundError:
        return None

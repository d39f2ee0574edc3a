"""Cut a small model from a large one: a few decoder layers, and all that is not a decoder layer.

Shards that hold only what is needed are linked; of others the needed tensors are copied, by `copy_file_range` where
the file system shares or copies blocks itself. Standard library only: a checkpoint is never loaded to be cut.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remote_payload.extract.formats import HEADER_LIMIT
from remote_payload.host.files import CHUNK
from remote_payload.host.model_keys import empty_layers, left_out

INDEX = "model.safetensors.index.json"
LEAST_LAYERS = 3
HEADER_BYTES = 100 * HEADER_LIMIT
"""Bytes. Shards of a mixture of experts list very many tensors; safetensors' own limit is the same."""

LINKED = (".json", ".jinja", ".model", ".py", ".txt", ".tiktoken")
"""Names of the small files that a tokenizer, a processor or the model's own code consist of."""

LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.")
IN_TEXT = re.compile(r"(\blayers(?:\\)?\.)(\d+)(?=\\?\.|$)")
"""A layer's number within a quantisation's list of modules, which may hold regular expressions."""


class CannotCutError(Exception):
    """This checkpoint has no form that can be cut; the message says why. Nothing is wrong with it."""


class BadCheckpointError(Exception):
    """The checkpoint itself is damaged: the real load would fail as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`layers`: which of the real model's decoder layers became 0, 1, 2, ...; sizes in bytes."""

    layers: tuple[int, ...]
    copied: int
    linked: int


def cut_checkpoint(model: str, target: str) -> Cut:
    """Write the cut of the folder `model` into the new folder `target`.

    Raises CannotCutError (nothing is left), BadCheckpointError, OSError.
    """
    config = _read_json(os.path.join(model, "config.json"))
    small, layers = cut_config(config)
    shards = _weight_map(model)
    text = _text(config)
    prefix = _layer_prefix(shards, set(range(int(text["num_hidden_layers"]))) - set(empty_layers(text)))
    names = {name: new for name in shards if (new := renamed(name, prefix, layers)) is not None}
    needed = sorted({shards[name] for name in names})
    headers = {shard: _read_header(os.path.join(model, shard)) for shard in needed}
    room, size = shutil.disk_usage(os.path.dirname(target)).free, _copied_bytes(headers, names)
    if size > room // 2:
        raise CannotCutError(f"the cut needs up to {size / 1e9:.1f} GB, half of what is free is {room / 2e9:.1f} GB")
    _write_small_files(model, target, small)
    copied = linked = 0
    weight_map: dict[str, str] = {}
    for shard in needed:
        path, (start, header) = os.path.join(model, shard), headers[shard]
        wanted = {name: entry for name, entry in header.items() if name in names}
        if _is_linked(header, names):
            os.symlink(os.path.realpath(path), os.path.join(target, shard))
            linked += os.path.getsize(path)
        else:
            copied += _slice(path, start, wanted, names, os.path.join(target, shard))
        weight_map.update((names[name], shard) for name in wanted)
    index = {"metadata": {"total_size": copied + linked}, "weight_map": weight_map}
    _write_json(os.path.join(target, INDEX), index)
    return Cut(layers=layers, copied=copied, linked=linked)


def dummy_checkpoint(model: str, target: str) -> tuple[int, ...]:
    """Write only the cut's configuration, for `load_format = "dummy"`; return the layers. Raises CannotCutError."""
    small, layers = cut_config(_read_json(os.path.join(model, "config.json")))
    _write_small_files(model, target, small)
    return layers


def cut_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the cut's config.json and which layers it keeps: one dense, two of each kind of expert layer.

    Without experts: two of each kind of attention, three layers at least; of Nemotron-NAS's blocks, two of each that
    leave out the same. Raises CannotCutError.
    """
    text = _text(config)
    count = text.get("num_hidden_layers")
    if not isinstance(count, int) or count < LEAST_LAYERS:
        raise CannotCutError(f"num_hidden_layers is {count}")
    if any(text.get(key) not in (None, 1) for key in ("decoder_sparse_step", "moe_layer_freq")):
        raise CannotCutError("expert layers are told by a stride (decoder_sparse_step or moe_layer_freq)")
    dense = _dense_layers(text, count)
    types = text.get("layer_types")
    if isinstance(types, list) and len(types) > count:  # it goes on with the draft layers, which the cut has not
        text = {**text, "layer_types": types[:count]}
    listed = text["layer_types"] if isinstance(types, list) else left_out(text)
    kinds = list(listed) if len(listed) == count else [""] * count
    layers = _chosen(count, dense, kinds)
    number = {old: new for new, old in enumerate(layers)}
    small = {
        # Lists with one entry a layer, whatever they are called.
        key: [value[i] for i in layers] if isinstance(value, list) and len(value) == count else value
        for key, value in text.items()
    }
    small["num_hidden_layers"] = len(layers)
    for key, value in (
        ("first_k_dense_replace", sum(i in dense for i in layers)),
        ("mlp_only_layers", [number[i] for i in layers if i in dense]),
        ("num_nextn_predict_layers", 0),
        ("max_window_layers", min(len(layers), int(text.get("max_window_layers") or 0))),
    ):
        if text.get(key) is not None:
            small[key] = value
    whole = {**config, "text_config": small} if "text_config" in config else small
    for holder in (small,) if whole is small else (small, whole):
        if isinstance(holder.get("quantization_config"), dict):
            holder["quantization_config"] = _renumbered(holder["quantization_config"], number)
    return whole, layers


def renamed(name: str, prefix: str, layers: tuple[int, ...]) -> str | None:
    """Return a tensor's name in the cut, None if its layer is left out."""
    match = LAYER.match(name)
    if match is None or match[1] != prefix:
        return name
    if int(match[2]) not in layers:
        return None
    return f"{prefix}.{layers.index(int(match[2]))}.{name[match.end() :]}"


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config.get("text_config") or config)


def _dense_layers(text: Mapping[str, Any], count: int) -> set[int]:
    """Return the layers without experts, of a model that has layers with them; empty for a dense model."""
    if isinstance(text.get("first_k_dense_replace"), int) and text.get("n_routed_experts"):
        return set(range(min(text["first_k_dense_replace"], count)))
    return set(text.get("mlp_only_layers") or ())


def _chosen(count: int, dense: set[int], kinds: list[str]) -> tuple[int, ...]:
    taken: dict[tuple[bool, str], int] = {}
    layers: list[int] = []
    for layer in range(count):
        kind = (layer in dense, kinds[layer])
        if taken.get(kind, 0) < (1 if layer in dense else 2):
            taken[kind] = taken.get(kind, 0) + 1
            layers.append(layer)
    for layer in range(count):
        if len(layers) < LEAST_LAYERS and layer not in layers:
            layers.append(layer)
    return tuple(sorted(layers))


def _renumbered(value: Any, number: Mapping[int, int]) -> Any:
    """Rename layers in a quantisation's configuration; entries of layers that are left out go."""
    if isinstance(value, dict):
        pairs = ((_renumbered(key, number), _renumbered(each, number)) for key, each in value.items())
        return {key: each for key, each in pairs if key is not None}
    if isinstance(value, list):
        return [each for each in (_renumbered(item, number) for item in value) if each is not None]
    if not isinstance(value, str):
        return value
    match = IN_TEXT.search(value)
    if match is None:
        return value
    new = number.get(int(match[2]))
    return None if new is None else value[: match.start(2)] + str(new) + value[match.end(2) :]


def _weight_map(model: str) -> dict[str, str]:
    index = os.path.join(model, INDEX)
    if os.path.exists(index):
        return dict(_read_json(index)["weight_map"])
    shards = sorted(name for name in os.listdir(model) if name.endswith(".safetensors"))
    if not shards:
        raise CannotCutError("the weights are not in safetensors files")
    return {name: shard for shard in shards for name in _read_header(os.path.join(model, shard))[1]}


def _layer_prefix(names: Mapping[str, str], layers: set[int]) -> str:
    found: dict[str, set[int]] = {}
    for name in names:
        match = LAYER.match(name)
        if match:
            found.setdefault(match[1], set()).add(int(match[2]))
    whole = [prefix for prefix, numbers in found.items() if numbers >= layers]
    if len(whole) > 1:
        whole = [prefix for prefix in whole if "vision" not in prefix and "audio" not in prefix]
    if len(whole) != 1:
        raise CannotCutError(
            f"no single list of {len(layers)} layers among the tensors' names (found {sorted(found)})"
        )
    return whole[0]


def _read_header(path: str) -> tuple[int, dict[str, Any]]:
    """Return where the tensors begin and their table. Raises BadCheckpointError."""
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= HEADER_BYTES:
                raise BadCheckpointError(f"{path} has no safetensors header")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise BadCheckpointError(f"{path} is named in the index and is not there") from error
    except ValueError as error:
        raise BadCheckpointError(f"{path} has a damaged header: {error}") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if os.path.getsize(path) != 8 + length + end:
        raise BadCheckpointError(f"{path} has {os.path.getsize(path)} bytes, its header says {8 + length + end}")
    return 8 + length, header


def _copied_bytes(headers: Mapping[str, tuple[int, dict[str, Any]]], names: Mapping[str, str]) -> int:
    return sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for _, header in headers.values()
        if not _is_linked(header, names)
        for name, entry in header.items()
        if name in names
    )


def _is_linked(header: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Whether a shard holds only tensors of the cut, under names that stay."""
    return all(names.get(name) == name for name in header)


def _slice(path: str, start: int, wanted: Mapping[str, Any], names: Mapping[str, str], target: str) -> int:
    """Copy the wanted tensors of a shard under their new names; return their bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    spans, size = [], 0
    for name, entry in sorted(wanted.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        table[names[name]] = {**entry, "data_offsets": [size, size + end - begin]}
        spans.append((start + begin, end - begin))
        size += end - begin
    encoded = json.dumps(table, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "rb") as source, open(target, "xb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.flush()
        for offset, length in spans:
            _copy(source.fileno(), file.fileno(), offset, length)
    return size


def _copy(source: int, target: int, offset: int, length: int) -> None:
    while length > 0:
        try:
            done = os.copy_file_range(source, target, length, offset)
        except OSError:  # across file systems, or one that cannot
            done = os.write(target, os.pread(source, min(length, CHUNK), offset))
        if done == 0:
            raise BadCheckpointError(f"a shard ended {length} bytes early while it was copied")
        offset, length = offset + done, length - done


def _write_small_files(model: str, target: str, config: Mapping[str, Any]) -> None:
    os.makedirs(target)
    for name in os.listdir(model):
        path = os.path.join(model, name)
        if name.endswith(LINKED) and name not in ("config.json", INDEX) and os.path.isfile(path):
            os.symlink(os.path.realpath(path), os.path.join(target, name))
    _write_json(os.path.join(target, "config.json"), config)


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            document: dict[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        raise BadCheckpointError(f"{path} cannot be read: {error}") from error
    return document


def _write_json(path: str, document: Mapping[str, Any]) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(document, file)

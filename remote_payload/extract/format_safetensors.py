"""`hs_{i}.safetensors`, as vLLM's extraction and speculators 0.5 and newer have it.

`hidden_states` [tokens, states, hidden], the final state last; `token_ids` int64 [tokens]; with fp8 also
`hidden_states_scales` fp32 [tokens, 1, 1]. The loss mask stays in the Arrow data set beside the files (see `arrow`);
as ranges it is in the header too, so that a file can be converted by itself.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any, BinaryIO

from remote_payload.extract.formats import (
    FP8,
    HEADER_LIMIT,
    ITEM_BYTES,
    SCALE_BYTES,
    Format,
    HalfFileError,
    SampleData,
    SampleFacts,
    Sink,
    mask_of_spans,
    one_plane,
    token_digest,
)

SCALES = "hidden_states_scales"


def _write(sample: SampleData, sink: Sink) -> None:
    encoded = _encoded_header(sample)
    encoded += b" " * (-len(encoded) % 8)  # the format wants the tensors aligned
    sink.write(struct.pack("<Q", len(encoded)) + encoded)
    sink.write(sample.hidden)
    sink.write(sample.token_ids)
    if sample.scales is not None:
        sink.write(sample.scales)


def _head(sample: SampleData, size: int) -> bytes | None:
    encoded = _encoded_header(sample)
    if sample.scales is not None or 8 + len(encoded) > size:
        return None
    return struct.pack("<Q", size - 8) + encoded.ljust(size - 8)


def _encoded_header(sample: SampleData) -> bytes:
    tokens, states, width = sample.shape
    # In this order every tensor begins at a multiple of its element's size.
    parts = [
        ("hidden_states", sample.dtype, [*sample.shape], tokens * states * width * ITEM_BYTES[sample.dtype]),
        ("token_ids", "I64", [tokens], 8 * tokens),
    ]
    if sample.scales is not None:
        parts.append((SCALES, "F32", [tokens, 1, 1], SCALE_BYTES * tokens))
    header: dict[str, Any] = {"__metadata__": dict(sample.metadata)}
    offset = 0
    for name, dtype, shape, size in parts:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return json.dumps(header, separators=(",", ":")).encode()


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the checked header, and where the tensors begin. Raises HalfFileError."""
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 0 < length <= HEADER_LIMIT:
        raise HalfFileError("no safetensors header")
    try:
        header = json.loads(file.read(length))
        hidden = header["hidden_states"]
        tokens, states, width = hidden["shape"]
        sizes = {"hidden_states": tokens * states * width * ITEM_BYTES[hidden["dtype"]], "token_ids": 8 * tokens}
        shapes = {"token_ids": [tokens]}
        if hidden["dtype"] == FP8:
            sizes[SCALES], shapes[SCALES] = SCALE_BYTES * tokens, [tokens, 1, 1]
        total = 0
        for name, size in sizes.items():
            if header[name]["data_offsets"] != [total, total + size] or header[name]["shape"] != shapes.get(
                name, hidden["shape"]
            ):
                raise HalfFileError(f"its header contradicts itself: {name} is {header[name]} of {hidden}")
            total += size
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, HalfFileError):
            raise
        raise HalfFileError(f"its safetensors header is damaged ({type(error).__name__}: {error})") from error
    size, promised = os.fstat(file.fileno()).st_size, 8 + length + total
    if size != promised:
        raise HalfFileError(f"it has {size} bytes, its header promises {promised}")
    return header, 8 + length


def _inspect(path: str) -> SampleFacts:
    with open(path, "rb") as file:
        header, start = _header(file)
        first, last = header["token_ids"]["data_offsets"]
        file.seek(start + first)
        digest = token_digest(file.read(last - first))
        size = os.fstat(file.fileno()).st_size
    hidden = header["hidden_states"]
    return SampleFacts(
        shape=tuple(hidden["shape"]),
        dtype=hidden["dtype"],
        bytes=size,
        token_sha256=digest,
        metadata=header.get("__metadata__", {}),
    )


def _read(path: str) -> SampleData:
    with open(path, "rb") as file:
        header, start = _header(file)
        file.seek(start)
        data = memoryview(bytearray(file.read()))
    hidden, metadata = header["hidden_states"], header.get("__metadata__", {})
    parts = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"}
    return SampleData(
        token_ids=bytes(parts["token_ids"]),
        loss_mask=mask_of_spans(json.loads(metadata.get("loss_spans", "null")), hidden["shape"][0]),
        hidden=parts["hidden_states"],
        shape=tuple(hidden["shape"]),
        dtype=hidden["dtype"],
        scales=parts.get(SCALES),
        metadata=metadata,
    )


SPECULATORS = Format(
    name="speculators",
    file_name=lambda index: f"hs_{index}.safetensors",
    write=_write,
    inspect=_inspect,
    read=_read,
    convention="speculators",
    final_norm=False,
    says_norm=True,  # our header does; speculators itself does not look
    needs_final=False,
    dtypes=frozenset(ITEM_BYTES),
    side_bytes=8,  # its id
    planes=one_plane,
    head=_head,
    arrow=True,
)

"""The layouts of a sample file: how to write one whole, and how to check one without loading its tensors.

A format is one `Format` value: a name, a writer and an inspector. Only the standard library is needed, so that the
verify step starts at once and the inspector can be trusted where torch is broken.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from remote_payload.host.files import CHUNK, fsync_folder, write_all

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an element by safetensors' dtype names."""

DTYPE_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

HEADER_LIMIT = 1 << 20
"""Bytes. Our headers hold a few kilobytes; a longer one is not ours or is damaged."""

TEMPORARY_SUFFIX = ".partial"


class HalfFileError(ValueError):
    """A sample file is cut off, damaged or not of its format; the message says how."""


class Sink(Protocol):
    def write(self, data: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleData:
    """One sample in memory: `hidden` is contiguous [tokens, states, hidden], ids are int64 little-endian."""

    token_ids: bytes
    hidden: memoryview
    shape: tuple[int, int, int]
    dtype: str  # a key of ITEM_BYTES
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """What a file holds, by its header and its length."""

    shape: tuple[int, int, int]
    dtype: str
    bytes: int
    token_sha256: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`write` puts the whole file into a sink; `inspect` raises HalfFileError unless the file is whole.

    `head` is there where a file is head + hidden states + token ids: it returns a head of exactly that many bytes, or
    None if it does not fit, so that a long sample's rows can be written before their head is known.
    """

    name: str
    file_name: Callable[[int], str]
    write: Callable[[SampleData, Sink], None]
    inspect: Callable[[str], SampleFacts]
    head: Callable[[SampleData, int], bytes | None] | None = None


def format_named(name: str) -> Format:
    """Raises ValueError, naming the formats that there are."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"format {name!r} is not supported; supported: {', '.join(FORMATS)}") from None


def token_digest(token_ids: bytes) -> str:
    """Return the sha256 of token ids as int64 little-endian: the identity of a sample's text."""
    return hashlib.sha256(token_ids).hexdigest()


def publish(path: str, write: Callable[[Sink], None]) -> tuple[int, str]:
    """Write a file so that its name appears only when it is whole and on disk; return (bytes, sha256).

    Raises OSError naming the file; then no part of it is left under any name.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}{TEMPORARY_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        try:
            sink = _HashingSink(descriptor)
            write(sink)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # write() and fsync() do not know their file
            raise OSError(error.errno, error.strerror, path) from error
        raise
    fsync_folder(folder)
    return sink.bytes, sink.digest.hexdigest()


class _HashingSink:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.bytes = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):  # hash what the cache still holds from the write
            piece = view[start : start + CHUNK]
            write_all(self._descriptor, piece)  # type: ignore[arg-type]  # any bytes-like object
            self.digest.update(piece)
        self.bytes += len(view)


# --------------------------------------------------------------------------------------- speculators
# `hs_{i}.safetensors`: `hidden_states` [tokens, states, hidden], then `token_ids` int64 [tokens].


def _write_speculators(sample: SampleData, sink: Sink) -> None:
    encoded = _speculators_header(sample)
    encoded += b" " * (-len(encoded) % 8)  # the format wants the tensors aligned
    sink.write(struct.pack("<Q", len(encoded)) + encoded)
    sink.write(sample.hidden)
    sink.write(sample.token_ids)


def _speculators_head(sample: SampleData, size: int) -> bytes | None:
    encoded = _speculators_header(sample)
    if 8 + len(encoded) > size:
        return None
    return struct.pack("<Q", size - 8) + encoded.ljust(size - 8)


def _speculators_header(sample: SampleData) -> bytes:
    tokens, states, width = sample.shape
    ids_start = tokens * states * width * ITEM_BYTES[sample.dtype]
    header = {
        "__metadata__": dict(sample.metadata),
        "hidden_states": {"dtype": sample.dtype, "shape": list(sample.shape), "data_offsets": [0, ids_start]},
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [ids_start, ids_start + 8 * tokens]},
    }
    return json.dumps(header, separators=(",", ":")).encode()


def _inspect_speculators(path: str) -> SampleFacts:
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= HEADER_LIMIT:
            raise HalfFileError("no safetensors header")
        try:
            header = json.loads(file.read(length))
            hidden, ids = header["hidden_states"], header["token_ids"]
            tokens, states, width = hidden["shape"]
            expected = tokens * states * width * ITEM_BYTES[hidden["dtype"]]
            offsets = (hidden["data_offsets"], ids["data_offsets"])
        except (ValueError, KeyError, TypeError) as error:
            raise HalfFileError(f"its safetensors header is damaged ({type(error).__name__}: {error})") from error
        if ids["shape"] != [tokens] or offsets != ([0, expected], [expected, expected + 8 * tokens]):
            raise HalfFileError(f"its header contradicts itself: {hidden}, {ids}")
        size, promised = os.fstat(file.fileno()).st_size, 8 + length + expected + 8 * tokens
        if size != promised:
            raise HalfFileError(f"it has {size} bytes, its header promises {promised}")
        file.seek(8 + length + expected)
        token_ids = file.read(8 * tokens)
    return SampleFacts(
        shape=(tokens, states, width),
        dtype=hidden["dtype"],
        bytes=size,
        token_sha256=token_digest(token_ids),
        metadata=header.get("__metadata__", {}),
    )


SPECULATORS = Format(
    name="speculators",
    file_name=lambda index: f"hs_{index}.safetensors",
    write=_write_speculators,
    inspect=_inspect_speculators,
    head=_speculators_head,
)

FORMATS = {form.name: form for form in (SPECULATORS,)}

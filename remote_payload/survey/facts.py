"""What one file holds: names, dtypes and shapes of tensors or columns, its number of records, NaN in a part of it.

Nothing here runs code that a file brings along: safetensors and .npy are read by their headers, .pt is loaded
weights-only, JSON is parsed. It runs in a child process with limits all the same (`child`).

Formats: safetensors (github.com/huggingface/safetensors#format): uint64 little-endian length, that many bytes of
JSON, then the data at the `data_offsets` of each tensor. npy: numpy.lib.format.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

SAMPLE_BYTES = 64 << 20
"""Of each tensor or column that are looked at for NaN, from its start."""

MAX_HEADER = 100 << 20
"""Bytes; the limit of the safetensors library."""

KINDS = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".ckpt": "torch",
    ".npy": "npy", ".parquet": "parquet", ".jsonl": "jsonl",
}  # fmt: skip

_WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8, "F8_E8M0": 1,
}  # fmt: skip
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48, 0x7FFF << 48 | (1 << 48) - 1), "F32": ("<u4", 0x7F800000, 0x7FFFFFFF),
    "F16": ("<u2", 0x7C00, 0x7FFF), "BF16": ("<u2", 0x7F80, 0x7FFF), "F8_E5M2": ("<u1", 0x7C, 0x7F),
    "F8_E4M3": ("<u1", None, 0x7F), "F8_E8M0": ("<u1", None, 0xFF), "C64": ("<u4", 0x7F800000, 0x7FFFFFFF),
}  # fmt: skip
"""(bits, pattern of an infinity, mask without the sign): above the infinity is NaN. E4M3 and E8M0 have no infinity
and one NaN; a complex number is two floats."""

_NEVER_NAN = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "F4", "F6_E2M3", "F6_E3M2"})
"""The small floats of the OCP MX formats have neither NaN nor infinity."""


class DamagedError(Exception):
    """The file is not whole, or not what its name says."""


class UnreadableError(Exception):
    """This environment has nothing to read such files with, or to look at their values."""


def inspect(path: str, count_nan: bool) -> dict[str, Any]:
    """Return {"tensors": [{"name", "dtype", "shape"}], "records" (None where there are none), "nan"}.

    `nan` is None unless asked for, else {"values", "nan", "inf"}: how many were looked at, and what they were. Raises
    DamagedError, UnreadableError, OSError.
    """
    kind = KINDS[os.path.splitext(path)[1]]
    try:
        found: dict[str, Any] = _READERS[kind](path, count_nan)
        return found
    except (ValueError, KeyError, TypeError, EOFError, struct.error, pickle.UnpicklingError, zipfile.BadZipFile) as e:
        raise DamagedError("it is no whole %s file: %s" % (kind, _line(e))) from e
    except ImportError as error:
        raise UnreadableError("no %s in %s" % (error.name, sys.executable)) from error


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _facts(tensors: list[dict[str, Any]], records: int | None, nan: dict[str, int] | None) -> dict[str, Any]:
    return {"tensors": tensors, "records": records, "nan": nan}


# ------------------------------------------------------------------------------------------- safetensors


def _safetensors(path: str, count_nan: bool) -> dict[str, Any]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER, size - 8):
            raise DamagedError("it is cut: the header of %d bytes does not fit into %d" % (length, size))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise DamagedError("it is cut: %d bytes are there, its header speaks of %d" % (size, 8 + length + end))
        tensors = []
        total = {"values": 0, "nan": 0, "inf": 0}
        for name, entry in header.items():
            dtype, shape = entry["dtype"], entry["shape"]
            tensors.append({"name": name, "dtype": _NAMES.get(dtype, dtype.lower()), "shape": shape})
            start, stop = entry["data_offsets"]
            if dtype in _WIDTHS and math.prod(shape) * _WIDTHS[dtype] != stop - start:
                raise DamagedError("%s has %d bytes, its shape needs others" % (name, stop - start))
            if count_nan and dtype not in _EXPONENTS and dtype not in _NEVER_NAN:
                raise UnreadableError("whether values of %s are NaN is not known here" % dtype)
            if count_nan and dtype in _EXPONENTS:
                file.seek(8 + length + start)
                _add(total, _count(dtype, file.read(min(stop - start, SAMPLE_BYTES))))
    return _facts(tensors, None, total if count_nan else None)


def _count(dtype: str, data: bytes) -> dict[str, int]:
    import numpy as np

    code, infinity, mask = _EXPONENTS[dtype]
    bits = np.frombuffer(data, dtype=code) & np.array(mask, dtype=code)
    if infinity is None:
        return {"values": bits.size, "nan": int((bits == mask).sum()), "inf": 0}
    return {"values": bits.size, "nan": int((bits > infinity).sum()), "inf": int((bits == infinity).sum())}


def _add(total: dict[str, int], part: dict[str, int]) -> None:
    for name, value in part.items():
        total[name] += value


# ------------------------------------------------------------------------------------------------- others


def _npy(path: str, count_nan: bool) -> dict[str, Any]:
    import numpy as np

    array = np.load(path, mmap_mode="r", allow_pickle=False)
    nan = None
    if count_nan:
        if array.dtype.kind == "V":
            raise UnreadableError("whether values of %s are NaN is not known here" % array.dtype)
        part = array.reshape(-1)[: SAMPLE_BYTES // max(1, array.itemsize)]
        floats = part if part.dtype.kind in "fc" else part[:0]
        nan = {"values": floats.size, "nan": int(np.isnan(floats).sum()), "inf": int(np.isinf(floats).sum())}
    return _facts([{"name": "", "dtype": array.dtype.name, "shape": list(array.shape)}], None, nan)


def _torch(path: str, count_nan: bool) -> dict[str, Any]:
    import torch

    whole = zipfile.is_zipfile(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=whole)
    except pickle.UnpicklingError as error:
        if whole or "Unsupported" in str(error):
            raise UnreadableError("it holds more than plain tensors, which only its own program may load") from error
        raise
    except (RuntimeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    tensors = []
    total = {"values": 0, "nan": 0, "inf": 0}
    for name, tensor in _walk("", content):
        tensors.append({"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)})
        if count_nan and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            try:
                part = tensor.detach().reshape(-1)[: SAMPLE_BYTES // tensor.element_size()]
                part = part if tensor.dtype.is_complex else part.float()
                found = {"values": part.numel(), "nan": int(part.isnan().sum()), "inf": int(part.isinf().sum())}
            except RuntimeError as error:  # a sparse one, or a dtype that this torch cannot convert
                raise UnreadableError("%s cannot be searched for NaN: %s" % (name, _line(error))) from error
            _add(total, found)
    return _facts(tensors, None, total if count_nan else None)


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of what dicts and lists hold: `state.weight`, `hidden_states[3]`."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk("%s.%s" % (name, key) if name else str(key), item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _walk("%s[%d]" % (name, number), item)


def _parquet(path: str, count_nan: bool) -> dict[str, Any]:
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        schema, rows = file.schema_arrow, file.metadata.num_rows
        nan = None
        if count_nan:
            nan = {"values": 0, "nan": 0, "inf": 0}
            names = [field.name for field in schema if _has_floats(field.type)]
            left = SAMPLE_BYTES
            for batch in file.iter_batches(columns=names) if names else ():
                for floats in (each for column in batch.columns for each in _floats(column)):
                    found = pyarrow.compute.sum(pyarrow.compute.is_nan(floats)).as_py() or 0
                    infinite = pyarrow.compute.sum(pyarrow.compute.is_inf(floats)).as_py() or 0
                    _add(nan, {"values": len(floats) - floats.null_count, "nan": int(found), "inf": int(infinite)})
                left -= batch.nbytes
                if left <= 0:
                    break
    except pyarrow.ArrowNotImplementedError as error:
        raise UnreadableError("this pyarrow cannot look at it: %s" % _line(error)) from error
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
    tensors = [{"name": field.name, "dtype": str(field.type), "shape": []} for field in schema]
    return _facts(tensors, rows, nan)


def _has_floats(kind: Any) -> bool:
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):
        return _has_floats(kind.storage_type)
    if pyarrow.types.is_dictionary(kind):
        return _has_floats(kind.value_type)
    return pyarrow.types.is_floating(kind) or any(_has_floats(kind.field(at).type) for at in range(kind.num_fields))


def _floats(column: Any) -> Iterator[Any]:
    """Yield the floating-point values of a column, however deep in lists and structs they lie."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_floating(kind):
        yield column.cast("float32") if pyarrow.types.is_float16(kind) else column
    elif isinstance(kind, pyarrow.BaseExtensionType):
        yield from _floats(column.storage)
    elif pyarrow.types.is_dictionary(kind):
        yield from _floats(column.dictionary_decode())
    elif pyarrow.types.is_map(kind):
        yield from _floats(column.keys)
        yield from _floats(column.items)
    elif pyarrow.types.is_struct(kind):
        for part in column.flatten():
            yield from _floats(part)
    elif kind.num_fields == 1:  # the lists: of any length, large, or of a fixed one
        yield from _floats(column.flatten())


def _jsonl(path: str, count_nan: bool) -> dict[str, Any]:
    """Every line must be JSON; the keys of objects, with the types of their values, stand for columns.

    JSON has one kind of number, so that whole ones count among the values that were looked at.
    """
    columns: dict[str, set[str]] = {}
    seen = {"values": 0, "nan": 0, "inf": 0}
    records = 0

    def constant(word: str) -> float:
        seen["nan" if word == "NaN" else "inf"] += 1
        return float(word.replace("Infinity", "inf"))

    def number(text: str) -> float:
        seen["values"] += 1
        return float(text)

    def whole(text: str) -> int:
        seen["values"] += 1
        return int(text)

    with open(path, "rb") as file:
        for position, line in enumerate(file, 1):
            if not line.strip():
                continue
            records += 1
            try:
                record = json.loads(line, parse_constant=constant, parse_float=number, parse_int=whole)
            except ValueError as error:
                raise DamagedError("line %d is no JSON: %s" % (position, error)) from error
            for key, value in record.items() if isinstance(record, dict) else ():
                columns.setdefault(key, set()).add(type(value).__name__)
    tensors = [
        {"name": key, "dtype": " or ".join(sorted(kinds)), "shape": []} for key, kinds in sorted(columns.items())
    ]
    seen["values"] += seen["nan"] + seen["inf"]
    return _facts(tensors, records, seen if count_nan else None)


_READERS = {"safetensors": _safetensors, "torch": _torch, "npy": _npy, "parquet": _parquet, "jsonl": _jsonl}

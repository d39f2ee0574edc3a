"""Samples as `torch.save` writes them: speculators 0.3 and 0.4, SpecForge, Model-Optimizer.

No padding is stored. Beside the consumer's own keys, which its loader picks by name, each file has `ctl`: the same
description that a safetensors header holds. Files are inspected without torch: the pickle inside is read by an
unpickler that knows the few names of a dict of tensors and resolves nothing else, so that no file can run code.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from remote_payload.extract.formats import (
    RECORD_ID,
    Format,
    HalfFileError,
    SampleData,
    SampleFacts,
    Sink,
    token_digest,
)

METADATA = "ctl"

SPECFORGE_GROUP = 2000
"""Files a folder: `rows_0-2000`, `rows_2000-4000`, ..."""

STORAGES = {"BFloat16Storage": ("BF16", 2), "HalfStorage": ("F16", 2), "FloatStorage": ("F32", 4),
            "LongStorage": ("I64", 8), "BoolStorage": ("BOOL", 1)}  # fmt: skip
DTYPES = frozenset({"BF16", "F16", "F32"})

SIDE_BYTES = 16
"""A token's id and its place in the loss mask, both int64."""

Layout = Callable[[list[Any], Any, Any, Mapping[str, str]], dict[str, Any]]
"""Makes a file's dict of planes [tokens, states of the plane * hidden], token ids, loss mask and description."""


# ------------------------------------------------------------------------------------------- the layouts


def _each(states: int) -> list[tuple[int, int]]:
    return [(place, place + 1) for place in range(states)]


def _final_apart(states: int) -> list[tuple[int, int]]:
    return [(0, states - 1), (states - 1, states)]


def _speculators_03(planes: list[Any], ids: Any, mask: Any, _: Mapping[str, str]) -> dict[str, Any]:
    return {"input_ids": ids, "hidden_states": planes, "loss_mask": mask}


def _specforge(planes: list[Any], ids: Any, mask: Any, _: Mapping[str, str]) -> dict[str, Any]:
    auxiliary, final = planes
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "hidden_state": final.unsqueeze(0),
        "aux_hidden_state": auxiliary.unsqueeze(0),
    }


def _modelopt(planes: list[Any], ids: Any, mask: Any, metadata: Mapping[str, str]) -> dict[str, Any]:
    auxiliary, final = planes
    return {
        "input_ids": ids,
        "hidden_states": final,
        "aux_hidden_states": auxiliary,
        "loss_mask": mask,
        "conversation_id": metadata.get(RECORD_ID, metadata["index"]),
        "hidden_states_prenorm": metadata["final_norm"] == "false",
    }


def _divided(sample: SampleData, divide: Callable[[int], Sequence[tuple[int, int]]]) -> list[Any]:
    """Return the planes, each with a storage of its own: `torch.save` writes the whole storage of a view.

    A long sample comes divided, and its planes are taken where they are; the states of others are copied.
    """
    import torch

    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[sample.dtype]
    tokens, states, _ = sample.shape
    if sample.planes is not None:
        return [torch.frombuffer(plane, dtype=dtype).view(tokens, -1) for plane in sample.planes]
    whole = torch.frombuffer(sample.hidden, dtype=dtype).view(sample.shape)
    return [
        whole[:, first:last].flatten(1).clone(memory_format=torch.contiguous_format) for first, last in divide(states)
    ]


def _parts(content: Mapping[str, Any], name: str) -> tuple[list[Any], Any]:
    """Return a file's (auxiliary states, final state); raises KeyError, TypeError where it has none."""
    if name == "speculators-0.3":
        return list(content["hidden_states"][:-1]), content["hidden_states"][-1]
    if name == "specforge":
        return [content["aux_hidden_state"]], content["hidden_state"]
    return [content["aux_hidden_states"]], content["hidden_states"]


# --------------------------------------------------------------------------------------- write and read


def _writer(layout: Layout, divide: Callable[[int], Sequence[tuple[int, int]]]) -> Callable[[SampleData, Sink], None]:
    def write(sample: SampleData, sink: Sink) -> None:
        import torch

        ids = torch.frombuffer(bytearray(sample.token_ids), dtype=torch.int64)
        mask = torch.frombuffer(bytearray(sample.loss_mask), dtype=torch.uint8).long()
        content = layout(_divided(sample, divide), ids, mask, sample.metadata)
        torch.save({**content, METADATA: dict(sample.metadata)}, cast("IO[bytes]", _Stream(sink)))

    return write


class _Stream:
    """What `torch.save` needs of a file. It never seeks."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, data: Any) -> int:
        self._sink.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None: ...


def _reader(name: str, inspect: Callable[[str], SampleFacts]) -> Callable[[str], SampleData]:
    def read(path: str) -> SampleData:
        import torch

        facts = inspect(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        auxiliary, final = _parts(content, name)
        flat = [part.reshape(facts.shape[0], -1) for part in (*auxiliary, final)]
        states = torch.cat(flat, dim=1).view(facts.shape).contiguous()
        return SampleData(
            token_ids=content["input_ids"].numpy().tobytes(),
            loss_mask=bytes(content["loss_mask"].to(torch.uint8).numpy()),
            hidden=states.view(torch.uint8).numpy().data.cast("B"),
            shape=facts.shape,
            dtype=facts.dtype,
            scales=None,
            metadata=facts.metadata,
        )

    return read


# ----------------------------------------------------------------------------------------------- inspect


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    dtype: str
    key: str
    shape: tuple[int, ...]
    numel: int


def _inspector(name: str) -> Callable[[str], SampleFacts]:
    def inspect(path: str) -> SampleFacts:
        try:
            with zipfile.ZipFile(path) as archive:
                root = archive.namelist()[0].partition("/")[0]
                content = _Unpickler(archive.read(f"{root}/data.pkl")).load()
                facts = _facts(content, name, os.path.getsize(path), lambda t: archive.read(f"{root}/data/{t.key}"))
                _check_storages(archive, root, content)
        except FileNotFoundError:
            raise
        except HalfFileError:
            raise
        except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
            why = f"it is no whole sample of format {name} ({type(error).__name__}: {error})"
            raise HalfFileError(why) from error
        return facts

    return inspect


def _facts(content: Mapping[str, Any], name: str, size: int, data: Callable[[_Tensor], bytes]) -> SampleFacts:
    ids, mask = content["input_ids"], content["loss_mask"]
    auxiliary, final = _parts(content, name)
    tokens, width = final.shape[-2:]
    columns = sum(part.shape[-1] for part in auxiliary)
    if any(part.shape[-2] != tokens or part.dtype != final.dtype for part in auxiliary) or columns % width:
        raise HalfFileError("its states differ in length, width or dtype")
    if ids.shape != (tokens,) or mask.shape != (tokens,) or ids.dtype != "I64" or final.dtype not in DTYPES:
        raise HalfFileError(f"it has {ids.shape} token ids and {mask.shape} mask values for {tokens} rows")
    return SampleFacts(
        shape=(tokens, columns // width + 1, width),
        dtype=final.dtype,
        bytes=size,
        token_sha256=token_digest(data(ids)),
        metadata=content.get(METADATA, {}),
    )


def _check_storages(archive: zipfile.ZipFile, root: str, content: Mapping[str, Any]) -> None:
    for value in content.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, _Tensor):
                size = dict(STORAGES.values())[tensor.dtype] * tensor.numel
                found = archive.getinfo(f"{root}/data/{tensor.key}").file_size
                if found != size or math.prod(tensor.shape) != tensor.numel:
                    raise HalfFileError(f"a tensor of {size} bytes has {found} in the file")


class _Unpickler(pickle.Unpickler):
    """Reads a dict of tensors without their data, and refuses everything else by name."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def persistent_load(self, pid: Any) -> Any:
        _, storage, key, _, numel = pid
        return _Tensor(dtype=storage, key=str(key), shape=(), numel=numel)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name][0]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise HalfFileError(f"its pickle names {module}.{name}, which no sample needs")


def _rebuild(storage: _Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(dtype=storage.dtype, key=storage.key, shape=tuple(size), numel=storage.numel)


def _format(
    name: str, layout: Layout, divide: Callable[[int], Sequence[tuple[int, int]]], file_name: Callable[[int], str], *,
    final_norm: bool, says_norm: bool = False, names_record: bool = False,
) -> Format:  # fmt: skip
    inspect = _inspector(name)
    return Format(
        name=name, file_name=file_name, write=_writer(layout, divide), inspect=inspect, read=_reader(name, inspect),
        convention=name, final_norm=final_norm, says_norm=says_norm, needs_final=True, dtypes=DTYPES,
        side_bytes=SIDE_BYTES, planes=divide, names_record=names_record,
    )  # fmt: skip


def _specforge_name(index: int) -> str:
    group = index // SPECFORGE_GROUP * SPECFORGE_GROUP
    return f"rows_{group}-{group + SPECFORGE_GROUP}/data_{index}.ckpt"


FORMATS = (
    _format("speculators-0.3", _speculators_03, _each, lambda index: f"data_{index}.pt", final_norm=False),
    _format("specforge", _specforge, _final_apart, _specforge_name, final_norm=True),
    _format(
        "modelopt",
        _modelopt,
        _final_apart,
        lambda index: f"{index}.pt",
        final_norm=True,
        says_norm=True,
        names_record=True,
    ),
)

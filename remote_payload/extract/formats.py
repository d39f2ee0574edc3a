"""The layouts of a sample file: how to write one whole, and how to check one without loading its tensors.

A format is one `Format` value: a name, a writer, an inspector, a reader, and what its consumers take for granted
about the states. Inspecting needs only the standard library, so that the verify step starts at once and can be
trusted where torch is broken; it executes nothing that a file holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from remote_payload.host.files import CHUNK, fsync_folder, write_all

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
"""Bytes of an element by safetensors' dtype names."""

DTYPE_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "fp8": "F8_E4M3"}

FP8 = "F8_E4M3"
SCALE_BYTES = 4
"""fp8 is stored with one fp32 scale a token."""

HEADER_LIMIT = 1 << 20
"""Bytes. Our headers hold a few kilobytes; a longer one is not ours or is damaged."""

TEMPORARY_SUFFIX = ".partial"

RECORD_ID = "record_id"
"""In a file's description and a ledger's line: what the data set itself calls the record."""

GROUP_PREFIX = "rows_"
"""Folders below the output in which a format groups its files are made as they are needed."""


class HalfFileError(ValueError):
    """A sample file is cut off, damaged or not of its format; the message says how."""


class Sink(Protocol):
    def write(self, data: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleData:
    """One sample in memory: `hidden` is contiguous [tokens, states, hidden], ids are int64 little-endian.

    `loss_mask` holds one 0 or 1 a token, `scales` one fp32 a token (fp8 only: state = stored value * scale).
    """

    token_ids: bytes
    loss_mask: bytes
    hidden: memoryview
    shape: tuple[int, int, int]
    dtype: str  # a key of ITEM_BYTES
    scales: memoryview | None
    metadata: Mapping[str, str]
    planes: Sequence[memoryview] | None = None  # instead of `hidden`: as `Format.planes` divides it


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
    """`write` puts the whole file into a sink; `inspect` and `read` raise HalfFileError unless the file is whole.

    `final_norm`: whether consumers expect the model's last state after its final norm; `says_norm`: they read in the
    file which it is, so either will do.
    `needs_final`: the last of the boundaries must be the model's last. `convention`: how its users number layers, a
    key of layers.LAYER_CONVENTIONS. `dtypes`: those that its consumers read. `head` is there where a file is head +
    hidden states + token ids: it returns a head of exactly that many bytes, or None if it does not fit, so that a
    long sample's rows can be written before their head is known. Elsewhere such rows wait in a file of their own, by
    the ranges of states that `planes` gives, each a tensor of the sample file: so the writer takes them as they are.
    `side_bytes`: of a token beside its states (and beside the scales of fp8).
    """

    name: str
    file_name: Callable[[int], str]
    write: Callable[[SampleData, Sink], None]
    inspect: Callable[[str], SampleFacts]
    read: Callable[[str], SampleData]
    convention: str
    final_norm: bool
    says_norm: bool
    needs_final: bool
    dtypes: frozenset[str]
    side_bytes: int
    planes: Callable[[int], Sequence[tuple[int, int]]]
    head: Callable[[SampleData, int], bytes | None] | None = None
    arrow: bool = False  # a data set of token ids and masks lies beside the files
    names_record: bool = False  # its consumers read what the data set calls the record


def one_plane(states: int) -> Sequence[tuple[int, int]]:
    """All states of a token together."""
    return ((0, states),)


def why_unfit(
    form: Format, *, boundaries: Sequence[int], layers: int, final_norm: bool, dtype: str | None
) -> str | None:
    """Return why a format's consumers would misread such states, None if they would not; `dtype` None: not known."""
    if dtype is not None and dtype not in form.dtypes:
        return f"format {form.name} has no {dtype}: its consumers read {', '.join(sorted(form.dtypes))}"
    if form.needs_final and (boundaries[-1] != layers or len(boundaries) < 2):
        return (
            f"format {form.name} needs the model's last boundary, {layers}, as the last of at least two, not "
            f"{list(boundaries)}"
        )
    if not form.says_norm and form.final_norm != final_norm:
        wanted, got = ("after", "before") if form.final_norm else ("before", "after")
        return f"consumers of format {form.name} expect the last state {wanted} the final norm, it is {got} it"
    return None


NAMES = ("speculators", "speculators-0.3", "specforge", "modelopt")


def format_named(name: str) -> Format:
    """Raises ValueError, naming the formats that there are."""
    # The layouts are written in terms of this module.
    from remote_payload.extract import format_safetensors, format_torch

    forms = {form.name: form for form in (format_safetensors.SPECULATORS, *format_torch.FORMATS)}
    if name not in forms:
        raise ValueError(f"format {name!r} is not supported; supported: {', '.join(NAMES)}")
    return forms[name]


def token_digest(token_ids: bytes) -> str:
    """Return the sha256 of token ids as int64 little-endian: the identity of a sample's text."""
    return hashlib.sha256(token_ids).hexdigest()


def mask_of_spans(spans: Sequence[Sequence[int]] | None, tokens: int) -> bytes:
    """Return a loss mask of one 0 or 1 a token from [start, end) ranges; without ranges every token counts."""
    if spans is None:
        return b"\x01" * tokens
    mask = bytearray(tokens)
    for start, end in spans:
        mask[start:end] = b"\x01" * (end - start)
    return bytes(mask)


def named(line: dict[str, Any], record_id: str | None) -> dict[str, Any]:
    """Return a ledger's line with what the data set itself calls its record, where it does."""
    return line if record_id is None else {**line, RECORD_ID: record_id}


def publish(path: str, write: Callable[[Sink], None]) -> tuple[int, str]:
    """Write a file so that its name appears only when it is whole and on disk; return (bytes, sha256).

    Raises OSError naming the file; then no part of it is left under any name.
    """
    folder, name = os.path.split(path)
    if os.path.basename(folder).startswith(GROUP_PREFIX) and not os.path.isdir(folder):
        with contextlib.suppress(FileExistsError):  # another writer's was first
            os.mkdir(folder)
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
    """Writes and hashes; large pieces at the same time, in two threads, because each takes as long as the other."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.bytes = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        hashing = None
        if len(view) > CHUNK:
            hashing = threading.Thread(target=self.digest.update, args=(view,), name="ctl-hash")
            hashing.start()
        try:
            write_all(self._descriptor, view)  # type: ignore[arg-type]  # any bytes-like object
        finally:
            if hashing is not None:
                hashing.join()  # the caller's memory is free again once this returns, or raises
        if hashing is None:
            self.digest.update(view)
        self.bytes += len(view)

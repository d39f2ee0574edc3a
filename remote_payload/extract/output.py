"""What an output folder says about itself: what its samples are (manifest), and each of them by checksum (ledger).

Both lie in the folder, under names that no trainer reads, so that they move with the samples and outlive the run
folders. A later run compares the first before it adds to the folder, and proves each file by the second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from remote_payload.extract.formats import DTYPE_CODES
from remote_payload.extract.identity import asked
from remote_payload.extract.settings import CaptureSettings, ConfigError, ModelFacts
from remote_payload.host.files import fsync_folder, parse_line, read_json
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST
from remote_payload.host.protocol import ExtractSpec

SCHEMA_VERSION = 1

OFFSET_BITS = 48
"""Of a place in a ledger."""

SEMANTICS = 1
"""Raised whenever the same plan would make this payload store other values than before."""


NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""A file system without hard links: there the document is written in its place, and a run killed in that very
moment leaves half of one, which the next run refuses to guess."""


def identity(spec: ExtractSpec, settings: CaptureSettings, facts: ModelFacts) -> dict[str, Any]:
    """Return what all samples of a folder must have in common, JSON-ready."""
    return {
        "semantics": SEMANTICS,
        "format": spec["format"],
        "model": spec["model"],
        "revision": spec["revision"] or "",
        "model_files": _model_digest(spec["model"]),
        "num_layers": facts.layers,
        "hidden": facts.hidden,
        "boundaries": list(settings.boundaries),
        "final_norm": settings.final_norm,
        "dtype": spec["dtype"] if spec["dtype"] != "auto" else facts.dtype or "auto",
        "store_dtype": store_dtype_code(spec, facts) or "auto",
        "engine": asked(spec),
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return, in words, how two identities differ; keys that only one version of this code knows count too."""
    return [
        f"{key} is {old.get(key)!r} there and {new.get(key)!r} here"
        for key in sorted({*old, *new})
        if json.dumps(old.get(key), sort_keys=True) != json.dumps(new.get(key), sort_keys=True)
    ]


def read_manifest(output: str) -> dict[str, Any] | None:
    """Return the folder's manifest, None if there is none. Raises ValueError if it is damaged."""
    manifest = read_json(os.path.join(output, OUTPUT_MANIFEST))
    if manifest is not None and not isinstance(manifest.get("identity"), dict):
        raise ValueError(f"{os.path.join(output, OUTPUT_MANIFEST)} holds no identity")
    return manifest


def settle(output: str, identity: Mapping[str, Any]) -> None:
    """Say what the folder's samples are, before the first of a run.

    Whoever comes first says it, and nobody ever replaces it: two runs that begin at once both see one manifest.
    Raises ConfigError if the folder's samples are, or are about to be, of another kind.
    """
    os.makedirs(output, exist_ok=True)
    path = os.path.join(output, OUTPUT_MANIFEST)
    if not os.path.lexists(path):
        _create(path, {"schema_version": SCHEMA_VERSION, "identity": dict(identity)})
    try:
        manifest = read_manifest(output)
    except ValueError as error:
        raise ConfigError(f"{error}: another run began in this moment, or ended in one; run it again") from error
    require_same(output, manifest, identity)


def require_same(output: str, manifest: Mapping[str, Any] | None, identity: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder's manifest tells of samples of another kind than `identity`."""
    found = differences(manifest["identity"], identity) if manifest is not None else []
    if found:
        raise ConfigError(
            f"{output} holds samples of another kind, and runs are not mixed: {'; '.join(found)}. Use the earlier "
            'settings, another folder, or stale = "quarantine"'
        )


def _create(path: str, record: Mapping[str, Any]) -> None:
    """Write a document unless it is there by then, so that it is whole or absent."""
    folder, name = os.path.split(path)
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    # Into the ledger's folder, which no other run sweeps.
    descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.", dir=_made(os.path.join(folder, OUTPUT_LEDGER)))
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # another run was faster
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    fsync_folder(folder)


def _made(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    return folder


def output_ledger(output: str, run_id: str, rank: int) -> str:
    """Return the path of one rank's ledger in the output folder; it has one writer."""
    return os.path.join(output, OUTPUT_LEDGER, f"{run_id}.rank-{rank}.jsonl")


class OutputLedger:
    """The latest ledger line of each sample in an output folder, by index. Run ids sort by time.

    Only where each line stands is in memory: 100 bytes a sample, of which there are half a million, instead of 3,000.
    No file stays open: every resume leaves one of each rank, a process may often have no more than 1,024, and whoever
    asks for a line reads a whole sample beside it.
    """

    def __init__(self, output: str) -> None:
        folder = os.path.join(output, OUTPUT_LEDGER)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        self._paths = [os.path.join(folder, name) for name in names if name.endswith(".jsonl")]
        self._places: dict[int, int] = {}  # offset, and above OFFSET_BITS the number of the file
        for number, path in enumerate(self._paths):
            offset = 0
            with open(path, "rb") as file:
                for raw in file:
                    line = parse_line(raw)
                    if line is not None and "file" in line and "sha256" in line:
                        self._places[line["index"]] = number << OFFSET_BITS | offset
                    offset += len(raw)

    def get(self, index: int) -> dict[str, Any] | None:
        place = self._places.get(index)
        if place is None:
            return None
        with open(self._paths[place >> OFFSET_BITS], "rb") as file:
            file.seek(place & ((1 << OFFSET_BITS) - 1))
            return parse_line(file.readline())


def store_dtype_code(spec: ExtractSpec, facts: ModelFacts) -> str | None:
    """Return the dtype that files will have, None where only vLLM decides it."""
    name = spec["store_dtype"]
    if name == "auto":
        name = str(facts.dtype) if spec["dtype"] == "auto" else spec["dtype"]
    return DTYPE_CODES.get(name)


def _model_digest(model: str) -> str | None:
    """Digest a local model's configuration and the names and sizes of its weights: other weights under the same path
    must not be mixed in, and reading a terabyte to learn that would take an hour. None for a name on the hub."""
    if not os.path.isdir(model):
        return None
    digest = hashlib.sha256()
    for name in sorted(os.listdir(model)):
        path = os.path.join(model, name)
        if name in ("config.json", "model.safetensors.index.json"):
            with open(path, "rb") as file:
                digest.update(b"%s\0%s\n" % (name.encode(), hashlib.sha256(file.read()).hexdigest().encode()))
        elif name.endswith((".safetensors", ".bin")):
            digest.update(b"%s\0%d\n" % (name.encode(), os.path.getsize(path)))
    return digest.hexdigest()

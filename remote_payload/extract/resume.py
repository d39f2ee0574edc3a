"""Keeping what an earlier run wrote: only files that are whole and hold exactly what this run would write."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from typing import Any

from remote_payload.extract.dataset import Sample
from remote_payload.extract.formats import DTYPE_CODES, TEMPORARY_SUFFIX, HalfFileError, format_named, token_digest
from remote_payload.extract.identity import engine_key
from remote_payload.extract.settings import CaptureSettings, ModelFacts
from remote_payload.host.protocol import ExtractSpec


def sweep(output: str) -> list[str]:
    """Delete the half-written files of a killed writer and return their names."""
    names = os.listdir(output) if os.path.isdir(output) else []
    swept = [name for name in names if name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)]
    for name in swept:
        os.unlink(os.path.join(output, name))
    return swept


def kept_record(
    sample: Sample, spec: ExtractSpec, settings: CaptureSettings, facts: ModelFacts
) -> dict[str, Any] | None:
    """Return the ledger line of a sample that is there already, or None if it must be written.

    Its `sha256` is None: reading whole terabytes again would cost more than the check is worth.
    """
    form = format_named(spec["format"])
    name = form.file_name(sample.index)
    try:
        found = form.inspect(os.path.join(spec["output"], name))
    except (FileNotFoundError, HalfFileError):
        return None
    wanted = {
        "boundaries": json.dumps(settings.boundaries), "final_norm": json.dumps(settings.final_norm),
        "model": spec["model"], "revision": spec["revision"] or "", "engine_key": engine_key(spec),
    }  # fmt: skip
    digest = token_digest(array("q", sample.token_ids).tobytes())
    shape = (len(sample.token_ids), len(settings.boundaries), facts.hidden)
    dtype = store_dtype_code(spec, facts)
    same = found.shape == shape and found.token_sha256 == digest and dtype in (None, found.dtype)
    if not same or not _holds(found.metadata, wanted):
        return None
    return {
        "index": sample.index, "file": name, "tokens": shape[0], "bytes": found.bytes, "sha256": None,
        "token_sha256": digest, "states": json.loads(found.metadata["states"]), "seconds": 0.0, "kept": True,
    }  # fmt: skip


def store_dtype_code(spec: ExtractSpec, facts: ModelFacts) -> str | None:
    """Return the dtype that files will have, None where only vLLM decides it."""
    name = spec["store_dtype"]
    if name == "auto":
        name = str(facts.dtype) if spec["dtype"] == "auto" else spec["dtype"]
    return DTYPE_CODES.get(name)


def _holds(metadata: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return "states" in metadata and all(metadata.get(key) == value for key, value in wanted.items())

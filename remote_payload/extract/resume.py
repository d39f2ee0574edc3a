"""Going on where an earlier run ended: what is there is proved file by file, and only the rest is captured.

A file is kept if a ledger in its folder names it, its bytes have the checksum noted there, and it holds the very
tokens, boundaries and mask that this run would write. Any other file under a sample's name is moved to a folder
beside the output, with the reason. A folder whose samples differ in kind from this run's is refused as a whole.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from remote_payload.extract import arrow
from remote_payload.extract.dataset import Sample, Samples
from remote_payload.extract.formats import RECORD_ID, TEMPORARY_SUFFIX, format_named, named, token_digest
from remote_payload.extract.identity import asked_in
from remote_payload.extract.inspector import Inspection, inspect_all
from remote_payload.extract.output import OutputLedger, read_manifest, require_same
from remote_payload.extract.settings import ConfigError
from remote_payload.host.files import fsync_folder
from remote_payload.host.journal import Journal
from remote_payload.host.layout import OUTPUT_MANIFEST
from remote_payload.host.protocol import ExtractSpec

DESCRIBING = (OUTPUT_MANIFEST, *arrow.FILES)
"""What lies beside the samples: written by way of a temporary file of the same name between dots."""

HALF = re.compile(rf"\.(.+?)(?:\.\d+-\d+)?{re.escape(TEMPORARY_SUFFIX)}")
"""The temporary file of a sample (`publish`), or of one that is streamed (`Spill`): the name that it is to have."""

REASONS = "why.jsonl"
"""In the quarantine: {"index", "file", "code", "why"} a line."""


@dataclass(slots=True, kw_only=True)
class Resumed:
    """What a folder held. `kept`: number of good files; `bad`: code -> number of files put aside.

    `header`: what the first of the kept files says of itself.
    """

    kept: int = 0
    header: Mapping[str, str] = field(default_factory=dict)
    missing: Samples = field(default_factory=Samples)
    bad: Counter[str] = field(default_factory=Counter)
    swept: int = 0
    others: int = 0  # sample files of records that this run does not capture; left alone
    quarantine: str = ""  # where bad files went

    def text(self) -> str:
        """Return all that in a sentence or two."""
        parts = [f"{self.kept:,} samples are proved and kept, {len(self.missing):,} are to be captured"]
        if self.bad:
            reasons = ", ".join(f"{count:,} {code}" for code, count in sorted(self.bad.items()))
            parts.append(f"{self.bad.total():,} bad files ({reasons}) were moved to {self.quarantine}")
        if self.swept:
            parts.append(f"{self.swept:,} half-written files were deleted")
        if self.others:
            parts.append(f"{self.others:,} files of other samples were left")
        return "; ".join(parts)


def require_same_kind(output: str, form: str, identity: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder's samples are of another kind than `identity`, or do not say of which."""
    try:
        manifest = read_manifest(output)
    except ValueError as error:
        raise ConfigError(f'{error}, so nothing can be added to it: use stale = "quarantine"') from error
    if manifest is None and sample_files(output, form):
        raise ConfigError(
            f"{output} holds samples and no {OUTPUT_MANIFEST}, so what they are cannot be known: "
            'use stale = "quarantine" or another folder'
        )
    require_same(output, manifest, identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every file of the folder must say of itself. `dtype` None: only vLLM knows."""

    states: int
    hidden: int
    dtype: str | None
    header: Mapping[str, str]  # a file that lacks a key (not every format has room for all) passes
    engine: Mapping[str, Any]  # what it was asked for, see `identity.asked`
    names_record: bool  # see `Format`


def expected_of(identity: Mapping[str, Any]) -> Expected:
    """Return what the identity of a run means for the header of each file."""
    header = {
        "boundaries": json.dumps(identity["boundaries"]), "final_norm": json.dumps(identity["final_norm"]),
        "model": identity["model"], "revision": identity["revision"],
    }  # fmt: skip
    dtype = identity["store_dtype"]
    return Expected(
        states=len(identity["boundaries"]),
        hidden=identity["hidden"],
        dtype=None if dtype == "auto" else dtype,
        header=header,
        engine=identity["engine"],
        names_record=format_named(identity["format"]).names_record,
    )


def resume(
    samples: Samples,
    spec: ExtractSpec,
    identity: Mapping[str, Any],
    run_id: str,
    keep: Callable[[dict[str, Any]], None],
    told: Callable[[int, int], None],
) -> Resumed:
    """Prove what is in the output and put aside what is bad.

    `keep` gets the ledger line of each good file, `told` hears (files looked at, files in all) at each file.

    Raises OSError if a bad file cannot be moved.
    """
    output, form = spec["output"], format_named(spec["format"])
    expected = expected_of(identity)
    wanted = {form.file_name(index) for index in samples.indexes}
    result = Resumed(swept=len(sweep(output, wanted)))
    names = set(sample_files(output, spec["format"]))
    quarantine = Quarantine(output, run_id)
    ours = [form.file_name(index) for index in samples.indexes if form.file_name(index) in names]
    inspections = inspect_all((os.path.join(output, name) for name in ours), spec["format"])
    looked = 0
    ledger = OutputLedger(output)
    for sample in samples:
        name = form.file_name(sample.index)
        if name not in names:
            result.missing.add(sample)
            continue
        looked += 1
        found, record = next(inspections), ledger.get(sample.index)
        code, why = verdict(sample, expected, record, found)
        if code or record is None:
            quarantine.take(sample.index, name, code, why)
            result.bad[code] += 1
            result.missing.add(sample)
        else:
            keep(named(record, sample.record_id))
            result.kept += 1
            if found.facts is not None and not result.header:
                result.header = found.facts.metadata
        told(looked, len(ours))
    result.others = len(names - wanted)
    inspections.close()
    quarantine.close()
    result.quarantine = quarantine.path
    return result


def verdict(
    sample: Sample, expected: Expected, record: Mapping[str, Any] | None, found: Inspection
) -> tuple[str, str]:
    """Return ("", "") for a file that is what this run would write, else (code, why)."""
    facts = found.facts
    if facts is None:
        return "damaged", found.why
    if record is None:
        return "no-record", "no ledger in the folder names it, so nothing proves it whole"
    if found.sha256 != record["sha256"]:
        return "checksum", f"its sha256 is {found.sha256}, the ledger says {record['sha256']}"
    digest = token_digest(array("q", sample.token_ids).tobytes())
    if facts.token_sha256 != digest or facts.shape[0] != len(sample.token_ids):
        return "tokens", f"it holds {facts.shape[0]:,} tokens that are not those of the data set's record"
    kind = (expected.states, expected.hidden, expected.dtype or facts.dtype)
    if (*facts.shape[1:], facts.dtype) != kind:
        return "shape", f"it holds states, hidden, dtype {(*facts.shape[1:], facts.dtype)}, not {kind}"
    for key, value in expected.header.items():
        if facts.metadata.get(key, value) != value:
            return "header", f"its header says {key} {facts.metadata[key]}, not {value}"
    engine = asked_in(facts.metadata)
    if engine not in (None, expected.engine):
        return "header", f"its header says that the engine was asked for {engine}, not {expected.engine}"
    spans = sample.loss_spans()
    if facts.metadata and facts.metadata.get("loss_spans") != (None if spans is None else json.dumps(spans)):
        return "mask", "its loss mask is not that of the data set's record"
    if expected.names_record and facts.metadata.get(RECORD_ID) != sample.record_id:
        return "record", f"it calls its record {facts.metadata.get(RECORD_ID)}, the data set {sample.record_id}"
    return "", ""


def sample_files(output: str, form: str) -> list[str]:
    """Return the paths, relative to the folder, that the format gives to samples."""
    prefix, _, suffix = os.path.basename(format_named(form).file_name(0)).partition("0")
    return [
        path
        for path in _files(output)
        if (name := os.path.basename(path)).startswith(prefix)
        and name.endswith(suffix)
        and name[len(prefix) : -len(suffix)].isdecimal()
    ]


def sweep(output: str, wanted: Container[str]) -> list[str]:
    """Delete the half-written files of a killed writer and return their relative paths.

    `wanted`: the sample files of this run. Those of others may be another run's at this moment: it has its own share.
    """
    swept = [path for path in _files(output) if _is_half(path, wanted)]
    for path in swept:
        os.unlink(os.path.join(output, path))
    return swept


def _is_half(path: str, wanted: Container[str]) -> bool:
    """Whether a file is one that our writers rename when it is whole: a sample, or what describes them all."""
    folder, name = os.path.split(path)
    half = HALF.fullmatch(name)
    if half is not None and os.path.join(folder, half[1]) in wanted:
        return True
    return any(name.startswith(f".{whole}.") for whole in DESCRIBING)


def _files(output: str) -> Iterator[str]:
    """Yield the relative paths of all files but those in hidden folders; formats may group their files."""
    for folder, folders, names in os.walk(output):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.relpath(os.path.join(folder, name), output) for name in names)


class Quarantine:
    """The folder OUTPUT.quarantine-RUN_ID beside the output; there only if something had to be put aside."""

    def __init__(self, output: str, run_id: str) -> None:
        self._output = output
        self.path = f"{output.rstrip('/')}.quarantine-{run_id}"
        self._reasons: Journal | None = None

    def take(self, index: int, name: str, code: str, why: str) -> None:
        """Move one file there. Raises OSError."""
        if self._reasons is None:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._reasons = Journal(os.path.join(self.path, REASONS))
        self._reasons.append({"index": index, "file": name, "code": code, "why": why})
        os.makedirs(os.path.dirname(os.path.join(self.path, name)), exist_ok=True)
        os.rename(os.path.join(self._output, name), os.path.join(self.path, name))

    def close(self) -> None:
        if self._reasons is not None:
            self._reasons.close()
            fsync_folder(self.path)
            fsync_folder(self._output)

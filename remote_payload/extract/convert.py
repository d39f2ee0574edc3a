"""The job of `ctl convert`: an extraction's files, anew, in another trainer's format. Run as a module.

Nothing is converted that would lose something: a norm cannot be taken off again, fp8 cannot become what it was, and a
format without the model's last state has nothing to train against. Layer ids follow the format's own convention, in
the header; the final norm is applied where the format's consumers expect it. Exit codes as of the extraction.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from remote_payload.extract import arrow
from remote_payload.extract.dataset import Sample, Samples
from remote_payload.extract.errors import CaptureError, ExceptionReporter
from remote_payload.extract.final_norm import load_final_norm
from remote_payload.extract.formats import (
    FP8,
    RECORD_ID,
    Format,
    HalfFileError,
    SampleData,
    format_named,
    named,
    publish,
    token_digest,
    why_unfit,
)
from remote_payload.extract.records import require_pyarrow
from remote_payload.extract.settings import CONFIG_EXIT, ConfigError
from remote_payload.extract.summarize import DTYPE_NAMES, StateTotals, counts_text, state_figures
from remote_payload.host.files import read_json, read_lines, write_json
from remote_payload.host.journal import EventWriter, Journal
from remote_payload.host.layers import layer_ids
from remote_payload.host.layout import RunPaths
from remote_payload.host.probe_source import written_samples

THREADS = 4
"""Samples in memory at a time, once as read and once as written."""

TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An extraction that was made: where its files are, what they are, and its ledger by index."""

    folder: str
    form: Format
    model: str
    ledger: Mapping[int, Mapping[str, Any]]
    records: int


def load_source(run: str) -> Source:
    """Read the run folder of an extraction. Raises ConfigError if it is none or has written nothing."""
    paths = RunPaths(run)
    plan = read_json(paths.plan)
    spec = (plan or {}).get("extract")
    if not spec:
        raise ConfigError(f"{run} is not the run folder of an extraction")
    ledger = written_samples(paths)
    if not ledger:
        raise ConfigError(f"run {os.path.basename(run)} has written no sample")
    verify = read_json(paths.verify) or {}
    records = (verify.get("data") or {}).get("records") or max(ledger) + 1
    form = format_named(spec["format"])
    return Source(folder=spec["output"], form=form, model=spec["model"], ledger=ledger, records=records)


class Conversion:
    """One source, one format; `check` what the files' headers say, then `convert` them one by one."""

    def __init__(self, source: Source, to: Format, run_id: str) -> None:
        self._source, self._to, self._run_id = source, to, run_id
        self._norm: Callable[[Any], Any] | None = None

    def check(self) -> Mapping[str, Any]:
        """Look at the first file, load the norm if it is needed, and return the target's facts.

        Raises ConfigError if the conversion would lose something, HalfFileError if the file is damaged.
        """
        if self._to.arrow:
            require_pyarrow("the data set beside hs_* files")
        first = self._source.ledger[min(self._source.ledger)]
        facts = self._source.form.inspect(os.path.join(self._source.folder, first["file"]))
        metadata = facts.metadata
        normed, layers = json.loads(metadata["final_norm"]), int(metadata["num_layers"])
        boundaries = json.loads(metadata["boundaries"])
        if facts.dtype == FP8:
            raise ConfigError("fp8 states were rounded when they were stored: no format may pass them on as more")
        if normed and not self._to.final_norm:
            raise ConfigError(
                f"the last state is after the final norm, format {self._to.name} needs it before: it cannot be undone"
            )
        if self._to.final_norm and not normed and layers in boundaries:
            self._norm = load_final_norm(self._source.model)
        reason = why_unfit(
            self._to, boundaries=boundaries, layers=layers, final_norm=normed or self._norm is not None,
            dtype=facts.dtype,
        )  # fmt: skip
        if reason:
            raise ConfigError(reason)
        return {"boundaries": boundaries, "layers": layers, "final_norm": normed or self._norm is not None}

    def convert(self, line: Mapping[str, Any], output: str) -> tuple[dict[str, Any], SampleData]:
        """Write one sample and return its ledger line. Raises CaptureError if it is not what the ledger says."""
        started = time.monotonic()
        try:
            sample = self._source.form.read(os.path.join(self._source.folder, line["file"]))
        except (OSError, HalfFileError) as error:
            raise CaptureError(f"sample {line['index']}: {error}") from error
        digest = token_digest(sample.token_ids)
        if digest != line["token_sha256"] or sample.shape[0] != line["tokens"]:
            raise CaptureError(f"sample {line['index']} is of another text than the ledger says")
        states = [dict(state) for state in line["states"]]
        if self._norm is not None:
            sample, states[-1] = self._normed(sample, states[-1])
        sample = replace(sample, metadata=self._described(sample, states))
        name = self._to.file_name(line["index"])
        size, sha256 = publish(os.path.join(output, name), lambda sink: self._to.write(sample, sink))
        record = {
            "index": line["index"], "file": name, "tokens": sample.shape[0], "bytes": size, "sha256": sha256,
            "token_sha256": digest, "states": states, "seconds": round(time.monotonic() - started, 6),
            "t": round(time.time(), 3),
        }  # fmt: skip
        return named(record, sample.metadata.get(RECORD_ID)), sample

    def _normed(self, sample: SampleData, figures: dict[str, Any]) -> tuple[SampleData, dict[str, Any]]:
        import torch

        assert self._norm is not None
        states = torch.frombuffer(sample.hidden, dtype=getattr(torch, TORCH_DTYPES[sample.dtype])).view(sample.shape)
        states = states.clone()
        states[:, -1] = self._norm(states[:, -1])
        norms = torch.linalg.vector_norm(states[:, -1], dim=-1, dtype=torch.float32)
        finite = norms[norms.isfinite()]
        some = len(finite) > 0
        figures = {
            **figures,
            "norm_mean": float(finite.mean()) if some else None,
            "norm_max": float(finite.max()) if some else None,
        }
        return replace(sample, hidden=states.view(torch.uint8).numpy().data.cast("B")), figures

    def _described(self, sample: SampleData, states: list[dict[str, Any]]) -> dict[str, str]:
        old = dict(sample.metadata)
        boundaries = json.loads(old["boundaries"])
        spans = Sample(index=0, token_ids=[], loss_mask=sample.loss_mask).loss_spans()
        return {
            **old,
            "format": self._to.name,
            "final_norm": json.dumps(json.loads(old["final_norm"]) or self._norm is not None),
            "layer_ids": json.dumps(layer_ids(boundaries, self._to.convention)),
            "layer_convention": self._to.convention,
            "loss_spans": json.dumps(spans),
            "states": json.dumps(states),
            "run_id": self._run_id,
            "converted_from": json.dumps({"run_id": old.get("run_id"), "format": old.get("format")}),
        }


def run(source: Source, to: Format, output: str, paths: RunPaths, events: EventWriter) -> None:
    """Convert all samples. Raises ConfigError before anything is written, CaptureError at a damaged sample."""
    conversion = Conversion(source, to, os.path.basename(paths.folder))
    conversion.check()
    journal = Journal(os.path.join(paths.ledger, "rank-0.jsonl"))
    rows, lines = Samples(), [source.ledger[index] for index in sorted(source.ledger)]
    counts = {"done": 0, "tokens": 0, "bytes": 0}
    os.makedirs(output, exist_ok=True)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="ctl-convert") as pool:
        for window in _windows(lines):
            for record, sample in pool.map(lambda line: conversion.convert(line, output), window):
                journal.append(record)
                if to.arrow:
                    ids = memoryview(sample.token_ids).cast("q").tolist()
                    rows.add(Sample(index=record["index"], token_ids=ids, loss_mask=sample.loss_mask))
                for key, value in (("done", 1), ("tokens", record["tokens"]), ("bytes", record["bytes"])):
                    counts[key] += value
            events.emit("progress", total=len(lines), skipped=0, failed=0, **counts)
    if to.arrow:
        fingerprint = os.path.basename(paths.folder).replace("-", "")
        arrow.write_data_set(output, rows, indexes=source.records, fingerprint=fingerprint)


def verify(source: Source, to: Format, output: str, paths: RunPaths) -> dict[str, Any]:
    """Inspect every converted file against the ledgers, and return the document for verify.json."""
    written = read_lines(os.path.join(paths.ledger, "rank-0.jsonl"))
    bad: dict[int, str] = {}
    metadata: Mapping[str, str] = {}
    shapes: set[tuple[int, int, str]] = set()  # (hidden, states, dtype)
    totals: dict[int, StateTotals] = {}
    for line in written:
        try:
            facts = to.inspect(os.path.join(output, line["file"]))
        except (OSError, HalfFileError) as error:
            bad[line["index"]] = str(error)
            continue
        promised = source.ledger[line["index"]]
        if (facts.token_sha256, facts.bytes) != (promised["token_sha256"], line["bytes"]):
            bad[line["index"]] = "its text or its length is not what was written"
            continue
        metadata = facts.metadata
        shapes.add((facts.shape[2], facts.shape[1], DTYPE_NAMES[facts.dtype]))
        for state in line["states"]:
            totals.setdefault(state["boundary"], StateTotals()).add(state, line["tokens"])
    missing = sorted(source.ledger.keys() - {line["index"] for line in written} | bad.keys())
    problems = [
        {"code": "bad-files", "what": f"sample {index}: {why}", "fix": "convert again"} for index, why in bad.items()
    ][:10]
    if missing:
        what = f"{len(missing):,} samples were not converted, the first is {missing[0]}"
        problems.append({"code": "missing-samples", "what": what, "fix": "convert again"})
    if len(shapes) > 1:
        what = f"the files are of {len(shapes)} shapes or dtypes: {sorted(shapes)}"
        problems.append({"code": "mixed-shapes", "what": what, "fix": "extract anew, into an empty folder"})
    boundaries = json.loads(metadata.get("boundaries", "[]"))
    hidden, states, dtype = next(iter(shapes), (None, None, None))
    return {
        "samples": {
            "expected": len(source.ledger), "written": len(written) - len(bad), "skipped": 0, "failed": len(bad),
            "missing": len(missing),
        },
        "tokens": sum(line["tokens"] for line in written),
        "bytes": sum(line["bytes"] for line in written),
        "boundaries": boundaries,
        "states": [state_figures(boundary, totals.get(boundary)) for boundary in boundaries],
        "shape": {"hidden": hidden, "states": states, "dtype": dtype} if shapes else None,
        "num_layers": json.loads(metadata.get("num_layers", "null")),
        "final_norm": json.loads(metadata.get("final_norm", "null")),
        "format": to.name,
        "converted_from": {"format": source.form.name, "output": source.folder},
        "model": source.model,
        "missing": missing[:100],
        "problems": problems,
    }  # fmt: skip


def _windows(lines: list[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    rest = iter(lines)
    while window := list(islice(rest, THREADS * 4)):
        yield window


def main() -> int:
    """Convert, or verify what was converted, in the run named by CTL_RUN_DIR; return the exit code."""
    parser = argparse.ArgumentParser()
    for name in ("--run", "--output", "--to"):
        parser.add_argument(name, required=True)
    parser.add_argument("--verify", action="store_true")
    asked = parser.parse_args()
    paths = RunPaths(os.environ["CTL_RUN_DIR"])
    events = EventWriter(paths.events, "driver", os.path.basename(paths.folder), os.environ.get("CTL_HOST", ""))
    try:
        source, to = load_source(asked.run), format_named(asked.to)
        if asked.verify:
            document = verify(source, to, asked.output, paths)
            write_json(paths.verify, document)
            print(f"ctl: verified: {counts_text(document['samples'])}")
            return 1 if document["problems"] else 0
        run(source, to, asked.output, paths, events)
    except ConfigError as error:
        ExceptionReporter(events, None).report(error, "config")
        print(f"ctl: {error}", file=sys.stderr)
        return CONFIG_EXIT
    except Exception as error:
        ExceptionReporter(events, None).report(error, "driver")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

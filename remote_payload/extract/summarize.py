"""The verify step: what the run promised against what lies in the output folder. Writes RUN/verify.json.

Every file named in a ledger is opened: header, dtype, shape, length and token hash must be what the ledger says; the
tensors themselves are not read again. Standard library only, so that it starts at once. Exit code 0: all is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from remote_payload.extract.formats import DTYPE_CODES, HalfFileError, SampleFacts, format_named
from remote_payload.extract.settings import CANARY, MANIFEST, REHEARSAL
from remote_payload.host.files import each_line, read_json, read_lines, write_json
from remote_payload.host.layout import RunPaths

DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}

LISTED = 10_000
"""Missing samples listed in verify.json; `samples.missing` counts them all, and the ledger names each."""


@dataclass(slots=True, kw_only=True)
class StateTotals:
    """One boundary over all samples; means are weighted by tokens. `add` takes a state of a ledger's line."""

    tokens: int = 0
    norm_sum: float = 0.0
    norm_max: float = 0.0
    nan: int = 0
    inf: int = 0
    zero_rows: int = 0

    def add(self, state: Mapping[str, Any], tokens: int) -> None:
        if state["norm_mean"] is not None:
            self.tokens += tokens
            self.norm_sum += state["norm_mean"] * tokens
            self.norm_max = max(self.norm_max, state["norm_max"])
        self.nan += state["nan"]
        self.inf += state["inf"]
        self.zero_rows += state["zero_rows"]


@dataclass(slots=True, kw_only=True)
class _Share:
    files: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        self.files += 1
        self.tokens += record["tokens"]
        self.bytes += record["bytes"]

    def to_dict(self) -> dict[str, int]:
        return {"files": self.files, "bytes": self.bytes}


@dataclass(slots=True, kw_only=True)
class _Findings:
    written: int = 0
    tokens: int = 0
    bytes: int = 0
    failed: dict[int, str] = field(default_factory=dict)  # index -> what is wrong with its file
    states: dict[int, StateTotals] = field(default_factory=dict)
    shapes: set[tuple[int, int, str]] = field(default_factory=set)  # (hidden, states, dtype)
    fresh: _Share = field(default_factory=_Share)
    kept: _Share = field(default_factory=_Share)  # from an earlier run


def verify(paths: RunPaths) -> dict[str, Any]:
    """Return the document for verify.json; its `problems` is empty if all is well.

    Raises ValueError if the run folder holds no plan of an extraction.
    """
    plan = read_json(paths.plan)
    if plan is None or not plan.get("extract"):
        raise ValueError(f"{paths.plan} is not the plan of an extraction")
    spec = plan["extract"]
    manifest = read_json(os.path.join(paths.folder, MANIFEST))
    driver = os.path.join(paths.ledger, "driver.jsonl")
    skipped = {record["index"] for record in each_line(driver) if "skipped" in record}
    if manifest is None:
        problem = _problem("never-started", "the engine never got ready to capture", "read the run's log and events")
        return {"samples": _counts(0, 0, len(skipped), 0, 0), "format": spec["format"], "problems": [problem]}
    ledgers = [driver, *_rank_ledgers(paths.ledger)]
    last = {record["index"]: place for place, record in _written(ledgers)}
    findings = _inspect_all((record for place, record in _written(ledgers) if last[record["index"]] == place), spec)
    number, count = manifest["shard"]
    expected = [index for index in range(number - 1, manifest["records"], count) if index not in skipped]
    missing = [index for index in expected if index not in last or index in findings.failed]
    seconds = _phase_seconds(paths.events)
    extract_s = seconds.get("capture", 0.0) + seconds.get("drain", 0.0)
    hidden, states, dtype = next(iter(findings.shapes), (manifest["hidden"], len(manifest["boundaries"]), None))
    return {
        "samples": _counts(manifest["expected"], findings.written, len(skipped), len(findings.failed), len(missing)),
        "tokens": findings.tokens,
        "bytes": findings.bytes,
        "boundaries": manifest["boundaries"],
        "states": [state_figures(boundary, findings.states.get(boundary)) for boundary in manifest["boundaries"]],
        "shape": {"hidden": hidden, "states": states, "dtype": dtype},
        "format": spec["format"],
        "model": spec["model"],
        "num_layers": manifest["num_layers"],
        "final_norm": manifest["final_norm"],
        "capture_path": manifest["capture_path"],
        "tokens_per_s": _rate(findings.fresh.tokens, extract_s),
        "bytes_per_s": _rate(findings.fresh.bytes, extract_s),
        "token_lengths": manifest["token_lengths"],
        "ranks": _by_rank(paths.ledger),
        "kept": findings.kept.to_dict(),
        "data": {"path": spec["data"], "read_as": manifest["data"], "records": manifest["records"]},
        "shard": manifest["shard"],
        "skipped": manifest["skipped"],
        "skipped_lines": manifest["skipped_lines"],
        "noted": manifest["noted"],
        "noted_lines": manifest["noted_lines"],
        "blank_lines": manifest["blank_lines"],
        "missing": missing[:LISTED],
        "timings": {"load_s": seconds.get("load"), "extract_s": round(extract_s, 3)},
        "versions": manifest["versions"],
        "repairs": manifest.get("repairs", []),
        "rehearsal": read_json(os.path.join(paths.folder, REHEARSAL)),
        "canary": read_json(os.path.join(paths.folder, CANARY)),
        "problems": _problems(findings, missing),
    }


def _inspect_all(records: Iterable[Mapping[str, Any]], spec: Mapping[str, Any]) -> _Findings:
    form, findings = format_named(spec["format"]), _Findings()
    for record in records:
        (findings.kept if record.get("kept") else findings.fresh).add(record)
        path = os.path.join(spec["output"], record["file"])
        try:
            found = form.inspect(path)
        except (OSError, HalfFileError) as error:
            findings.failed[record["index"]] = str(getattr(error, "strerror", None) or error)
            continue
        wrong = _contradiction(record, found)
        if wrong:
            findings.failed[record["index"]] = wrong
            continue
        findings.written += 1
        findings.tokens += record["tokens"]
        findings.bytes += record["bytes"]
        findings.shapes.add((found.shape[2], found.shape[1], DTYPE_NAMES[found.dtype]))
        for state in record["states"]:
            findings.states.setdefault(state["boundary"], StateTotals()).add(state, record["tokens"])
    return findings


def _contradiction(record: Mapping[str, Any], found: SampleFacts) -> str:
    for what, promised, real in (
        ("tokens", record["tokens"], found.shape[0]),
        ("states", len(record["states"]), found.shape[1]),
        ("bytes", record["bytes"], found.bytes),
        ("token hash", record["token_sha256"], found.token_sha256),
    ):
        if promised != real:
            return f"the ledger says {what} {promised}, the file {real}"
    return ""


def _problems(findings: _Findings, missing: list[int]) -> list[dict[str, str]]:
    problems = []
    absent = [index for index in missing if index not in findings.failed]
    if absent:
        what = f"{len(absent):,} samples were not written, the first is {absent[0]}"
        problems.append(_problem("missing-samples", what, 'run again with stale = "resume"'))
    if findings.failed:
        index, why = min(findings.failed.items())
        what = f"{len(findings.failed):,} sample files are not what was written; sample {index}: {why}"
        problems.append(_problem("bad-files", what, 'run again with stale = "resume": such files are written anew'))
    for boundary, totals in sorted(findings.states.items()):
        if totals.nan or totals.inf:
            what = f"boundary {boundary} holds {totals.nan} NaN and {totals.inf} Inf values"
            fix = "a wider store_dtype, if only Inf; else look at the model's dtype and quantization"
            problems.append(_problem("not-finite", what, fix))
    if len(findings.shapes) > 1:
        what = f"the files are of {len(findings.shapes)} shapes or dtypes: {sorted(findings.shapes)}"
        problems.append(_problem("mixed-shapes", what, "write into an empty folder"))
    return problems


def _problem(code: str, what: str, fix: str) -> dict[str, str]:
    return {"code": code, "what": what, "fix": fix}


def _counts(expected: int, written: int, skipped: int, failed: int, missing: int) -> dict[str, int]:
    return {"expected": expected, "written": written, "skipped": skipped, "failed": failed, "missing": missing}


def state_figures(boundary: int, totals: StateTotals | None) -> dict[str, Any]:
    """Return {"boundary", "norm_mean", "norm_max", "nan", "inf", "zero_rows"}: one of a summary's `states`."""
    totals = totals or StateTotals()
    some = totals.tokens > 0
    return {
        "boundary": boundary,
        "norm_mean": totals.norm_sum / totals.tokens if some else None,
        "norm_max": totals.norm_max if some else None,
        "nan": totals.nan,
        "inf": totals.inf,
        "zero_rows": totals.zero_rows,
    }


def _by_rank(folder: str) -> list[dict[str, Any]]:
    """Return the files and bytes that each rank wrote in this run."""
    shares: dict[int, _Share] = {}
    for path in _rank_ledgers(folder):
        share = shares[int(os.path.basename(path)[len("rank-") : -len(".jsonl")])] = _Share()
        for record in each_line(path):
            if "file" in record:
                share.add(record)
    return [{"rank": rank, **shares[rank].to_dict()} for rank in sorted(shares)]


def _rank_ledgers(folder: str) -> list[str]:
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name.startswith("rank-")]


def _written(ledgers: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line of a written sample with its number; never all of them at once, which takes gigabytes."""
    lines = (record for path in ledgers for record in each_line(path))
    yield from enumerate(record for record in lines if "file" in record)


def _phase_seconds(events: str) -> dict[str, float]:
    records = read_lines(os.path.join(events, "driver.jsonl"))
    return {r["name"]: r["seconds"] for r in records if r.get("type") == "phase" and r.get("status") == "done"}


def _rate(amount: int, seconds: float) -> float | None:
    return round(amount / seconds, 1) if seconds > 0 else None


def counts_text(samples: Mapping[str, int]) -> str:
    """Return the counts of a summary in words; what there is none of is not told."""
    others = [f"{samples[name]:,} {name}" for name in ("skipped", "failed", "missing") if samples[name]]
    return ", ".join([f"{samples['written']:,} of {samples['expected']:,} samples written", *others])


def main() -> int:
    """Write verify.json of the run named by CTL_RUN_DIR; return 0 if nothing is wrong, else 1."""
    paths = RunPaths(os.environ["CTL_RUN_DIR"])
    document = verify(paths)
    write_json(paths.verify, document)
    for problem in document["problems"]:
        print(f"ctl: {problem['code']}: {problem['what']}", file=sys.stderr)
    print(f"ctl: verified: {counts_text(document['samples'])}")
    return 1 if document["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

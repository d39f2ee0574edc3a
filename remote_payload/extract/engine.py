"""The extraction job: data set -> token ids -> vLLM -> sample files. Run as a module by the supervisor.

Phases, each an event with its seconds: `data` (render and check every sample), `load` (engine start and probe),
`capture` (prefill), `drain` (wait for the writers). Exit code 0: every sample is written; 2: the plan cannot be
(nothing was loaded); 1: anything else, with an `exception` event.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from remote_payload.extract import arrow, identity
from remote_payload.extract.collect import INDEX_KEY, PROBE_KEY, SPANS_KEY
from remote_payload.extract.dataset import NOTICES, DataSet, Sample, Samples, Skip, is_mine, read_samples
from remote_payload.extract.errors import CaptureError, ExceptionReporter
from remote_payload.extract.formats import format_named
from remote_payload.extract.progress import Counts, Progress
from remote_payload.extract.resume import kept_record, sweep
from remote_payload.extract.settings import (
    CONFIG_EXIT,
    MANIFEST,
    CaptureSettings,
    ConfigError,
    Job,
    ModelFacts,
    capture_settings,
    engine_arguments,
    load_job,
    read_model_facts,
)
from remote_payload.host.files import write_json
from remote_payload.host.journal import EventWriter, Journal

WINDOW_TOKENS = 1 << 20
"""Tokens handed to the engine at a time: many steps of any batch size, so that the ends of windows cost little."""

WINDOW_SAMPLES = 4096
"""The same bound for data sets of tiny samples."""

PROBE_PROMPTS, PROBE_TOKENS = 3, 64
"""Real prompts, cut: enough rows for a median, few enough to cost nothing beside a load."""

NOTED = {
    "truncated": "cut to max_seq_len",
    "split": "split where the template alters earlier turns",
    "no-loss": "kept although no token of theirs counts",
}

METHODS = {
    "generation": "the template's generation marks",
    "prefix": "rendered prefixes",
    "turns": "turn (the template alters earlier ones)",
}

RANK_TOLERANCE = 1e-2
"""Relative difference of a state's norm between ranks. They hold the same states; a rank with a share of them, or
with half a sum, is off by tens of per cent."""


class Extraction:
    """One run of the job."""

    def __init__(self, job: Job, events: EventWriter) -> None:
        self._job, self._events = job, events
        self._ledger = Journal(os.path.join(job.paths.ledger, "driver.jsonl"))
        self._skips: Counter[str] = Counter()
        number, count = job.spec["shard"]
        self._shard = (number, count)
        self._kept_header: Mapping[str, str] = {}

    def run(self) -> None:
        """Raises ConfigError before anything is loaded, and whatever vLLM or the capture raises later."""
        spec = self._job.spec
        with self._phase("data"):
            facts = read_model_facts(spec)
            settings = capture_settings(spec, facts)
            arguments = engine_arguments(self._job, settings, facts)
            data = self._read(facts)
            samples = data.samples.share(self._shard)
            if not len(samples):
                raise ConfigError(f"shard {spec['shard']} is empty: the data set gives {len(data.samples)} samples")
            pending, kept = self._resume(samples, settings, facts)
        llm, path = None, "kept"
        if len(pending):
            with self._phase("load"):
                llm = self._load(arguments)
                path = self._choose_path(llm, settings, pending)
        self._write_manifest(data, samples, settings, facts, path)
        skipped = sum(count for code, count in self._skips.items() if code not in NOTICES)
        progress = Progress(self._events, self._job.paths.ledger, total=len(samples), skipped=skipped, kept=kept)
        with progress:
            if llm is not None:
                with self._phase("capture"):
                    for window in _windows(pending):
                        _prefill(llm, window)
                with self._phase("drain"):
                    llm.collective_rpc("ctl_drain")
        if progress.done != len(samples):
            raise CaptureError(f"{progress.done} of {len(samples)} samples are on disk after the last writer ended")
        self._write_arrow(data)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self._events.emit("phase", name=name, status="started", text="")
        yield
        seconds = round(time.monotonic() - started, 3)
        self._events.emit("phase", name=name, status="done", text="", seconds=seconds)

    def _notice(self, level: str, code: str, text: str) -> None:
        self._events.emit("notice", level=level, code=code, text=text)

    def _read(self, facts: ModelFacts) -> DataSet:
        spec = self._job.spec

        def tokenizer() -> Any:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                spec["model"], revision=spec["revision"], trust_remote_code=spec["trust_remote_code"]
            )

        def skip(record: Skip) -> None:
            if not is_mine(record.index, self._shard):
                return  # another host's share accounts for it
            self._skips[record.code] += 1
            kind = "notice" if record.code in NOTICES else "skipped"
            self._ledger.append({"index": record.index, "line": record.line, kind: record.code, "why": record.why})

        data = read_samples(
            spec["data"], spec["data_kind"], max_samples=spec["max_samples"], max_seq_len=spec["max_seq_len"],
            over_long=spec["over_long"], vocabulary=facts.vocabulary, tokenizer=tokenizer, skip=skip,
        )  # fmt: skip
        self._notice("info", "data-kind", describe(data))
        for code, count in sorted(self._skips.items()):
            what = NOTED.get(code, f"skipped ({code})")
            self._notice("warn", f"data-{code}", f"{count} of the records were {what}; see ledger/driver.jsonl")
        if data.unmasked:
            text = f"{data.unmasked} samples have no loss mask: where one is stored, all their tokens count"
            self._notice("warn", "data-unmasked", text)
        return data

    def _write_arrow(self, data: DataSet) -> None:
        """Write the data set beside the files, if the format has one; without pyarrow say how to get it."""
        spec = self._job.spec
        if not format_named(spec["format"]).arrow:
            return
        try:
            arrow.write_data_set(
                spec["output"], data.samples, indexes=data.indexes, fingerprint=self._job.run_id.replace("-", "")
            )
        except ConfigError as error:
            text = f"the Arrow data set that speculators trains from was not written: {error}; then resume this run"
            self._notice("warn", "arrow-missing", text)

    def _resume(self, samples: Samples, settings: CaptureSettings, facts: ModelFacts) -> tuple[Samples, Counts]:
        """Return what is to be captured and what is there already."""
        kept = Counts()
        if not self._job.resume:
            return samples, kept
        swept, missing = sweep(self._job.spec["output"]), Samples()
        for sample in samples:
            record = kept_record(sample, self._job.spec, settings, facts)
            if record is None:
                missing.add(sample)
            else:
                if not kept.done:
                    form = format_named(self._job.spec["format"])
                    path = os.path.join(self._job.spec["output"], record["file"])
                    self._kept_header = form.inspect(path).metadata
                kept = kept.plus(record)
                self._ledger.append(record)
        self._notice("info", "resumed", f"{kept.done} samples are whole and kept, {len(swept)} half files deleted")
        return missing, kept

    def _load(self, arguments: dict[str, Any]) -> Any:
        # Compiled caches of capturing and plain runs are told apart by additional_config; see settings.CONFIG_KEY.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        return LLM(**arguments)

    def _choose_path(self, llm: Any, settings: CaptureSettings, samples: Samples) -> str:
        """Probe the engine and tell every rank where the states come from; return the path's name.

        Raises CaptureError if the ranks disagree, or if native states are demanded and not proved.
        """
        prompts = [sample.token_ids[:PROBE_TOKENS] for sample, _ in zip(samples, range(PROBE_PROMPTS), strict=False)]
        facts = llm.collective_rpc("ctl_facts")
        differs = identity.difference(self._kept_header, facts[0]["identity"])
        if differs:
            raise CaptureError(f"the samples that are there were captured with {differs}: write into an empty folder")
        native = all(rank["native"] for rank in facts)
        for kind in ("native", "hooks") if native else ("hooks",):
            llm.collective_rpc("ctl_probe", args=(kind,))
            _generate(llm, prompts, [{PROBE_KEY: number} for number in range(len(prompts))])
        proofs = llm.collective_rpc("ctl_proof")
        _check_ranks_agree(proofs)
        wanted = [b for b, _ in proofs[0]["norms"]]
        proved = sorted(set.intersection(*(set(proof["proved"]) for proof in proofs)))
        unproved = [b for b in wanted if b not in proved]
        if native and unproved:
            text = (
                f"the engine returns {proofs[0]['returned']} native states and does not prove boundaries {unproved}"
            )
            if settings.capture == "native" and (facts[0]["compiled"] or not proved):
                raise CaptureError(f'{text}: use capture = "auto" or "hooks"')
            self._notice("warn", "native-unproved", f"{text}: they are captured with hooks")
        path = str(llm.collective_rpc("ctl_use", args=(proved,))[0])
        errors = ", ".join(f"{b}: {error:.1e}" for b, error in proofs[0]["errors"])
        text = f"states are captured by: {path}" + (f" (native against hooks, {errors})" if errors else "")
        self._notice("info", "capture-path", text)
        return path

    def _write_manifest(
        self, data: DataSet, samples: Samples, settings: CaptureSettings, facts: ModelFacts, path: str
    ) -> None:
        """Say what the verify step must find; it has no other source for it."""
        import safetensors
        import torch
        import transformers
        import vllm

        versions = {
            "vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
            "safetensors": safetensors.__version__, "python": platform.python_version(),
        }  # fmt: skip
        write_json(
            os.path.join(self._job.paths.folder, MANIFEST),
            {
                "expected": len(samples), "tokens": samples.tokens, "records": data.indexes,
                "shard": list(self._shard), "data": describe(data),
                "skipped": dict(self._skips), "boundaries": list(settings.boundaries), "num_layers": facts.layers,
                "hidden": facts.hidden, "final_norm": settings.final_norm, "capture_path": path,
                "token_lengths": samples.histogram(), "versions": versions,
            },
        )  # fmt: skip


def describe(data: DataSet) -> str:
    """Return in words what the data set was taken for."""
    kinds = " and ".join(f"{count} {kind} records" for kind, count in data.kinds.items())
    methods = ", ".join(f"{count} by {METHODS[method]}" for method, count in data.methods.items())
    return f"{data.container}: {kinds}" + (f"; loss mask of {methods}" if methods else "")


def _windows(samples: Samples) -> Iterator[list[Sample]]:
    window: list[Sample] = []
    tokens = 0
    for sample in samples:
        window.append(sample)
        tokens += len(sample.token_ids)
        if tokens >= WINDOW_TOKENS or len(window) >= WINDOW_SAMPLES:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def _prefill(llm: Any, window: list[Sample]) -> None:
    extra: list[dict[str, Any]] = []
    for sample in window:
        spans = sample.loss_spans()
        extra.append({INDEX_KEY: sample.index} | ({SPANS_KEY: spans} if spans is not None else {}))
    _generate(llm, [sample.token_ids for sample in window], extra)


def _generate(llm: Any, prompts: list[list[int]], extra: list[dict[str, Any]]) -> None:
    from vllm import SamplingParams

    parameters = [SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=keys) for keys in extra]
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)


def _check_ranks_agree(proofs: Sequence[dict[str, Any]]) -> None:
    for figures in zip(*(proof["norms"] for proof in proofs), strict=True):
        norms = [norm for _, norm in figures]
        if any(math.isnan(norm) for norm in norms):
            raise CaptureError(f"the probe's states at boundary {figures[0][0]} hold NaN")
        if max(norms) - min(norms) > RANK_TOLERANCE * max(norms):
            raise CaptureError(f"the ranks hold different states at boundary {figures[0][0]}: norms {norms}")


def main() -> int:
    """Run the job named by CTL_RUN_DIR; return the exit code."""
    try:
        job = load_job(os.environ)
    except ConfigError as error:
        print(f"ctl: {error}", file=sys.stderr)
        return CONFIG_EXIT
    events = EventWriter(job.paths.events, "driver", job.run_id, job.host)
    try:
        Extraction(job, events).run()
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

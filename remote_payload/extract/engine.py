"""The extraction job: data set -> token ids -> vLLM -> sample files. Run as a module by the supervisor.

Phases, each an event with its seconds: `data` (render and check every sample), `load` (engine start), `probe` (its
first steps), `canary`, `capture` (prefill), `drain` (wait for the writers), `canary-end`. Exit code 0: every sample
is written; 2: the plan cannot be (nothing was loaded); 3: the canary failed; 1: anything else, with an `exception`
event.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from remote_payload.extract.canary_run import CanaryError, CanaryGuard, Generate
from remote_payload.extract.collect import INDEX_KEY, PROBE_KEY, SPANS_KEY
from remote_payload.extract.dataset import Sample, Samples, Skip, read_samples
from remote_payload.extract.errors import CaptureError, ExceptionReporter
from remote_payload.extract.progress import Counts, Progress
from remote_payload.extract.resume import kept_record, sweep
from remote_payload.extract.settings import (
    CANARY_EXIT,
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

RANK_TOLERANCE = 1e-2
"""Relative difference of a state's norm between ranks. They hold the same states; a rank with a share of them, or
with half a sum, is off by tens of per cent."""


class Extraction:
    """One run of the job."""

    def __init__(self, job: Job, events: EventWriter) -> None:
        self._job, self._events = job, events
        self._ledger = Journal(os.path.join(job.paths.ledger, "driver.jsonl"))
        self._skips: Counter[str] = Counter()
        self._repairs: list[str] = []  # what the worker found broken in this vLLM and put right

    def run(self) -> None:
        """Raises ConfigError before anything is loaded, and whatever vLLM or the capture raises later."""
        spec = self._job.spec
        with self._phase("data"):
            facts = read_model_facts(spec)
            settings = capture_settings(spec, facts)
            arguments = engine_arguments(self._job, settings, facts)
            samples = self._read(facts)
            pending, kept = self._resume(samples, settings, facts)
        llm, path = None, "kept"
        if len(pending):
            with self._phase("load"):
                llm = self._load(arguments)
            with self._phase("probe"):
                path = self._choose_path(llm, settings, pending)
                guard = CanaryGuard(llm, _answers_of(llm), self._job, facts, pending, self._events)
            with self._phase("canary"):
                guard.check("start")
        self._write_manifest(samples, settings, facts, path)
        skipped = sum(count for code, count in self._skips.items() if code != "truncated")
        progress = Progress(self._events, self._job.paths.ledger, total=len(samples), skipped=skipped, kept=kept)
        with progress:
            if llm is not None:
                with self._phase("capture"):
                    for window in _windows(pending):
                        _prefill(llm, window)
                with self._phase("drain"):
                    llm.collective_rpc("ctl_drain")
                with self._phase("canary-end"):
                    guard.check("end")
        if progress.done != len(samples):
            raise CaptureError(f"{progress.done} of {len(samples)} samples are on disk after the last writer ended")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self._events.emit("phase", name=name, status="started", text="")
        yield
        seconds = round(time.monotonic() - started, 3)
        self._events.emit("phase", name=name, status="done", text="", seconds=seconds)

    def _notice(self, level: str, code: str, text: str) -> None:
        self._events.emit("notice", level=level, code=code, text=text)

    def _read(self, facts: ModelFacts) -> Samples:
        spec = self._job.spec

        def tokenizer() -> Any:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                spec["model"], revision=spec["revision"], trust_remote_code=spec["trust_remote_code"]
            )

        def skip(record: Skip) -> None:
            self._skips[record.code] += 1
            kind = "notice" if record.code == "truncated" else "skipped"
            self._ledger.append({"index": record.index, "line": record.line, kind: record.code, "why": record.why})

        samples = read_samples(
            spec["data"], spec["data_kind"], max_samples=spec["max_samples"], max_seq_len=spec["max_seq_len"],
            vocabulary=facts.vocabulary, tokenizer=tokenizer, skip=skip,
        )  # fmt: skip
        for code, count in sorted(self._skips.items()):
            what = "cut to max_seq_len" if code == "truncated" else f"skipped ({code})"
            self._notice("warn", f"data-{code}", f"{count} of the records were {what}; see ledger/driver.jsonl")
        return samples

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
        self._repairs = list(facts[0]["repairs"])
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

    def _write_manifest(self, samples: Samples, settings: CaptureSettings, facts: ModelFacts, path: str) -> None:
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
                "expected": len(samples), "tokens": samples.tokens, "records": samples.indexes[-1] + 1,
                "skipped": dict(self._skips), "boundaries": list(settings.boundaries), "num_layers": facts.layers,
                "hidden": facts.hidden, "final_norm": settings.final_norm, "capture_path": path,
                "token_lengths": samples.histogram(), "versions": versions, "repairs": self._repairs,
            },
        )  # fmt: skip


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


def _generate(
    llm: Any, prompts: list[list[int]], extra: list[dict[str, Any]], logprobs: int | None = None
) -> list[Any]:
    from vllm import SamplingParams

    parameters = [
        SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=keys, logprobs=logprobs)
        for keys in extra
    ]
    return list(llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False))


def _answers_of(llm: Any) -> Generate:
    """Return what the canary runs prompts with: it needs the engine's own next token and its log probability."""

    def generate(prompts: list[list[int]], extra: list[dict[str, Any]]) -> list[tuple[int, float]]:
        outputs = [output.outputs[0] for output in _generate(llm, prompts, extra, logprobs=1)]
        return [(out.token_ids[0], out.logprobs[0][out.token_ids[0]].logprob) for out in outputs]

    return generate


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
    except CanaryError as error:
        print(f"ctl: {error}", file=sys.stderr)  # its findings are `problem` events: a traceback would say no more
        return CANARY_EXIT
    except Exception as error:
        ExceptionReporter(events, None).report(error, "driver")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

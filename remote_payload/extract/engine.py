"""The extraction job: data set -> token ids -> vLLM -> sample files. Run as a module by the supervisor.

Phases, each an event with its seconds: `data` (render and check every sample), `resume` (prove what is there), `load`
(engine start), `probe` (its first steps), `canary`, `capture` (prefill), `drain` (wait for the writers),
`canary-end`. Exit code 0: every sample is written; 2: the plan cannot be (nothing was loaded); 3: the canary failed;
1: anything else, with an `exception` event.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from remote_payload.extract import arrow, output
from remote_payload.extract.admission import Admission, Room
from remote_payload.extract.canary_run import CanaryError, CanaryGuard, Generate
from remote_payload.extract.dataset import NOTICES, DataSet, Samples, Skip, is_mine, read_samples
from remote_payload.extract.errors import CaptureError, ExceptionReporter
from remote_payload.extract.formats import SCALE_BYTES, format_named, named
from remote_payload.extract.identity import difference
from remote_payload.extract.pool import DEFAULT_BUFFER_BYTES
from remote_payload.extract.probe import choose_path
from remote_payload.extract.progress import Counts, LedgerTail, PatientEvents, Progress
from remote_payload.extract.refused import Refused
from remote_payload.extract.requests import VllmEngine, generate, shut_down
from remote_payload.extract.resume import require_same_kind, resume
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
from remote_payload.extract.watch import EngineWatch
from remote_payload.host.files import write_json
from remote_payload.host.journal import EventWriter, Journal

LOOK_S = 30.0
"""Between two notices while existing files are proved, which takes hours for tens of terabytes."""

ARROW_ATTEMPTS = 2
"""A run that begins in the same folder takes our unfinished file for a killed writer's, once, and removes it."""

WHY_LIMIT = 500
"""Characters of an error repeated in the ledger for each sample that it took along."""

METHODS = {
    "generation": "the template's generation marks",
    "prefix": "rendered prefixes",
    "turns": "turn (the template alters earlier ones)",
}


class Extraction:
    """One run of the job."""

    def __init__(self, job: Job, events: PatientEvents) -> None:
        self._job, self._events = job, events
        self._ledger = Journal(os.path.join(job.paths.ledger, "driver.jsonl"))
        self._refused = Refused()
        self._repairs: list[str] = []  # what the worker found broken in this vLLM and put right
        self._llm: Any = None
        self._guard: CanaryGuard | None = None
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
                raise ConfigError(f"shard {spec['shard']} is empty: the data set gives {len(data.samples):,} samples")
        pending, kept = self._take_over(samples, output.identity(spec, settings, facts))
        progress = Progress(
            self._events, total=len(samples), skipped=self._refused.skipped, records=data.indexes, kept=kept
        )
        progress.beat()  # before the long load, so that an end in its midst can say of how many
        watch = EngineWatch(self._job.paths.events, partial(self._give_up, pending))
        try:
            with watch:
                path = "kept"
                if len(pending):
                    with self._phase("load"):
                        self._llm = self._load(arguments)
                        watch.ranks(rank["pid"] for rank in self._llm.collective_rpc("ctl_facts"))
                    with self._phase("probe"):
                        path = self._choose_path(self._llm, settings, pending)
                        self._guard = CanaryGuard(
                            self._llm, _answers_of(self._llm, watch), self._job, facts, pending, self._events
                        )
                    with self._phase("canary"):
                        self._guard.check("start")
                self._write_manifest(data, samples, settings, facts, path)
                self._capture(pending, progress, total=len(samples))
        except Exception as error:
            if self._llm is not None:
                shut_down(self._llm)
            watch.kill_left()
            self._record_failures(pending, watch.found or f"{type(error).__name__}: {error}")
            raise
        self._write_arrow(data)

    def _give_up(self, pending: Samples, error: Exception) -> None:
        ExceptionReporter(self._events, None).report(error, "driver")
        self._record_failures(pending, str(error))

    def _capture(self, pending: Samples, progress: Progress, *, total: int) -> None:
        with progress:
            if self._llm is not None:
                tail = LedgerTail(self._job.paths.ledger)
                admission = Admission(VllmEngine(self._llm), self._room(), tail, progress, self._notice)
                with self._phase("capture"):
                    admission.run(pending)
                with self._phase("drain"):
                    self._tell(self._llm.collective_rpc("ctl_drain"))
                if self._guard is not None:
                    with self._phase("canary-end"):
                        self._guard.check("end")
        if progress.done != total:
            raise CaptureError(f"{progress.done:,} of {total:,} samples are on disk after the last writer ended")

    def _tell(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        peak = max(rank["buffer_peak"] for rank in ranks)
        self._notice("info", "buffers", f"states took at most {peak:,} bytes of a rank's host buffers")
        if ranks[0]["restarted"]:  # every rank follows the same scheduler
            text = (
                f"{ranks[0]['restarted']} prompts were preempted half-way and captured anew (the KV cache was full)"
            )
            self._notice("info", "preempted", text)

    def _room(self) -> Room:
        ranks, spec = self._llm.collective_rpc("ctl_facts"), self._job.spec
        form, fp8 = format_named(spec["format"]), spec["store_dtype"] == "fp8"
        return Room(
            output=spec["output"],
            ranks=len(ranks),
            row_bytes=ranks[0]["row_bytes"],
            buffer_bytes=spec.get("buffer_bytes") or DEFAULT_BUFFER_BYTES,
            side_bytes=form.side_bytes + (SCALE_BYTES if fp8 else 0),
            rewrites=form.head is None or fp8,
            shard=self._shard,
        )

    def _record_failures(self, pending: Samples, why: str) -> None:
        """Give every sample that was not written its line, once nothing can write it any more."""
        written = {record["index"] for record in LedgerTail(self._job.paths.ledger).read()}
        why = why[:WHY_LIMIT]
        with contextlib.suppress(OSError):  # a full disk must not hide the cause; verify counts them as missing
            for index, record_id in pending.records():
                if index not in written:
                    self._ledger.append(named({"index": index, "failed": "job-failed", "why": why}, record_id))

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
            self._refused.add(record)
            kind = "notice" if record.code in NOTICES else "skipped"
            line = {"index": record.index, "line": record.line, kind: record.code, "why": record.why}
            self._ledger.append(named(line, record.record_id))

        data = read_samples(
            spec["data"], spec["data_kind"], max_samples=spec["max_samples"], max_seq_len=spec["max_seq_len"],
            over_long=spec["over_long"], vocabulary=facts.vocabulary, tokenizer=tokenizer, skip=skip,
        )  # fmt: skip
        self._notice("info", "data-kind", describe(data))
        for code, text in self._refused.notices(data.container):
            self._notice("warn", f"data-{code}", text)
        if data.unmasked:
            have = "1 sample has" if data.unmasked == 1 else f"{data.unmasked:,} samples have"
            text = f"{have} no loss mask: where one is stored, every token counts"
            self._notice("warn", "data-unmasked", text)
        if repeated := data.samples.repeated():
            text = f"{repeated:,} of {len(data.samples):,} samples have the same tokens as an earlier one"
            if repeated > len(data.samples) // 2:
                text += ": the tokenizer may not know the words of this data"
            self._notice("warn" if repeated > len(data.samples) // 10 else "info", "data-repeated", text)
        return data

    def _write_arrow(self, data: DataSet) -> None:
        """Write the data set beside the files, if the format has one; without pyarrow say how to get it."""
        spec = self._job.spec
        if not format_named(spec["format"]).arrow:
            return
        fingerprint = self._job.run_id.replace("-", "")
        for attempt in range(ARROW_ATTEMPTS):
            try:
                arrow.write_data_set(spec["output"], data.samples, indexes=data.indexes, fingerprint=fingerprint)
                return
            except ConfigError as error:
                text = (
                    f"the Arrow data set that speculators trains from was not written: {error}; then resume this run"
                )
                self._notice("warn", "arrow-missing", text)
                return
            except FileNotFoundError:
                if attempt == ARROW_ATTEMPTS - 1:
                    raise

    def _take_over(self, samples: Samples, identity: Mapping[str, Any]) -> tuple[Samples, Counts]:
        """Return what is to be captured, and what is there already and proved. Raises ConfigError."""
        spec, kept = self._job.spec, Counts()
        if self._job.resume:
            require_same_kind(spec["output"], spec["format"], identity)
        output.settle(spec["output"], identity)
        if self._job.resume:

            def keep(record: dict[str, Any]) -> None:
                nonlocal kept
                kept = kept.plus(record)
                self._ledger.append({**record, "seconds": 0.0, "kept": True})

            with self._phase("resume"):
                found = resume(samples, spec, identity, self._job.run_id, keep, self._looking())
            self._notice("warn" if found.bad else "info", "resumed", found.text())
            samples, self._kept_header = found.missing, found.header
        return samples, kept

    def _looking(self) -> Callable[[int, int], None]:
        said = time.monotonic()

        def told(looked: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said >= LOOK_S:
                said = time.monotonic()
                self._notice("info", "resume-check", f"{looked:,} of {total:,} existing files are looked at")

        return told

    def _load(self, arguments: dict[str, Any]) -> Any:
        # Compiled caches of capturing and plain runs are told apart by additional_config; see settings.CONFIG_KEY.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        return LLM(**arguments)

    def _choose_path(self, llm: Any, settings: CaptureSettings, samples: Samples) -> str:
        """Return `probe.choose_path`. Raises CaptureError, also if the samples there are of another engine."""
        facts = llm.collective_rpc("ctl_facts")
        self._repairs = list(facts[0]["repairs"])
        differs = difference(self._kept_header, facts[0]["identity"])
        if differs:
            raise CaptureError(f"the samples that are there were captured with {differs}: write into an empty folder")
        return choose_path(llm, facts, settings, samples, self._notice)

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
                **self._refused.document(),
                "blank_lines": data.blank.count, "boundaries": list(settings.boundaries),
                "num_layers": facts.layers, "hidden": facts.hidden,
                "final_norm": settings.final_norm, "capture_path": path,
                "token_lengths": samples.histogram(), "versions": versions, "repairs": self._repairs,
            },
        )  # fmt: skip


def describe(data: DataSet) -> str:
    """Return in words what the data set was taken for."""
    kinds = " and ".join(f"{count:,} {kind} records" for kind, count in data.kinds.items())
    methods = ", ".join(f"{count:,} by {METHODS[method]}" for method, count in data.methods.items())
    return f"{data.container}: {kinds}" + (f"; loss mask of {methods}" if methods else "")


def _answers_of(llm: Any, watch: EngineWatch) -> Generate:
    """Return what the canary runs prompts with: it needs the engine's own next token and its log probability.

    What the canary would say of the rows of a rank that raised is beside the point, so that comes first.
    """

    def answer(prompts: list[list[int]], extra: list[dict[str, Any]]) -> list[tuple[int, float]]:
        outputs = [output.outputs[0] for output in generate(llm, prompts, extra, logprobs=1)]
        watch.check()
        return [(out.token_ids[0], out.logprobs[0][out.token_ids[0]].logprob) for out in outputs]

    return answer


def main() -> int:
    """Run the job named by CTL_RUN_DIR; return the exit code."""
    try:
        job = load_job(os.environ)
    except ConfigError as error:
        print(f"ctl: {error}", file=sys.stderr)
        return CONFIG_EXIT
    events = PatientEvents(EventWriter(job.paths.events, "driver", job.run_id, job.host))
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

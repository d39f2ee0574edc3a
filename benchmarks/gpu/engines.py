"""Engines of the benchmarks: their arguments, a timed prefill, and the product's own engine with its worker."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import DATA, MEMORY, MODELS, NO_FUSED_ALLREDUCE, ROOT

WARM_UP = 20
MAX_SEQ_LEN = 4095
KV_BYTES = 10 << 30  # several engines share a GPU; 72,000 tokens of Qwen3-8B, four full steps
ACCELERATOR = os.environ.get("BENCH_ACCELERATOR", "cuda")  # "cpu" tries the scripts; asking torch would break forks


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What `engine` and `Capturing` read."""
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--engine", default="{}", help="JSON, further arguments of the engine")
    parser.add_argument("--store-dtype", default="auto")
    parser.add_argument("--prompts", default="prompts.jsonl")
    parser.add_argument("--output", default=str(MEMORY))


def engine(arguments: argparse.Namespace, eager: bool) -> dict[str, Any]:
    return {
        "tensor_parallel_size": arguments.tp, "enforce_eager": eager, "load_format": "dummy",
        "max_num_batched_tokens": arguments.batched_tokens, "max_num_seqs": arguments.seqs,
        "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": KV_BYTES, "compilation_config": NO_FUSED_ALLREDUCE,
        **json.loads(arguments.engine),
    }  # fmt: skip


def other_engine(arguments: argparse.Namespace, eager: bool) -> dict[str, Any]:
    """Return the arguments of an engine that is not the product's, as near to it as can be."""
    return {
        "model": str(MODELS / arguments.model), "dtype": "bfloat16", "skip_tokenizer_init": True,
        "max_model_len": MAX_SEQ_LEN + 1, "enable_prefix_caching": False, "disable_log_stats": True,
        **engine(arguments, eager),
    }  # fmt: skip


def boundaries(model: Path) -> list[int]:
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    return [2, layers // 2, layers - 3, layers]


def time_generate(llm: Any, prompts: list[list[int]], finish: Callable[[], None]) -> float:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, detokenize=False, temperature=0.0)
    started = time.monotonic()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    finish()
    return time.monotonic() - started


class Capturing:
    """The product's engine with its worker (or `worker`, a subclass), proved and ready to capture."""

    def __init__(
        self, arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path, worker: str = ""
    ) -> None:
        from support.extraction import make_run

        from remote_payload.extract import engine as driver
        from remote_payload.extract.dataset import Sample, Samples
        from remote_payload.extract.progress import PatientEvents
        from remote_payload.extract.settings import capture_settings, engine_arguments, load_job, read_model_facts
        from remote_payload.host.journal import EventWriter

        run = make_run(
            ROOT / "fast" / f"{arguments.model}-{os.getpid()}", model=str(MODELS / arguments.model),
            data=str(DATA / arguments.prompts), dtype="bfloat16", max_seq_len=MAX_SEQ_LEN, output=str(output),
            engine=engine(arguments, eager), accelerator=ACCELERATOR,
            store_dtype=arguments.store_dtype,
        )  # fmt: skip
        os.environ.update(CTL_RUN_DIR=str(run.folder), CTL_HOST="here")
        job = load_job(os.environ)
        facts = read_model_facts(job.spec)
        settings = capture_settings(job.spec, facts)
        self._events = PatientEvents(EventWriter(job.paths.events, "driver", job.run_id, job.host))
        extraction = driver.Extraction(job, self._events)
        given = engine_arguments(job, settings, facts)
        self.llm = extraction._llm = extraction._load({**given, **({"worker_cls": worker} if worker else {})})
        self.samples = Samples()
        for index, ids in enumerate(prompts):
            self.samples.add(Sample(index=index, token_ids=ids, loss_mask=None))
        self.path = extraction._choose_path(self.llm, settings, self.samples)
        self._room = extraction._room()
        self._ledgers = job.paths.ledger
        self._rounds = 0

    def capture(self, count: int, first: int = 0) -> tuple[float, float]:
        """Capture `count` samples from `first` on; return the seconds until the last file, and of what followed."""
        from remote_payload.extract.admission import Admission
        from remote_payload.extract.progress import Counts, LedgerTail, Progress
        from remote_payload.extract.requests import VllmEngine

        self._rounds += 1
        tail, inner, number = LedgerTail(self._ledgers), VllmEngine(self.llm), self._rounds
        for _ in tail.read():
            pass  # the lines of earlier rounds, one by one: a list of them would be taken for growth

        class Numbered:
            """Every round's requests under names of their own."""

            step, busy, status = inner.step, inner.busy, inner.status

            def add(self, request_id: str, sample: Any) -> None:
                inner.add(f"{number}.{request_id}", sample)

        wanted = list(itertools.islice(self.samples, first, first + count))
        started = time.monotonic()
        with Progress(self._events, total=count, skipped=0, kept=Counts()) as progress:
            Admission(Numbered(), self._room, tail, progress, _say).run(wanted)
        written = time.monotonic()
        self.llm.collective_rpc("ctl_drain")
        return written - started, time.monotonic() - written


def _say(level: str, code: str, text: str) -> None:
    print(level, code, text, flush=True)

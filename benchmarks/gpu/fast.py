"""How fast: prefill with and without capture, the same prompts, one engine after another; files on disk at the end.

    python fast.py [--model qwen3-8b] [--tp 1] [--rows plain-eager,ours-eager,...] [--output /dev/shm/ctl-gpu]

Rows: `plain` captures nothing; `ours` is the product's own worker and driver; `vllm` is vLLM's own
`extract_hidden_states` with its ExampleHiddenStatesConnector in process; `served` is the same connector behind
`vllm serve`, asked by speculators' own client (CTL_SPECULATORS_CLIENT: its vllm_client.py) as its offline generator
asks. Every row is a process of its own, warmed up with the same first prompts, and is timed from the first prompt
handed over to the last file written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import (
    DATA,
    HOST_ENV,
    MEMORY,
    MODELS,
    NO_FUSED_ALLREDUCE,
    OUT,
    ROOT,
    gpu_state,
    print_table,
    run_child,
    write_result,
)
from flops import prefill_flops

ROWS = ("plain-compiled", "ours-compiled", "plain-eager", "ours-eager", "vllm-compiled")
WARM_UP = 20
ROUNDS = 2  # the same for every row: their spread says which differences mean something
ROW_LIMIT_S = 240.0  # a first engine spent 97 s before its first step
FILES_LIMIT_S = 60.0
MAX_SEQ_LEN = 4095
ACCELERATOR = os.environ.get("BENCH_ACCELERATOR", "cuda")  # "cpu" tries the scripts; asking torch would break forks


def engine(arguments: argparse.Namespace, eager: bool) -> dict[str, Any]:
    return {
        "tensor_parallel_size": arguments.tp, "enforce_eager": eager, "load_format": "dummy",
        "max_num_batched_tokens": arguments.batched_tokens, "max_num_seqs": arguments.seqs,
        "gpu_memory_utilization": 0.8, "compilation_config": NO_FUSED_ALLREDUCE,
        **json.loads(arguments.engine),
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


def plain(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> list[float]:
    """Return the seconds of each round."""
    from vllm import LLM

    llm = LLM(**_other_engine(arguments, eager))
    time_generate(llm, prompts[:WARM_UP], lambda: None)
    return [time_generate(llm, prompts, lambda: None) for _ in range(ROUNDS)]


def connector(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> list[float]:
    from vllm import LLM

    llm = LLM(**_other_engine(arguments, eager), **_connector(arguments, output))

    def wait(count: int) -> Callable[[], None]:
        def files() -> None:
            deadline = time.monotonic() + FILES_LIMIT_S
            while len(list(output.glob("*.safetensors"))) < count and time.monotonic() < deadline:
                time.sleep(0.02)

        return files

    time_generate(llm, prompts[:WARM_UP], wait(WARM_UP))
    seconds = []
    for _ in range(ROUNDS):
        for file in output.iterdir():
            file.unlink()
        seconds.append(time_generate(llm, prompts, wait(len(prompts))))
    return seconds


def _connector(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    layers = boundaries(MODELS / arguments.model)
    return {
        "speculative_config": {
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(output)},
        },
    }  # fmt: skip


def served(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> list[float]:
    """Behind `vllm serve`."""
    from served import Server

    options = {**_other_engine(arguments, eager), **_connector(arguments, output)}
    del options["skip_tokenizer_init"]  # a server answers in text
    with Server(options, output) as server:
        server.ask(prompts[:WARM_UP])
        return [server.ask(prompts) for _ in range(ROUNDS)]


def _other_engine(arguments: argparse.Namespace, eager: bool) -> dict[str, Any]:
    return {
        "model": str(MODELS / arguments.model), "dtype": "bfloat16", "skip_tokenizer_init": True,
        "max_model_len": MAX_SEQ_LEN + 1, "enable_prefix_caching": False, "disable_log_stats": True,
        **engine(arguments, eager),
    }  # fmt: skip


def ours(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> list[float]:
    """The product's own worker and admission, so that only prefill and writing are timed, as for the others."""
    extraction = Capturing(arguments, eager, prompts, output)
    print("PATH", extraction.path, flush=True)
    extraction.capture(WARM_UP)
    return [sum(extraction.capture(len(prompts))) for _ in range(ROUNDS)]


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


KINDS = {"plain": plain, "ours": ours, "vllm": connector, "served": served}


def child(arguments: argparse.Namespace, row: str) -> int:
    kind, mode = row.split("-")
    output = Path(arguments.output) / row
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()]
    started = time.monotonic()
    seconds = KINDS[kind](arguments, mode == "eager", prompts, output)
    files = list(output.rglob("*.safetensors"))
    tokens = sum(map(len, prompts))
    config = json.loads((MODELS / arguments.model / "config.json").read_text())
    result = {
        "row": row, "prompts": len(prompts), "tokens": tokens, "seconds": [round(s, 3) for s in seconds],
        "tokens_per_s": round(tokens * len(seconds) / sum(seconds)),
        "model_tflops": round(prefill_flops(config, prompts) * len(seconds) / sum(seconds) / 1e12, 1),
        "files": len(files),
        "gb": round(sum(file.stat().st_size for file in files) / 1e9, 2),
        "load_s": round(time.monotonic() - started - sum(seconds), 1), "gpu_mib": gpu_state()["memory_mib"],
    }  # fmt: skip
    print("RESULT", json.dumps(result), flush=True)
    shutil.rmtree(output)
    return 0


def matrix_rate() -> float:
    """Return the bf16 matrix rate in TFLOP/s, on random data, as the median of 20 products of 8192."""
    import torch

    one, other = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(25):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        one @ other
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return round(2 * 8192**3 / (sorted(times[5:])[10] / 1e3) / 1e12, 1)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--tag", default="")
    parser.add_argument("--child", help="run one row in this process")
    arguments = parser.parse_args()
    os.environ.update(HOST_ENV)
    if arguments.child:
        return child(arguments, arguments.child)
    part = f"fast-{arguments.model}-tp{arguments.tp}{arguments.tag}"
    rows: list[dict[str, Any]] = []
    rate = None
    for row in arguments.rows.split(","):
        ended = run_child(
            [sys.executable, __file__, *sys.argv[1:], "--child", row], name=f"{part}-{row}", limit_s=ROW_LIMIT_S
        )
        lines = ended.log.read_text(errors="replace").splitlines()
        found = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
        path = [line.removeprefix("PATH ") for line in lines if line.startswith("PATH ")]
        result = found[0] if found else {"row": row, "failed": ended.code, "wall_s": ended.seconds}
        base = next((r for r in rows if r["row"] == f"plain-{row.split('-')[1]}"), None)
        if base and found:
            result["of_plain"] = round(result["tokens_per_s"] / base["tokens_per_s"], 4)
        rows.append({**result, **({"path": path[0]} if path else {})})
        print(json.dumps(rows[-1]), flush=True)
        write_result(part, {"command": " ".join(sys.argv), "matrix_tflops": rate, "rows": rows})
    rate = matrix_rate()
    write_result(part, {"command": " ".join(sys.argv), "matrix_tflops": rate, "rows": rows})
    keys = ("row", "tokens", "seconds", "tokens_per_s", "model_tflops", "of_plain", "files", "gb", "load_s", "path")
    print_table(
        f"{arguments.model}, TP={arguments.tp}, {rate} TFLOP/s", [{k: r.get(k, "") for k in keys} for r in rows]
    )
    return 0 if all("failed" not in row for row in rows) else 1


if __name__ == "__main__":
    print(f"results in {OUT}") if "--child" not in sys.argv else None
    sys.exit(main())

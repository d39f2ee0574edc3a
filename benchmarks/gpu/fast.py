"""How fast: prefill with and without capture, the same prompts on the same GPU in turns; files on disk at the end.

    python fast.py [--model qwen3-8b] [--tp 1] [--modes compiled,eager] [--output /dev/shm/ctl-gpu]

Rows of each mode: `plain` captures nothing; `ours` is the product's own worker and driver; `vllm` is vLLM's own
`extract_hidden_states` with its ExampleHiddenStatesConnector in process; `served` is the same connector behind
`vllm serve`, asked by speculators' own client (CTL_SPECULATORS_CLIENT: its vllm_client.py) as its offline generator
asks. Every row is a process of its own, warmed up with the same first prompts, and a round is timed from the first
prompt handed over to the last file written. The engines of a mode are loaded at once and take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import DATA, HOST_ENV, MODELS, OUT, print_table, write_result
from engines import WARM_UP, Capturing, add_engine_options, boundaries, other_engine, time_generate
from flops import prefill_flops
from together import Child, serve_rounds, take_turns

KINDS = ("plain", "ours", "vllm", "served")
MODES = ("compiled", "eager")
ROUNDS = 2  # the same for every row: their spread says which differences mean something
FIRST = 1  # round that is not counted: it is the first to touch the memory that the files go to
DROPS_LAST = frozenset({"DeepseekV3ForCausalLM"})
"""Classes whose last boundary vLLM 0.24 drops, at which its own capture fails: it gets the one before."""

FILES_LIMIT_S = 60.0

Ready = tuple[dict[str, Any], Callable[[], float]]
"""What is known of an engine, and a round: prefill all prompts, write their files, return the seconds."""


@contextmanager
def plain(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> Iterator[Ready]:
    from vllm import LLM

    llm = LLM(**other_engine(arguments, eager))
    time_generate(llm, prompts[:WARM_UP], lambda: None)
    yield {}, lambda: time_generate(llm, prompts, lambda: None)


@contextmanager
def ours(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> Iterator[Ready]:
    """The product's own worker and admission, so that only prefill and writing are timed, as for the others."""
    extraction = Capturing(arguments, eager, prompts, output)
    extraction.capture(WARM_UP)
    yield {"path": extraction.path}, lambda: sum(extraction.capture(len(prompts)))


@contextmanager
def connector(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> Iterator[Ready]:
    from vllm import LLM

    llm = LLM(**other_engine(arguments, eager), **_connector(arguments, output))

    def ask(asked: list[list[int]]) -> float:
        def files() -> None:
            deadline = time.monotonic() + FILES_LIMIT_S
            while (count := len(list(output.glob("*.safetensors")))) < len(asked):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{count} of {len(asked)} files after {FILES_LIMIT_S:.0f} s")
                time.sleep(0.02)

        return time_generate(llm, asked, files)

    ask(prompts[:WARM_UP])
    yield {}, lambda: ask(prompts)


@contextmanager
def served(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> Iterator[Ready]:
    from served import Server

    options = {**other_engine(arguments, eager), **_connector(arguments, output)}
    del options["skip_tokenizer_init"]  # a server answers in text
    with Server(options, output) as server:
        server.ask(prompts[:WARM_UP])
        yield {}, lambda: server.ask(prompts)


def _connector(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    model = MODELS / arguments.model
    layers = boundaries(model)
    if DROPS_LAST & set(json.loads((model / "config.json").read_text())["architectures"]):
        layers[-1] -= 1
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


STARTS = {"plain": plain, "ours": ours, "vllm": connector, "served": served}


def child(arguments: argparse.Namespace, row: str) -> int:
    kind, mode = row.split("-")
    output = Path(arguments.output) / row
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()]
    _empty(output)
    with STARTS[kind](arguments, mode == "eager", prompts, output) as (facts, once):

        def round_() -> dict[str, Any]:
            _empty(output)
            seconds = once()
            files = list(output.rglob("*.safetensors"))
            if len(files) != (0 if kind == "plain" else len(prompts)):
                raise RuntimeError(f"{len(files)} files of {len(prompts)} prompts")
            size = sum(file.stat().st_size for file in files)
            _empty(output)  # the next one's files need the memory
            return {"seconds": round(seconds, 3), "files": len(files), "gb": round(size / 1e9, 2)}

        serve_rounds(facts, round_)
    return 0


def _empty(output: Path) -> None:
    """Delete the files, but no folder: an engine made it once."""
    output.mkdir(parents=True, exist_ok=True)
    for path in list(output.rglob("*")):
        if path.is_file():
            path.unlink()


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tag", default="")
    parser.add_argument("--child", help="serve one row in this process")
    arguments = parser.parse_args()
    os.environ.update(HOST_ENV)
    if arguments.child:
        return child(arguments, arguments.child)
    print(f"results in {OUT}")
    part = f"fast-{arguments.model}-tp{arguments.tp}{arguments.tag}"
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()]
    tokens = sum(map(len, prompts))
    operations = prefill_flops(json.loads((MODELS / arguments.model / "config.json").read_text()), prompts)
    rate, done = matrix_rate() * arguments.tp, list[dict[str, Any]]()

    def rows(children: list[Child]) -> list[dict[str, Any]]:
        found, plain_s = [], 0.0
        for child in children:
            first, seconds = ([r["seconds"] for r in some] for some in (child.rounds[:FIRST], child.rounds[FIRST:]))
            row: dict[str, Any] = {"row": child.name, "first": first, "seconds": seconds, **child.facts}
            if len(seconds) == ROUNDS:
                mean = sum(seconds) / ROUNDS
                plain_s = plain_s or (mean if child.name.startswith("plain") else 0.0)
                row |= {
                    "tokens_per_s": round(tokens / mean), "of_plain": round(plain_s / mean, 4) if plain_s else "",
                    "model_tflops": round(operations / mean / 1e12, 1),
                    "of_matrix_rate": round(operations / mean / 1e12 / rate, 3),
                    "files": child.rounds[-1]["files"], "gb": child.rounds[-1]["gb"],
                }  # fmt: skip
            found.append({**row, **({"failed": child.error} if child.error else {})})
        return found

    def keep(now: list[dict[str, Any]]) -> None:
        write_result(part, {"command": " ".join(sys.argv), "prompts": len(prompts), "tokens": tokens,
                            "matrix_tflops": rate, "rows": done + now})  # fmt: skip

    for mode in arguments.modes.split(","):
        names = [f"{kind}-{mode}" for kind in arguments.kinds.split(",")]
        children = take_turns(
            {name: [sys.executable, __file__, *sys.argv[1:], "--child", name] for name in names},
            part=part, rounds=FIRST + ROUNDS, after=lambda children: keep(rows(children)),
        )  # fmt: skip
        done += rows(children)
        keep([])
    keys = ("row", "path", "seconds", "tokens_per_s", "of_plain", "model_tflops", "of_matrix_rate", "files", "gb")
    print_table(
        f"{arguments.model}, TP={arguments.tp}, {len(prompts)} prompts, {tokens} tokens, {rate} TFLOP/s",
        [{k: r.get(k, "") for k in (*keys, "load_s", "gpu_mib", "failed")} for r in done],
    )
    return 0 if all("failed" not in row for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())

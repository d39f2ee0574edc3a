"""Which engine arguments are fast: one engine each, the same prompts with and without capture, in turns on one GPU.

python sweep.py [--model qwen3-8b] [--tp 1] [--only base,seqs=64]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench import DATA, HOST_ENV, MODELS, print_table, write_result
from engines import WARM_UP, Capturing, add_engine_options, time_generate
from flops import prefill_flops
from together import Child, serve_rounds, take_turns

CHOICES: dict[str, list[str]] = {
    "base": [],  # compiled, 16,384 tokens and 256 sequences a step
    "tokens=4096": ["--batched-tokens", "4096"],
    "tokens=8192": ["--batched-tokens", "8192"],
    "tokens=32768": ["--batched-tokens", "32768"],
    "seqs=64": ["--seqs", "64"],
    "seqs=1024": ["--seqs", "1024"],
    "no-async": ["--engine", '{"async_scheduling": false}'],
    "eager": ["--engine", '{"enforce_eager": true}'],
    "expert-parallel": ["--engine", '{"enable_expert_parallel": true}'],
}
PROMPTS = 320
ROUNDS = 2
FIRST = 1  # round that is not counted: it is the first to touch the memory that the files go to
AT_ONCE = 4  # each takes up to 35 GB of the GPU


def child(arguments: argparse.Namespace) -> int:
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()][:PROMPTS]
    output = Path(arguments.output) / f"sweep-{os.getpid()}"
    output.mkdir(parents=True, exist_ok=True)
    extraction = Capturing(arguments, False, prompts, output)
    extraction.capture(WARM_UP)
    time_generate(extraction.llm, prompts[:WARM_UP], lambda: None)

    def round_() -> dict[str, Any]:
        uncaptured = time_generate(extraction.llm, prompts, lambda: None)
        ours = sum(extraction.capture(len(prompts)))
        for file in output.rglob("*.safetensors"):
            file.unlink()
        return {"uncaptured_s": round(uncaptured, 3), "ours_s": round(ours, 3)}

    serve_rounds({"path": extraction.path}, round_)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--only", default=",".join(name for name in CHOICES if name != "expert-parallel"))
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="engines that share the GPU")
    parser.add_argument("--child", action="store_true", help="serve one engine in this process")
    arguments = parser.parse_args()
    os.environ.update(HOST_ENV)
    if arguments.child:
        return child(arguments)
    part, done = f"sweep-{arguments.model}-tp{arguments.tp}", list[dict[str, Any]]()
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()][:PROMPTS]
    tokens = sum(map(len, prompts))
    operations = prefill_flops(json.loads((MODELS / arguments.model / "config.json").read_text()), prompts)

    def rows(children: list[Child]) -> list[dict[str, Any]]:
        found = []
        for child in children:
            counted = child.rounds[FIRST:]
            row: dict[str, Any] = {"choice": child.name, **child.facts, "rounds": child.rounds}
            if len(counted) == ROUNDS:
                uncaptured, ours = (sum(r[key] for r in counted) / ROUNDS for key in ("uncaptured_s", "ours_s"))
                row |= {
                    "uncaptured_tokens_per_s": round(tokens / uncaptured), "ours_tokens_per_s": round(tokens / ours),
                    "ratio": round(uncaptured / ours, 4), "model_tflops": round(operations / ours / 1e12, 1),
                }  # fmt: skip
            found.append({**row, **({"failed": child.error} if child.error else {})})
        return found

    def keep(now: list[dict[str, Any]]) -> None:
        write_result(part, {"command": " ".join(sys.argv), "tokens": tokens, "rows": done + now})

    chosen = arguments.only.split(",")
    for first in range(0, len(chosen), arguments.at_once):
        argvs = {
            name: [sys.executable, __file__, *sys.argv[1:], *CHOICES[name], "--child"]
            for name in chosen[first : first + arguments.at_once]
        }
        children = take_turns(argvs, part=part, rounds=FIRST + ROUNDS, after=lambda children: keep(rows(children)))
        done += rows(children)
        keep([])
    keys = ("choice", "uncaptured_tokens_per_s", "ours_tokens_per_s", "ratio", "model_tflops", "gpu_mib", "failed")
    print_table(f"Sweep, {arguments.model}, TP={arguments.tp}", [{k: row.get(k, "") for k in keys} for row in done])
    return 0 if all("failed" not in row for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())

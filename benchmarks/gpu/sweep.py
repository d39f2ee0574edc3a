"""Which engine arguments are fast: one engine each, the same prompts with and without capture.

python sweep.py [--model qwen3-8b] [--tp 1] [--only base,seqs=64]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from bench import DATA, HOST_ENV, MODELS, print_table, run_child, write_result
from fast import WARM_UP, Capturing, add_engine_options, time_generate
from flops import prefill_flops

CHOICES: dict[str, list[str]] = {
    "base": [],  # compiled, 16,384 tokens and 256 sequences a step
    "tokens=4096": ["--batched-tokens", "4096"],
    "tokens=8192": ["--batched-tokens", "8192"],
    "tokens=32768": ["--batched-tokens", "32768"],
    "seqs=64": ["--seqs", "64"],
    "seqs=1024": ["--seqs", "1024"],
    "no-async": ["--engine", '{"async_scheduling": false}'],
    "expert-parallel": ["--engine", '{"enable_expert_parallel": true}'],
    "eager": ["--eager"],
}
PROMPTS = 320
LIMIT_S = 180.0


def child(arguments: argparse.Namespace) -> int:
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()][:PROMPTS]
    output = Path(arguments.output) / "sweep"
    output.mkdir(parents=True, exist_ok=True)
    extraction = Capturing(arguments, arguments.eager, prompts, output)
    extraction.capture(WARM_UP)
    time_generate(extraction.llm, prompts[:WARM_UP], lambda: None)
    plain, ours = time_generate(extraction.llm, prompts, lambda: None), sum(extraction.capture(len(prompts)))
    tokens = sum(map(len, prompts))
    config = json.loads((MODELS / arguments.model / "config.json").read_text())
    result = {
        "path": extraction.path, "tokens": tokens, "uncaptured_tokens_per_s": round(tokens / plain),
        "ours_tokens_per_s": round(tokens / ours), "ratio": round(plain / ours, 4),
        "model_tflops": round(prefill_flops(config, prompts) / ours / 1e12, 1),
    }  # fmt: skip
    print("RESULT", json.dumps(result), flush=True)
    shutil.rmtree(output)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--only", default=",".join(name for name in CHOICES if name != "expert-parallel"))
    parser.add_argument("--child", action="store_true", help="run one engine in this process")
    arguments = parser.parse_args()
    os.environ.update(HOST_ENV)
    if arguments.child:
        return child(arguments)
    part, rows = f"sweep-{arguments.model}-tp{arguments.tp}", list[dict[str, Any]]()
    common = ["--model", arguments.model, "--tp", str(arguments.tp), "--output", arguments.output]
    for name in arguments.only.split(","):
        ended = run_child(
            [sys.executable, __file__, *common, *CHOICES[name], "--child"], name=f"{part}-{name}", limit_s=LIMIT_S
        )
        lines = ended.log.read_text(errors="replace").splitlines()
        found = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
        rows.append({"choice": name, **(found[0] if found else {"failed": ended.code}), "wall_s": ended.seconds})
        print(json.dumps(rows[-1]), flush=True)
        write_result(part, {"command": " ".join(sys.argv), "rows": rows})
    keys = ("choice", "path", "uncaptured_tokens_per_s", "ours_tokens_per_s", "ratio", "model_tflops")
    print_table(f"Sweep, {arguments.model}, TP={arguments.tp}", [{k: row.get(k, "") for k in keys} for row in rows])
    return 0 if all("failed" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

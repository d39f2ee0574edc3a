"""What capture costs in memory: bytes on the GPU against the same engine without it, and growth over many samples.

    python memory.py [--compiled]

Explained means: the states that a step hands over, the block that they are gathered in, and their figures, each once
for the step at work and, where the copy stream still reads it, once for the step before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from bench import DATA, HOST_ENV, MODELS, print_table, write_result
from engines import WARM_UP, Capturing, add_engine_options, boundaries, time_generate
from variants import resident_bytes

STATISTICS_BYTES = 4 * 4  # fp32, of each state of a token
MANY = ("short.jsonl", 2000, 5)  # prompts, how many between two readings, readings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(HOST_ENV)
    output = Path(arguments.output) / "memory"
    output.mkdir(parents=True, exist_ok=True)
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()][:200]
    many = [json.loads(line)["input_ids"] for line in (DATA / MANY[0]).open()]
    extraction = Capturing(arguments, not arguments.compiled, [*prompts, *many], output, "variants.VariantWorker")
    llm, part = extraction.llm, f"memory-{arguments.model}{'-compiled' if arguments.compiled else ''}"
    extraction.capture(WARM_UP)
    time_generate(llm, prompts, lambda: None)
    document: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "path": extraction.path,
        "explained": explained(arguments),
    }

    def read() -> dict[str, int]:
        found: dict[str, int] = llm.collective_rpc("bench_memory")[0]
        return {**found, "driver_rss": resident_bytes()}

    read()
    time_generate(llm, prompts, lambda: None)
    document["uncaptured"] = read()
    extraction.capture(len(prompts))
    document["captured"] = read()
    document["cost_bytes"] = document["captured"]["peak"] - document["uncaptured"]["peak"]
    document["growth"] = []
    _, between, readings = MANY
    for number in range(readings):
        extraction.capture(between, first=len(prompts) + number * between)
        document["growth"].append({"samples": (number + 1) * between, **read()})
        write_result(part, document)
    print(json.dumps({key: document[key] for key in ("explained", "uncaptured", "captured", "cost_bytes")}, indent=1))
    print_table("Growth, bytes", document["growth"])
    shutil.rmtree(output)
    return 0


def explained(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the bytes that the capture of a full step allocates, by what they are."""
    model = MODELS / arguments.model
    hidden, states = json.loads((model / "config.json").read_text())["hidden_size"], len(boundaries(model))
    step = arguments.batched_tokens * states
    return {"states": step * hidden * 2, "block": step * hidden * 2, "figures": step * STATISTICS_BYTES}


if __name__ == "__main__":
    sys.exit(main())

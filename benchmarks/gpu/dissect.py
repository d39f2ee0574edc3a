"""Where the time of capture goes: one engine, rounds with parts of the capture left out, and a profile.

    python dissect.py [--model qwen3-8b] [--tp 1] [--eager|--compiled]

All rounds run on one engine, GPU and set of prompts, so that a difference is the part that was left out. "uncaptured"
sends the same prompts without our keys: the worker does nothing but look at the schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from bench import DATA, HOST_ENV, OUT, write_result
from engines import WARM_UP, Capturing, add_engine_options, time_generate

WORKER = "variants.VariantWorker"
ROUNDS = ("", "nowrite", "nomeasure", "")
PROFILED_STEPS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", default=",".join(ROUNDS), help="names of variants.py, joined by +; may be empty")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--tag", default="")
    arguments = parser.parse_args()
    os.environ.update(HOST_ENV)
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()]
    tokens = sum(map(len, prompts))
    output = Path(arguments.output) / "dissect"
    output.mkdir(parents=True, exist_ok=True)
    extraction = Capturing(arguments, not arguments.compiled, prompts, output, WORKER)
    extraction.capture(WARM_UP)
    part = (
        f"dissect-{arguments.model}-tp{arguments.tp}-{'compiled' if arguments.compiled else 'eager'}{arguments.tag}"
    )
    rows: list[dict[str, Any]] = []

    def row(name: str, seconds: float, after: float = 0.0) -> None:
        parts = extraction.llm.collective_rpc("bench_seconds")[0]
        rows.append({"round": name, "seconds": round(seconds, 3), "drain": round(after, 3),
                     "tokens_per_s": round(tokens / (seconds + after)), "engine_thread_s": parts})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        folder = Path(next((word[3:] for word in name.split("+") if word.startswith("to=")), output))
        written = 0 if name == "uncaptured" else sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        rows[-1] |= {"gb": round(written / 1e9, 3), "gb_per_s": round(written / 1e9 / (seconds + after), 3)}
        write_result(part, {"command": " ".join(sys.argv), "path": extraction.path, "tokens": tokens, "rounds": rows})

    elsewhere = {Path(word[3:]) for word in arguments.rounds.replace("+", ",").split(",") if word.startswith("to=")}
    for folder in elsewhere:
        folder.mkdir(parents=True, exist_ok=True)
    for variant in (None, *arguments.rounds.split(","), None):
        extraction.llm.collective_rpc("bench_variant", args=(variant.split("+") if variant else [],))
        if variant is None:
            row("uncaptured", time_generate(extraction.llm, prompts, lambda: None))
        else:
            row(variant or "as the product", *extraction.capture(len(prompts)))
    for name in () if arguments.no_profile else ("captured", "uncaptured"):
        extraction.llm.collective_rpc("bench_profile", args=(PROFILED_STEPS,))
        if name == "captured":
            extraction.capture(len(prompts) // 4)
        else:
            time_generate(extraction.llm, prompts[: len(prompts) // 4], lambda: None)
        (OUT / "logs").mkdir(parents=True, exist_ok=True)
        table = extraction.llm.collective_rpc("bench_table")[0]
        (OUT / "logs" / f"{part}-profile-{name}.txt").write_text(table)
    for folder in (output, *elsewhere):
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What capture holds on the GPU against an engine that captures nothing, to the byte, by who holds it.

    python account.py [--model qwen3-8b] [--tp 1] [--modes compiled,eager]

Both engines of a mode are processes of their own on the same GPU and get the same prompts. At each stage of its life
the worker counts four things of its own process: what torch has allocated, what its allocator keeps on top, by
segments, and what nvidia-smi counts beyond these two: contexts, kernels, pinned memory's page tables.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import DATA, HOST_ENV, OUT, print_table, write_result
from engines import WARM_UP, Capturing, add_engine_options, other_engine, time_generate
from together import Child, serve_rounds, take_turns

KINDS = ("plain", "ours")
MODES = ("compiled", "eager")
ROUNDS = 2  # the second shows that nothing is still growing
PROMPTS = 200
MIB = 1 << 20


@contextmanager
def plain(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(**other_engine(arguments, eager), worker_cls="accounting.PlainAccount")
    time_generate(llm, prompts[:WARM_UP], lambda: None)
    yield llm, lambda: time_generate(llm, prompts, lambda: None)


@contextmanager
def ours(arguments: argparse.Namespace, eager: bool, prompts: list[list[int]], output: Path) -> Iterator[Any]:
    extraction = Capturing(arguments, eager, prompts, output, "accounting.CaptureAccount")
    extraction.capture(WARM_UP)
    yield extraction.llm, lambda: extraction.capture(len(prompts))


STARTS = {"plain": plain, "ours": ours}


def child(arguments: argparse.Namespace, row: str) -> int:
    kind, mode = row.split("-")
    output = Path(arguments.output) / row
    output.mkdir(parents=True, exist_ok=True)
    prompts = [json.loads(line)["input_ids"] for line in (DATA / arguments.prompts).open()][:PROMPTS]
    with STARTS[kind](arguments, mode == "eager", prompts, output) as (llm, once):

        def round_() -> dict[str, Any]:
            once()
            return {"ranks": llm.collective_rpc("bench_account")}

        serve_rounds({"ranks": llm.collective_rpc("bench_account")}, round_)
    return 0


def differences(children: list[Child]) -> list[dict[str, Any]]:
    """Return what rank 0 of `ours` holds beyond that of `plain` at last, in bytes, by who holds it and by stage."""
    found = []
    by_name = {child.name: child for child in children if child.rounds}
    for mode in MODES:
        if f"plain-{mode}" not in by_name or f"ours-{mode}" not in by_name:
            continue
        one, other = (by_name[f"{kind}-{mode}"].rounds[-1]["ranks"][0] for kind in KINDS)
        for stage in one["stages"]:
            a, b = one["stages"][stage], other["stages"][stage]
            found.append({"mode": mode, "after": stage, **{key: b[key] - a[key] for key in b}})
        a, b = one["segments"], other["segments"]
        changed = {key: b.get(key, 0) - a.get(key, 0) for key in sorted({*a, *b}, key=int)}
        found[-1]["segments"] = {key: count for key, count in changed.items() if count}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--child", help="serve one engine in this process")
    arguments = parser.parse_args()
    os.environ.update(HOST_ENV)
    if arguments.child:
        return child(arguments, arguments.child)
    print(f"results in {OUT}")
    names = [f"{kind}-{mode}" for mode in arguments.modes.split(",") for kind in KINDS]

    def keep(children: list[Child]) -> None:
        write_result(
            f"account-{arguments.model}-tp{arguments.tp}",
            {
                "command": " ".join(sys.argv), "differences": differences(children),
                "engines": [{"row": c.name, "error": c.error, "rounds": c.rounds, **c.facts} for c in children],
            },
        )  # fmt: skip

    children = take_turns(
        {name: [sys.executable, __file__, *sys.argv[1:], "--child", name] for name in names},
        part="account", rounds=ROUNDS, after=keep,
    )  # fmt: skip
    keep(children)
    print_table(
        "What ours holds beyond plain, MiB",
        [
            {k: round(v / MIB, 2) if isinstance(v, int) else v for k, v in row.items() if k != "segments"}
            for row in differences(children)
        ],
    )
    print(json.dumps([row["segments"] for row in differences(children) if "segments" in row]))
    return 1 if any(child.error for child in children) else 0


if __name__ == "__main__":
    sys.exit(main())

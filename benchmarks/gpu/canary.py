"""The canary on a GPU: silent on a sound capture, and stopping at every fault that the tests seed on a CPU.

    python canary.py [--model qwen3-truth]

One engine in one process, bf16; `tests/support/canary_session.py` puts the faults in and takes them out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from bench import DATA, HOST_ENV, MODELS, OUT, ROOT, print_table, write_result
from support.extraction import execute_module, make_run

EXPECTED = {
    "healthy": None,
    "healthy_final_norm": None,
    "shifted_boundary": "canary-boundary",
    "doubled_norm": "canary-norm",
    "norm_where_none_belongs": "canary-norm",
    "missing_norm": "canary-norm",
    "dropped_final_state": "canary-states",
    "swapped_states": "canary-boundary",
    "rows_of_another_request": "canary-identity",
    "chunks_out_of_order": "canary-identity",
    "zero_states": "canary-zero",
    "nan_in_one_row": "canary-finite",
    "prefix_cache_left_on": "canary-positions",
}
LONGEST = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-truth")
    model = parser.parse_args().model
    engine = {
        "enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8, "gpu_memory_utilization": 0.08,
        "kv_cache_memory_bytes": 1 << 30,
    }  # fmt: skip
    run = make_run(
        ROOT / "canary" / model, model=str(MODELS / model), data=str(DATA / "truth.jsonl"), dtype="bfloat16",
        max_seq_len=LONGEST, capture="hooks", engine=engine, accelerator="cuda",
    )  # fmt: skip
    ended = execute_module(
        run, "support.canary_session",
        **{**HOST_ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": os.environ["PYTHONPATH"]},
    )  # fmt: skip
    (OUT / "logs").mkdir(parents=True, exist_ok=True)
    (OUT / "logs" / f"canary-{model}.log").write_text(ended.log)
    found = json.loads((run.folder / "session.json").read_text()) if ended.code == 0 else {}
    rows = []
    for fault, code in EXPECTED.items():
        codes = sorted({problem["code"] for problem in found.get(fault, {}).get("problems", [])})
        ok = fault in found and (codes == [] if code is None else code in codes)
        rows.append({"fault": fault, "expected": code or "silence", "found": ", ".join(codes) or "nothing", "ok": ok})
    print_table(f"Canary on a GPU, {model}, bf16", rows)
    write_result(f"canary-{model}", {"command": " ".join(sys.argv), "exit": ended.code, "rows": rows, "found": found})
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

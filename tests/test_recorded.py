"""A run's ledgers on the workstation: half a million lines are read one by one."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

from controller import recorded
from controller.runfolder import RunFolder

LINES = 4_000
STATE = {"norm_mean": 1.234567, "norm_max": 2.345678, "nan": 0, "inf": 0, "zero_rows": 0}


def test_what_is_read_of_a_ledger_is_gone_once_its_figures_are_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "20260102-030405-abcdef")
    ledger = folder.path / "ledger"
    ledger.mkdir()
    with (ledger / "rank-0.jsonl").open("w") as file:
        for index in range(LINES):
            line = {
                "index": index, "file": f"hs_{index}.safetensors", "tokens": 30, "bytes": 1000, "sha256": "a" * 64,
                "token_sha256": "b" * 64, "states": [{"boundary": b, **STATE} for b in (2, 4, 5, 8)], "seconds": 0.1,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    (ledger / "driver.jsonl").write_text('{"index":3,"notice":"truncated","why":"cut"}\n{"index":9999,"skip')
    recorded.load(folder)  # what is imported and cached once
    tracemalloc.start()
    try:
        found = recorded.load(folder)
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(found.lines), found.truncated) == (LINES, {3})
    assert peak < 1.5 * kept  # the records themselves take three times as much again

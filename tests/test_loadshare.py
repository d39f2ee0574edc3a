"""Run folders as shares: of how many records their data set is, whichever way they ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from controller.core.shares import merge
from controller.recorded import load
from controller.runfolder import RunFolder
from controller.shards import load_share
from controller.ui.shares import print_merged

RUN = "20260101-000000-aaaaaa"
SPEC = {"model": "m", "boundaries": [2], "format": "speculators", "shard": [1, 1]}
COUNTED = {"total": 2999, "skipped": 1, "records": 3000}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was stopped after samples 0 and 1 of 3,000 records, of which 7 was skipped; the events are cut."""
    made = RunFolder.create(tmp_path, RUN)
    write(made, "plan.json", {"extract": SPEC, "host": {"name": "gpu1"}})
    write(made, "summary.json", {"end_reason": "stopped", "samples": {"expected": 2999, "written": 2, "skipped": 1}})
    (made.path / "ledger").mkdir()
    lines = [{"index": i, "file": f"hs_{i}.safetensors", "tokens": 3, "bytes": 9, "token_sha256": ""} for i in (0, 1)]
    (made.path / "ledger" / "rank-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"ind\n')
    (made.path / "ledger" / "driver.jsonl").write_text(json.dumps({"index": 7, "line": 8, "skipped": "empty"}) + "\n")
    tell(made, COUNTED)
    return made


def write(folder: RunFolder, name: str, document: dict[str, Any]) -> None:
    (folder.path / name).write_text(json.dumps(document))


def tell(folder: RunFolder, progress: dict[str, Any]) -> None:
    common = {"wire": 1, "run": RUN, "host": "gpu1", "writer": "driver"}
    events = [("phase", {"name": "data"}), ("progress", {"done": 0, **progress}), ("phase", {"name": "load"})]
    lines = [json.dumps({**common, "seq": n, "t": n, "type": kind, **data}) for n, (kind, data) in enumerate(events)]
    (folder.path / "events" / "driver.jsonl").write_text("\n".join(lines) + '\n{"wire":1,"ty')


@pytest.mark.parametrize("progress", [COUNTED, {"total": 2999, "skipped": 1}], ids=["now", "earlier payload"])
@pytest.mark.parametrize("ended", ["stopped", "lost"])
def test_what_a_run_without_a_verify_step_counted_shows_its_holes(
    folder: RunFolder, progress: dict[str, Any], ended: str
) -> None:
    tell(folder, progress)
    if ended == "lost":  # the host writes no summary of such a run
        (folder.path / "summary.json").unlink()
    merged = merge([load_share(folder)])
    assert (merged["records"], merged["written"], merged["skipped"]) == (3000, 2, 1)
    assert (merged["holes"], merged["hole_ranges"]) == (2997, [[2, 6], [8, 2999]])
    assert (merged["counted"], merged["complete"]) == (True, False)
    assert shown(merged).startswith("incomplete: 2 of 3,000 records written, 1 skipped")
    assert load(folder).indexes == range(3000)


def test_what_no_run_has_counted_is_not_said_to_be_all(folder: RunFolder) -> None:
    (folder.path / "events" / "driver.jsonl").unlink()
    merged = merge([load_share(folder)])
    assert (merged["counted"], merged["complete"]) == (False, False)
    assert shown(merged).startswith("incomplete: 2 of at least 8 records written, 1 skipped")


def test_the_verify_step_knows_better(folder: RunFolder) -> None:
    write(folder, "summary.json", {"data": {"records": 8}})
    assert load_share(folder).records == 8


def shown(merged: dict[str, Any]) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        print_merged(console, merged)
    return capture.get().partition("\n")[2]

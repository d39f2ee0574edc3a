"""One output path, used again and again: `prune` lets an earlier run go once nothing of it is there any more."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun
from support.pruned import age, ended, look, why_kept, write

from remote_payload.host.layout import OUTPUT_LEDGER, OWNER_MARKER, RunPaths
from remote_payload.host.liveness import user_name

SAMPLES = 6


def sample(run_id: str, index: int) -> bytes:
    """Of one length in every run, as the samples of equal texts are."""
    return f"{run_id} {index}".encode().ljust(100)


def name_of(index: int) -> str:
    return f"rows_0-2000/data_{index}.ckpt" if index % 2 else f"hs_{index}.safetensors"


class Reused:
    """An output folder that one run after the other clears and fills."""

    def __init__(self, host: HostRun) -> None:
        self.host = host
        self.root = host.folder / "root"
        self.output = self.root / "out"
        self.output.mkdir(parents=True)

    def fill(self, number: int, *, samples: int = SAMPLES, ledger_there: bool = True) -> RunPaths:
        """A run that emptied the folder and wrote `samples` into it; the higher the number, the later."""
        paths = ended(self.host, number, outputs=[{"path": str(self.output), "root": str(self.root)}])
        run_id = os.path.basename(paths.folder)
        shutil.rmtree(self.output)
        self.output.mkdir()
        write(self.output / OWNER_MARKER, {"wire": 1, "run_id": run_id, "owner": user_name(os.getuid())})
        lines = ""
        for index in range(samples):
            path, data = self.output / name_of(index), sample(run_id, index)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            sha256 = hashlib.sha256(data).hexdigest()
            record = {"index": index, "file": name_of(index), "bytes": len(data), "sha256": sha256}
            lines += json.dumps(record) + "\n"
        write(Path(paths.ledger, "rank-0.jsonl"), lines)
        if ledger_there:
            write(self.output / OUTPUT_LEDGER / f"{run_id}.rank-0.jsonl", lines)
        self.at(self.output, 20.0 - number)
        age(paths.folder, 20.0 - number)
        return paths

    def at(self, path: Path, hours: float) -> None:
        """Make files as old as that."""
        if path.is_dir():
            age(path, hours)
        else:
            os.utime(path, (time.time() - hours * 3600.0,) * 2)


@pytest.fixture
def reused(host: HostRun) -> Reused:
    return Reused(host)


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES + 3, 2, 0])
def test_runs_whose_files_a_later_run_replaced_may_go(reused: Reused, samples: int) -> None:
    """Also where the later run wrote fewer: what it does not name is not there."""
    first, second = reused.fill(1), reused.fill(2)
    last = reused.fill(3, samples=samples)
    shown = look(reused.host)
    assert [row["run_id"] for row in shown["runs"]] == [os.path.basename(each.folder) for each in (first, second)]
    assert "is marked as its output" in (why_kept(reused.host, last) or "")


def test_a_conversion_that_is_made_again_replaces_the_first(reused: Reused) -> None:
    """It leaves no ledger in the output: what it wrote is in its own folder."""
    first = reused.fill(1, ledger_there=False)
    last = reused.fill(2, ledger_there=False)
    assert why_kept(reused.host, first) is None
    shutil.rmtree(last.folder)
    assert "no later run says that it wrote it" in (why_kept(reused.host, first) or "")


def put_back(reused: Reused, run_id: str, hours: float, count: int = SAMPLES) -> None:
    for index in range(count):
        path = reused.output / name_of(index)
        path.write_bytes(sample(run_id, index))
        reused.at(path, hours)


def keep_one_more(reused: Reused, run_id: str) -> None:
    (reused.output / "hs_4.safetensors").write_bytes(sample(run_id, 4))


def damage_the_ledger(reused: Reused, run_id: str) -> None:
    """Its last line is cut off: nobody says of the file what it is."""
    later = sorted(path for path in (reused.host.workdir / "runs").iterdir() if path.name > run_id)
    for path in (*(reused.output / OUTPUT_LEDGER).iterdir(), *(run / "ledger" / "rank-0.jsonl" for run in later)):
        path.write_bytes(path.read_bytes()[:-10])


def add_a_line(reused: Reused, run_id: str) -> None:
    """A later run that kept the very file, as a resume does."""
    line = {"index": 0, "file": name_of(0), "bytes": 100, "sha256": hashlib.sha256(sample(run_id, 0)).hexdigest()}
    (path,) = (reused.output / OUTPUT_LEDGER).iterdir()
    path.write_text(path.read_text() + json.dumps(line) + "\n")


DOUBTS: dict[str, Callable[[Reused, str], Any]] = {
    "is older than any later run": lambda reused, run_id: put_back(reused, run_id, 19.5, count=1),
    "is not what the ledger of a later run says": lambda reused, run_id: put_back(reused, run_id, 0.0, count=4),
    "hs_4.safetensors is there, and no later run says that it wrote it": keep_one_more,
    "rows_0-2000/data_3.ckpt is there, and no later run says that it wrote it": damage_the_ledger,
    "hs_0.safetensors is there, and may be the same": add_a_line,
    "hs_2.safetensors is not what the ledger of a later run says": (
        lambda reused, run_id: (reused.output / "hs_2.safetensors").write_bytes(b"cut off")
    ),
    "it bears no mark of a run that cleared it": lambda reused, run_id: (reused.output / OWNER_MARKER).unlink(),
    "as if it were not mounted": lambda reused, run_id: reused.output.rename(reused.host.folder / "elsewhere"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_doubt_keeps_the_run_and_is_told(reused: Reused, doubt: str) -> None:
    first = reused.fill(1)
    reused.fill(2, samples=4)
    assert why_kept(reused.host, first) is None
    DOUBTS[doubt](reused, os.path.basename(first.folder))
    assert doubt in (why_kept(reused.host, first) or "nothing")


def test_what_appears_between_the_look_and_the_deletion_keeps_the_run(reused: Reused) -> None:
    first = reused.fill(1)
    reused.fill(2, samples=4)
    shown = look(reused.host)
    keep_one_more(reused, os.path.basename(first.folder))
    assert [each["run_id"] for each in shown["runs"]] == [os.path.basename(first.folder)]
    assert look(reused.host)["runs"] == []

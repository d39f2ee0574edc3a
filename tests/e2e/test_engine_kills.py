"""A real extraction of two ranks, hit in the middle of writing: each part of its tree in turn.

One output folder for all of a chain: each run resumes what the one before it left, and the last one completes it.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import COMMAND_TIMEOUT_S, Project
from safetensors import safe_open
from support.hostrun import left_by_the_run, wait_until
from support.vllmtree import open_shm, title

from remote_payload.host.files import read_lines
from remote_payload.host.leftovers import list_shm
from remote_payload.host.liveness import Stat, send_signal
from remote_payload.host.members import find_descendants, find_members, snapshot

pytestmark = [pytest.mark.engine, pytest.mark.sshd, pytest.mark.timeout(900)]

SAMPLES, MORE, TOKENS = 200, 1600, 200
"""Seconds of capture: the blow comes while most are still to be written. MORE where somebody looks meanwhile."""

WRITTEN = 16
"""Samples that a run writes before the blow."""

START_S = 240.0
"""For launch, load, probe and canary on a busy machine; 30 s on an idle one."""

ENDS_S = 60.0
"""From the blow to the run's result, on a busy machine; some seconds on an idle one."""

SILENCE_S = 90
"""No part of a load is as long without a word."""


@dataclass
class Extraction:
    """A run under way, and `ctl extract` that watches it."""

    project: Project
    run_id: str
    watcher: subprocess.Popen[str]

    @property
    def folder(self) -> Path:
        return self.project.run_folder(self.run_id)

    def written(self) -> list[int]:
        """Return the samples that this run's ranks put on disk."""
        return [line["index"] for path in self.folder.glob("ledger/rank-*.jsonl") for line in read_lines(str(path))]

    def kept(self) -> list[int]:
        """Return the samples of earlier runs that this one proved."""
        driver = str(self.folder / "ledger" / "driver.jsonl")
        return [line["index"] for line in read_lines(driver) if line.get("kept")]

    def tree(self) -> dict[int, Stat]:
        """Return all that descends from the supervisor, by pid."""
        return find_descendants([self.record()["supervisor"]["pid"]], snapshot(), self.run_id)

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run.json").read_bytes()))

    def end(self) -> tuple[int, str]:
        """Wait for the watcher; return its exit code and what it printed."""
        _, stderr = self.watcher.communicate(timeout=COMMAND_TIMEOUT_S)
        return self.watcher.returncode, stderr


@contextmanager
def extraction(job: Job) -> Iterator[Extraction]:
    """Start `ctl extract`, and go on once its ranks have written; whatever happens, nothing of the run is left."""
    project = job.project
    earlier = {path.name for path in (project.workdir / "runs").glob("*")}
    watcher = subprocess.Popen(
        project.argv("extract", "--host", "demo", "--playbook", job.name, "--yes"),
        cwd=project.root, env=project.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def launched() -> set[str]:
        assert watcher.poll() is None, watcher.communicate()
        new = {path.name for path in (project.workdir / "runs").glob("*")} - earlier
        return {name for name in new if (project.run_folder(name) / "run.json").exists()}

    try:
        [run_id] = wait_until(launched, "the run is launched", START_S)
        run = Extraction(project, run_id, watcher)
        wait_until(
            lambda: len(run.written()) >= WRITTEN or watcher.poll() is not None, "samples are written", START_S
        )
        assert watcher.poll() is None, watcher.communicate()
        yield run
    finally:
        watcher.kill()
        watcher.wait(30)
        for name in {path.name for path in (project.workdir / "runs").glob("*")} - earlier:
            if not (project.run_folder(name) / "result.json").exists():
                project.ctl("stop", name, "--grace", "0")


@dataclass(frozen=True)
class Job:
    """The demo's job over more samples into a folder of its own, which goes on where an earlier run ended."""

    project: Project
    name: str
    samples: int

    @property
    def output(self) -> Path:
        return self.project.workdir / "output" / self.name

    def records(self) -> list[list[int]]:
        """Return the token ids of each sample."""
        generator = random.Random(5)
        return [[generator.randrange(10, 1000) for _ in range(TOKENS)] for _ in range(self.samples)]

    def write(self) -> Job:
        """Write data set and playbook."""
        lines = "".join(json.dumps({"input_ids": ids}) + "\n" for ids in self.records())
        (self.project.workdir / "data" / f"{self.name}.jsonl").write_text(lines)
        self.project.playbook(
            self.name,
            ('path = "data/chats.jsonl"', f'path = "data/{self.name}.jsonl"'),
            ('path = "output/demo"', f'path = "output/{self.name}"'),
            ('stale = "clear"', 'stale = "resume"'),
            ("[engine]", '[rehearse]\nmode = "never"\n\n[engine]'),
            ('silence_timeout = "5m"', f'silence_timeout = "{SILENCE_S}s"\nstop_grace = "5s"'),
        )
        return self


def member(tree: dict[int, Stat], name: str) -> Stat:
    """Return the process of the tree that vLLM calls so."""
    [found] = [stat for pid, stat in tree.items() if name in title(pid)]
    return found


def nothing_is_left(run: Extraction, tree: dict[int, Stat], shm: set[str], ended: dict[str, Any]) -> None:
    """No process, no shared memory, no lease; and the host says so itself."""
    assert ended["gpus_clean"] is True
    assert left_by_the_run(ended) == []
    now = snapshot()
    assert not [stat for pid, stat in tree.items() if pid in now and now[pid].start_ticks == stat.start_ticks]
    assert find_members(str(run.folder), {(stat.pid, stat.start_ticks) for stat in tree.values()}) == []
    assert shm, "a vLLM of two ranks shares memory, or the test proves nothing"
    assert not shm & set(list_shm())
    assert run.project.json("ps", "--host", "demo")["leases"] == []


@dataclass(frozen=True)
class Struck:
    """What became of a run; `written` by it, `kept` of earlier ones, `victim` the process that was hit."""

    code: int
    screen: str
    summary: dict[str, Any]
    written: set[int]
    kept: set[int]
    victim: Stat


def strike(job: Job, name: str, number: signal.Signals) -> Struck:
    """Start a run, send a signal to a process of it while it writes, and wait until it has ended by itself."""
    with extraction(job) as run:
        tree = run.tree()
        for each in ("EngineCore", "Worker_TP0", "Worker_TP1"):
            member(tree, each)
        shm = open_shm(tree)
        victim = member(tree, name)
        before = len(run.written())
        assert send_signal(victim.pid, victim.start_ticks, number)
        started = time.monotonic()
        wait_until((run.folder / "result.json").exists, "the run ends by itself", ENDS_S + SILENCE_S)
        print(f"{name}, {number.name} after {before} samples: ended within {time.monotonic() - started:.1f} s")
        code, screen = run.end()
        nothing_is_left(run, tree, shm, json.loads((run.folder / "result.json").read_bytes()))
        written = run.written()
        assert len(written) == len(set(written))
        summary = job.project.json("summary", run.run_id)
        return Struck(code, screen, summary, set(written), set(run.kept()), victim)


def complete(job: Job, written: set[int]) -> None:
    """Resume to the end: what was written counts once, and every sample is what it should be."""
    summary = job.project.json("extract", "--host", "demo", "--playbook", job.name, "--yes")
    assert (summary["end_reason"], summary["gpus_clean"], summary["problems"]) == ("succeeded", True, [])
    counts = {"expected": job.samples, "written": job.samples, "skipped": 0, "failed": 0, "missing": 0}
    assert summary["samples"] == counts
    folder = job.project.run_folder(summary["run_id"])
    kept = [line["index"] for line in read_lines(str(folder / "ledger" / "driver.jsonl")) if line.get("kept")]
    anew = [line["index"] for path in folder.glob("ledger/rank-*.jsonl") for line in read_lines(str(path))]
    assert sorted(kept + anew) == list(range(job.samples))
    # The folder's own ledger is written a moment before the run's, so that a kill may leave one line more in it.
    assert written <= set(kept), "what was on disk is not captured again"
    assert len(kept) < job.samples
    assert {path.name for path in job.output.glob("hs_*")} == {f"hs_{i}.safetensors" for i in range(job.samples)}
    for index, ids in enumerate(job.records()):
        with safe_open(job.output / f"hs_{index}.safetensors", "pt") as file:
            assert file.get_tensor("token_ids").tolist() == ids
            assert file.get_slice("hidden_states").get_shape() == [TOKENS, 4, 128]


def test_a_killed_core_and_a_killed_worker_end_the_run_and_the_next_ones_complete_it(project: Project) -> None:
    job = Job(project, "kills", SAMPLES).write()
    written: set[int] = set()
    for name, called in (("EngineCore", "the engine core"), ("Worker_TP1", "rank 1")):
        ended = strike(job, name, signal.SIGKILL)
        assert written <= ended.kept
        assert not ended.kept & ended.written
        written |= ended.written
        summary = ended.summary
        assert (ended.code, summary["end_reason"]) == (100, "job-failed")
        assert summary["triage"]["code"] == "killed"
        assert f"{called} (pid {ended.victim.pid})" in summary["triage"]["what"]
        assert f"cause: a process was killed by a signal: {called} (pid {ended.victim.pid})" in ended.screen
        there = len(ended.kept | ended.written)
        counts = {"expected": SAMPLES, "written": there, "skipped": 0, "failed": 0, "missing": SAMPLES - there}
        assert summary["samples"] == counts
    complete(job, written)


@pytest.mark.slow
def test_a_stopped_worker_and_a_killed_supervisor(project: Project) -> None:
    """A worker that does not run is named, by rank and by process; an orphaned tree is seen, and ended by `stop`."""
    job = Job(project, "stopped", MORE).write()
    ended = strike(job, "Worker_TP1", signal.SIGSTOP)
    written = ended.written
    message = ended.summary["problems"][-1]["what"]
    assert (ended.code, ended.summary["end_reason"]) == (100, "limit-exceeded")
    silent = [f"rank-{rank} has been silent for " for rank in range(2)]
    assert re.match(rf"silence_timeout: no line of log and no event for \d+ s \(limit {SILENCE_S} s\); ", message)
    assert all(words in message for words in silent), message
    assert re.search(rf"process {ended.victim.pid} \(.+\) does not run: stopped by a signal", message), message
    assert message in " ".join(ended.screen.split())

    with extraction(job) as run:
        tree = run.tree()
        shm = open_shm(tree)
        engine = {member(tree, name).pid for name in ("EngineCore", "Worker_TP0", "Worker_TP1")}
        supervisor = run.record()["supervisor"]
        assert send_signal(supervisor["pid"], supervisor["start_ticks"], signal.SIGKILL)
        row = next(row for row in project.json("ps", "--host", "demo")["runs"] if row["run_id"] == run.run_id)
        assert row["state"] == "orphaned", row
        assert re.search(r"[1-9]\d* processes of the job live: ", row["evidence"])
        stopped = project.json("stop", run.run_id, "--grace", "5")
        assert (stopped["state"], stopped["end_reason"], stopped["gpus_clean"]) == ("finished", "stopped", True)
        assert engine <= {each["pid"] for each in stopped["killed"]}
        nothing_is_left(run, tree, shm, stopped)
        code, screen = run.end()
        assert code == 103, screen
        assert screen.count("the supervisor is dead and the job goes on") == 1
        written |= set(run.written())
    complete(job, written)

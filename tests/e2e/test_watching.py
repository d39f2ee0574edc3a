"""Runs as they are watched, stopped and read over a real sshd, with a stand-in for vLLM that loads for long."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.hostrun import wait_until
from support.stubproject import write_project

from tools.demo import CHECKOUT
from tools.sshd import SshdUnavailable, SshServer

pytestmark = pytest.mark.sshd

WITHOUT = ("--allow", "model-no-weights", "--allow", "capability-architecture")
"""What preflight misses: a stand-in has no weights, and no vLLM knows its model."""


@dataclass(frozen=True)
class Stubs:
    """A project of hosts `loading`, which never ends to load, and `left` and `right`, which capture for seconds."""

    root: Path

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CTL_", "XDG_"))}
        environment |= {"HOME": str(self.root), "PYTHONPATH": str(CHECKOUT)}
        return subprocess.run(
            [sys.executable, "-m", "controller", *words], cwd=self.root, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def launch(self, host: str, *words: str) -> str:
        """Launch a run and return its id."""
        done = self.ctl("extract", "--host", host, *WITHOUT, "--yes", "--detach", "--json", *words)
        assert done.returncode == 8, done.stderr
        return str(json.loads(done.stdout)["run_id"])

    def events(self, host: str, run_id: str, writer: str) -> str:
        path = self.root / host / "runs" / run_id / "events" / f"{writer}.jsonl"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stubs]:
    root = tmp_path_factory.mktemp("stubs")
    try:
        server = SshServer(root / "ssh", alias="ctl-stub")
    except SshdUnavailable as reason:
        pytest.skip(str(reason))
    with server:
        project = write_project(root / "project", server, "loading", "left", "right", step_s=0.1)
        hosts = (project / "hosts.toml").read_text()
        slow = hosts.replace(r"\"load_s\": 0.0", r"\"load_s\": 300.0", 1)  # of the first host
        assert slow != hosts
        (project / "hosts.toml").write_text(slow)
        yield Stubs(project)


@pytest.fixture(scope="module")
def stopped(stubs: Stubs) -> tuple[str, subprocess.CompletedProcess[str]]:
    """A run that was stopped in mid-load, and what `ctl stop` said."""
    run_id = stubs.launch("loading")
    wait_until(lambda: '"load"' in stubs.events("loading", run_id, "driver"), "it loads", 60)
    return run_id, stubs.ctl("stop", run_id, "--grace", "10")


def test_a_run_that_was_stopped_in_mid_load_says_so_wherever_its_end_is_told(
    stubs: Stubs, stopped: tuple[str, subprocess.CompletedProcess[str]]
) -> None:
    run_id, stop = stopped
    doing = r"loading the model, after \d+(\.\d)? s"
    first, second, *_ = stop.stdout.splitlines()
    assert re.fullmatch(rf"✓ run {run_id}: stopped on request while {doing}", first), stop.stdout
    assert second == "  0 of 24 samples; host left clean"
    assert [re.sub(r"\d+ process(es)?", "N processes", line) for line in stop.stderr.splitlines()] == [
        f"stopping run {run_id} on loading: TERM to all its processes, KILL after 10 s",
        "  its supervisor has been asked to stop it",
        "  N processes asked to end (TERM); KILL after 10 s",
        "  looking whether GPUs, shared memory and processes are as before the run",
        "  copying the rest of its log and records here",
    ]
    again = stubs.ctl("stop", run_id, "--json")
    answer = json.loads(again.stdout)
    assert (again.returncode, again.stderr, answer["end_reason"], answer["was_over"]) == (0, "", "stopped", True)
    told = stubs.ctl("stop", run_id)
    assert told.stderr.startswith(f"run {run_id} has ended: asking loading whether it left anything\n")
    assert told.stdout.startswith(f"✓ run {run_id} had already ended at {answer['ended']}: stopped on request")
    assert "\n  nothing was stopped; 0 of 24 samples; host left clean\n" in told.stdout
    unnamed = stubs.ctl("stop")
    assert unnamed.returncode == 3
    assert "or say `ctl stop --last`" in unnamed.stderr
    attached = stubs.ctl("attach", run_id, "--progress", "plain")
    assert attached.returncode == 103
    assert re.search(rf"run {run_id} stopped on request while {doing}; host left clean\n", attached.stderr)
    assert re.search(r"  0 of 24 samples \(0 %\), 1 skipped\n", attached.stderr)
    for text in (attached.stdout, stubs.ctl("summary", run_id).stdout):
        assert re.search(rf"  while +{doing}\n  samples +0 of 24 written, 1 skipped, 24 missing\n", text), text
    document = json.loads(stubs.ctl("summary", run_id, "--json").stdout)
    assert document["last_stage"].items() >= {"step": "extract", "phase": "load"}.items()
    assert document["samples"] == {"expected": 24, "written": 0, "skipped": 1, "failed": 0, "missing": 24}
    merged = json.loads(stubs.ctl("ledger", "merge", run_id, "--json").stdout)
    assert (merged["counted"], merged["records"], merged["skipped"], merged["holes"]) == (True, 25, 1, 24)
    asked = stubs.ctl("logs", run_id, "--problem")
    assert (asked.returncode, asked.stdout) == (0, "")
    assert re.fullmatch(rf"no problem was reported: run {run_id} stopped on request while {doing}\n", asked.stderr)


def test_several_runs_at_once_say_as_much_as_one(stubs: Stubs) -> None:
    runs = {host: stubs.launch(host) for host in ("left", "right")}
    attached = stubs.ctl("attach", *runs.values(), "--progress", "plain")
    assert attached.returncode == 0, attached.stderr
    far = r"24 of 24 samples \(100 %\), [\d,]+ tokens/s, .*, 1 skipped"
    for host in runs:
        told = [line for line in attached.stderr.splitlines() if f"  {host}: " in line]
        assert any("job: load done" in line for line in told)
        assert any(re.search(r": \d+ of 24 samples .* to last sample$", line) for line in told), told
    for (host, run_id), line in zip(runs.items(), attached.stdout.splitlines(), strict=True):
        assert re.fullmatch(rf"{run_id}  {host}  succeeded: {far}", line), line

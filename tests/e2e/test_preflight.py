"""`ctl preflight` over a real sshd: several hosts, engine arguments, and clearing up after a killed supervisor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import Project

pytestmark = pytest.mark.sshd

DEADLINE_S = 60.0


@pytest.fixture
def hosts(project: Project) -> Any:
    """A hosts.toml with the demo's host, one with another Python, and one where nobody listens."""
    demo = tomllib.loads((project.root / ".demo" / "hosts.toml").read_text())["hosts"]["demo"]
    tables = {
        "demo": demo,
        "other": {**demo, "python": "/nowhere/bin/python"},
        "gone": {**demo, "address": "127.0.0.1"},
        "roots": {**demo, "output_roots": ["/elsewhere"]},
    }
    tables["gone"].update(port=1, transport="openssh")
    path = project.root / "several.toml"
    lines = ["schema = 1"]
    for name, table in tables.items():
        lines.append(f"[hosts.{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
        for key, inner in table.items():
            if isinstance(inner, dict):
                lines.append(f"[hosts.{name}.{key}]")
                lines += [f"{variable} = {json.dumps(value)}" for variable, value in inner.items()]
    path.write_text("\n".join(lines) + "\n")
    return {"CTL_CONFIG": str(path)}


def test_hosts_are_looked_at_side_by_side(project: Project, hosts: dict[str, str]) -> None:
    words = ("preflight", "--host", "demo", "--host", "other", "--playbook", "demo", "--stale", "clear")
    looked = project.ctl(*words, "--json", **hosts)
    assert looked.returncode == 3, looked.stderr
    document = json.loads(looked.stdout)
    demo, other = document["hosts"]
    assert (demo["host"], other["host"], document["ok"]) == ("demo", "other", False)
    assert demo["ok"], [finding for finding in demo["findings"] if finding["level"] == "fail"]
    assert "python-missing" in [finding["code"] for finding in other["findings"] if finding["level"] == "fail"]
    assert demo["seconds"] > 0
    assert {"disk", "login", "toolchain", "lengths", "history"} <= demo["sections"].keys()

    shown = project.ctl(*words, **hosts)
    assert shown.returncode == 3, shown.stderr
    (heading,) = [line for line in shown.stdout.splitlines() if line.startswith("check")]
    assert heading.split() == ["check", "demo", "other"]
    (row,) = [line for line in shown.stdout.splitlines() if line.startswith("python-missing")]
    assert row.split()[1:] == ["-", "✗", "fail"]
    assert "looked at in" in shown.stdout


def test_a_host_that_cannot_be_looked_at_stands_beside_those_that_can(
    project: Project, hosts: dict[str, str]
) -> None:
    named = [word for host in ("demo", "gone", "roots", "demo") for word in ("--host", host)]
    words = ("preflight", *named, "--playbook", "demo", "--stale", "clear")
    half = project.ctl(*words, "--json", **hosts)
    assert half.returncode == 4, half.stderr
    demo, gone, roots = json.loads(half.stdout)["hosts"]
    assert demo["findings"]
    assert (gone["ok"], "findings" in gone) == (False, False)
    assert gone["error"]["what"]
    assert "output" in roots["error"]["what"]

    shown = project.ctl(*words, **hosts).stdout.splitlines()
    assert shown[0].split() == ["check", "demo", "gone", "roots"]
    assert shown[1].split() == ["looked", "at", "✓", "ok", "✗", "unreachable", "✗", "configuration"]
    for name, error in (("gone", gone["error"]), ("roots", roots["error"])):
        heading = shown.index(f"host {name}")
        assert shown[heading + 1] == f"✗ {error['what']}"


def test_an_unknown_engine_argument_is_found_before_the_load(project: Project) -> None:
    name = project.playbook("typo", ("[engine]", "[engine]\nenforce_eagre = true"))
    document = project.json("preflight", "--host", "demo", "--playbook", name, "--stale", "clear", code=3)
    (finding,) = [finding for finding in document["findings"] if finding["level"] == "fail"]
    assert finding["code"] == "engine-argument"
    assert "did you mean `enforce_eager`?" in finding["fix"]
    refused = project.json("extract", "--host", "demo", "--playbook", name, "--stale", "clear", "--yes", code=3)
    assert refused["error"]["code"] == "engine-argument"


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_for(condition: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    pytest.fail("it did not come to it in time")


@pytest.fixture
def segment() -> Any:
    """The name of a file in /dev/shm as vLLM calls them, removed afterwards."""
    path = Path("/dev/shm") / f"psm_ctl{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


def test_fix_clears_up_what_a_dead_run_left_and_nothing_else(project: Project, segment: Path) -> None:
    stranger = subprocess.Popen(["VLLM::EngineCore", "600"], executable=shutil.which("sleep"), start_new_session=True)
    try:
        started = project.ctl(
            "run", "--host", "demo", "--detach", "--", "sh", "-c", f"exec 3> {segment}; exec sleep 500"
        )
        assert started.returncode == 8, started.stderr
        run_id = project.json("ps", "--host", "demo")["runs"][0]["run_id"]
        record = project.run_folder(run_id) / "run.json"
        job = wait_for(lambda: json.loads(record.read_text())["job"])
        wait_for(segment.exists)
        os.kill(json.loads(record.read_text())["supervisor"]["pid"], signal.SIGKILL)
        unfinished = unfinished_output(project, run_id)
        words = ("preflight", "--host", "demo", "--playbook", "demo", "--fix")

        unconfirmed = project.ctl(*words)
        assert unconfirmed.returncode == 3
        assert "add `--yes`" in unconfirmed.stderr
        assert f"stop the dead run {run_id}" in unconfirmed.stderr
        assert str(stranger.pid) in unconfirmed.stderr
        assert "but of no run of ctl" in unconfirmed.stderr
        assert alive(job["pid"])
        assert segment.exists()

        document = json.loads(project.ctl(*words, "--yes", "--json").stdout)
        assert [action["kind"] for action in document["actions"]] == ["stop"]
        assert [each["kind"] for each in document["done"]] == ["stop"]
        assert not alive(job["pid"])
        assert not segment.exists()
        assert stranger.poll() is None
        # Now that the run is known to be over, its output is nobody's any more.
        assert [each["kind"] for each in document["remaining"]] == ["output"]
        assert unfinished.exists()

        done = project.ctl(*words, "--yes")
        assert "1 entries deleted" in done.stdout, done.stderr
        assert "nothing of it is left" in done.stdout
        assert not unfinished.exists()
        assert "nothing was left by a dead run of ctl" in project.ctl(*words, "--yes").stderr
    finally:
        stranger.kill()
        stranger.wait()


def unfinished_output(project: Project, run_id: str) -> Path:
    """Make the demo's output that of a run which wrote one sample and marked the folder as every run does."""
    shutil.rmtree(project.output, ignore_errors=True)
    project.output.mkdir(parents=True, mode=0o700)
    marker = {"wire": 1, "run_id": run_id, "created": "2026-01-01T00:00:00Z", "owner": json.loads(
        (project.run_folder(run_id) / "run.json").read_text()
    )["user"]}  # fmt: skip
    (project.output / ".ctl-owner.json").write_text(json.dumps(marker))
    sample = project.output / "hs_0.safetensors"
    sample.write_bytes(bytes(100))
    return sample

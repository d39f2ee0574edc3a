"""What Python says of a run that goes on, and of an error that nobody catches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.stubhost import PAYLOAD, StubHost

from controller.core.errors import ExitCode, UsageError
from controller.run import Run
from controller.runfolder import RunFolder
from controller.stages import launch
from controller.waiting import Detached, WaitTimeout, wait_timeout


def test_the_ways_on_stand_below_each_other() -> None:
    head, *ways = str(Detached("20260102-030405-abcdef", "box")).splitlines()
    assert head == "detached: run 20260102-030405-abcdef goes on, on box"
    starts = [line.index(what) for line, what in zip(ways, ("run = ", "run.stop()", "ctl attach "), strict=True)]
    assert len(set(starts)) == 1


@pytest.mark.parametrize(
    ("waited", "timeout", "why"),
    [
        (3.2, 3.0, "the timeout of 3 s has passed"),
        (601.0, None, "its host was out of reach for 600 s"),
        (601.0, 900.0, "its host was out of reach for 600 s"),
        (2.0, None, "`run.detach()` was called meanwhile"),
        (2.0, 3.0, "`run.detach()` was called meanwhile"),
    ],
)
def test_a_wait_that_ended_early_says_why_and_how_to_go_on(waited: float, timeout: float | None, why: str) -> None:
    error = wait_timeout("RUN", "running", waited_s=waited, timeout=timeout, patience_s=600.0)
    assert isinstance(error, TimeoutError)
    assert error.exit_code is ExitCode.DETACHED
    assert error.what == f"run RUN had not ended after {waited:.0f} s, and goes on: it is running"
    assert error.why == why
    assert "`run.wait()`" in error.fix
    assert "`run.stop()`" in error.fix
    with pytest.raises(WaitTimeout, match="it is running: "):
        raise error


@pytest.mark.parametrize("timeout", [0.0, 0.3])
def test_a_wait_ends_with_its_timeout_however_short(tmp_path: Path, timeout: float) -> None:
    """One that had passed before the watch began was forgotten by it."""
    host = StubHost(tmp_path / "host")
    plan = host.plan("20260101-000000-abcd05", "sleep", "20")
    launch.run(host.context(), plan, {})
    folder = RunFolder.create(tmp_path / "ctl-runs", plan["run_id"])
    with Run(folder, host.transport, host.record, PAYLOAD) as run:
        with pytest.raises(WaitTimeout, match="the timeout of"):
            run.wait(timeout=timeout)
        assert run.stop(grace_s=0.0).end_reason == "stopped"


def test_an_uncaught_error_of_a_script_shows_its_fix_and_ends_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("schema = 1\n")
    script = "import controller; controller.attach('zzz')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"HOME": str(tmp_path), "PYTHONPATH": str(Path.cwd())},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    *_, what, fix = done.stderr.splitlines()
    assert "UsageError: no run" in what
    assert fix.startswith("fix: ")
    left = subprocess.run(
        [sys.executable, "-c", "from controller import Detached; raise Detached('R', 'box')"], cwd=tmp_path,
        env={"PYTHONPATH": str(Path.cwd())}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert left.returncode == 1, "docs/notebook.md says so"
    assert left.stderr.splitlines()[-3:][0].startswith("  go back to it")


def test_a_fix_of_several_lines_is_a_note_without_escapes() -> None:
    error = UsageError("x", fix="first\n\x1b[31msecond")
    assert error.__notes__ == ["fix: first\n     [31msecond"]
    assert not hasattr(UsageError("x"), "__notes__")

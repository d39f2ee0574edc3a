"""The dashboard of real runs over a real sshd, on a terminal under a shell: detach, attach, stop, failures."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.conftest import Project
from support.terminal import Terminal

pytestmark = pytest.mark.sshd

LINE = "(Worker_TP$((i%2)) pid=$i) INFO 11-29 19:00:00 [a.py:1] line $i"
JOB = f'i=0; while :; do i=$((i+1)); echo "{LINE}"; sleep 0.2; done'
KEYERROR_LOG = Path(__file__).parents[1] / "data" / "vllm-logs" / "h200-0.24-load-keyerror.log"


@pytest.fixture
def terminal(project: Project) -> Iterator[Terminal]:
    with Terminal(project.root, project.environment()) as session:
        yield session


def ctl(project: Project, *words: str) -> str:
    return shlex.join(project.argv(*words))


def test_a_run_is_left_found_again_and_stopped_by_keys(project: Project, terminal: Terminal) -> None:
    terminal.run(ctl(project, "run", "--host", "demo", "--name", "forever", "--", "sh", "-c", JOB))
    terminal.wait_for("line 3")
    assert "● running" in terminal.text()
    terminal.press("1")
    terminal.wait_for("─ rank 1 ─")
    terminal.press("d")
    terminal.wait_for("detached: run")
    assert terminal.answer("echo code $?") == "code 8"
    terminal.run("clear")
    terminal.wait_until_gone("detached")
    terminal.run(ctl(project, "attach", "--last"))
    terminal.wait_for("● running")
    assert "✓ launch" in terminal.text()  # what was seen before the detach is seen again
    terminal.press("x")
    terminal.wait_for("y stops it, any other key does not")
    terminal.press("n")
    terminal.wait_for("not stopped")
    terminal.press("xy")
    terminal.wait_for("stopped on request")
    terminal.wait(terminal.cursor_shown, "the cursor")
    assert terminal.answer("echo code $?") == "code 103"
    assert terminal.mode() == (True, True)


def test_what_a_detached_launch_says_stands_below_its_last_frame(project: Project, terminal: Terminal) -> None:
    terminal.run(ctl(project, "run", "--host", "demo", "--detach", "--name", "alone", "--", "sleep", "300"))
    terminal.wait(lambda: terminal.text().rstrip().endswith("\n$"), "the prompt")
    project.json("stop", "--last")
    lines = terminal.lines()
    says = next(index for index, line in enumerate(lines) if line.startswith("detached: run "))
    assert [line.split()[:3] for line in lines[says + 1 : says + 4]] == [
        ["watch", "it", "again"], ["read", "its", "log"], ["stop", "it", "ctl"],
    ]  # fmt: skip
    assert len([line for line in lines if line.startswith(" ● ")]) == 1


def test_two_runs_are_rows_of_which_one_is_opened(project: Project, terminal: Terminal) -> None:
    first = project.ctl("run", "--host", "demo", "--detach", "--name", "first", "--", "sh", "-c", JOB)
    assert first.returncode == 8, first.stderr
    second = project.ctl("run", "--host", "demo", "--detach", "--wait", "--name", "second", "--", "true")
    assert second.returncode == 8, second.stderr
    listed = project.json("ps", "--host", "demo")["runs"]
    ids = [next(row["run_id"] for row in listed if row["name"] == name) for name in ("first", "second")]
    terminal.run(ctl(project, "attach", *ids))
    terminal.wait_for("2 runs, 2 under way")
    terminal.wait_for("queued")
    terminal.press("1")
    terminal.wait_for("─ ? help ─")
    assert "line " in terminal.text()
    terminal.press("xy")  # the opened one alone
    terminal.wait_for("stopped on request")
    terminal.press("\x1b")
    terminal.wait_for("1 succeeded, 1 stopped")
    terminal.wait(terminal.cursor_shown, "the cursor")
    assert terminal.answer("echo code $?") == "code 103"
    done = project.ctl("attach", *ids)
    assert done.returncode == 103
    stopped, succeeded = done.stdout.splitlines()
    assert stopped.startswith(f"{ids[0]}  demo  stopped on request while running the command, after ")
    assert succeeded == f"{ids[1]}  demo  succeeded"
    assert f"  demo {ids[0][-6:]}: " in done.stderr, "both are on one host"


def test_a_failed_run_stays_for_its_reader(project: Project, terminal: Terminal) -> None:
    terminal.run(ctl(project, "run", "--host", "demo", "--", "sh", "-c", f"cat {KEYERROR_LOG}; exit 1"))
    terminal.wait_for("leaving in ")
    assert "cause: config.json lacks `topk_method`" in terminal.text()
    terminal.press("t")
    terminal.wait_for("traceback")
    terminal.press("G")
    terminal.wait_for("KeyError: 'layers.2.mlp.gate.e_score_correction_bias'")
    terminal.press("tq")
    terminal.wait_for("code: ")
    assert terminal.answer("echo code $?") == "code 100"

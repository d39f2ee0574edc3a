"""Scripts that die, seen through the hook: none of them is changed, and none knows of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commandhost import CHECKOUT, CommandHost

RANKS = """
import multiprocessing, os, sys, time

class Refused(Exception):
    pass

def forward(rank):
    if rank == 3:
        raise Refused

def work(rank):
    os.environ["RANK"] = str(rank)
    forward(rank)
    time.sleep(120)

if __name__ == "__main__":
    context = multiprocessing.get_context("METHOD")
    ranks = [context.Process(target=work, args=(rank,), name=f"worker-{rank}", daemon=True) for rank in range(4)]
    for rank in ranks:
        rank.start()
    ranks[3].join()
    print("a worker died: ''")
    sys.exit(1)
"""

BOTH = 'argv = ["{python}", "job.py"]\ncwd = "{workdir}"\ntracebacks = true\n[limits]\nstop_grace = 1\n'


def script(host: CommandHost, text: str) -> None:
    (host.workdir / "job.py").write_text(text)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_rank_3_of_4_raises_with_an_empty_message(host: CommandHost, method: str) -> None:
    script(host, RANKS.replace("METHOD", method))
    plan = host.playbook(BOTH)
    ended = host.finish(plan)
    assert (ended["end_reason"], ended["exit_code"], ended["gpus_clean"]) == ("job-failed", 1, True)
    problem = ended["summary"]["problems"][0]
    assert (problem["what"], problem["rank"], problem["ranks"]) == ("Refused", 3, [3])
    assert problem["traceback"].startswith("Traceback (most recent call last):\n")
    assert problem["traceback"].endswith("Refused\n")
    assert "in work\n    forward(rank)" in problem["traceback"]
    assert problem["why"].endswith("in forward")
    assert "ctl_hook" not in problem["traceback"]
    assert not list(Path(host.paths(plan).faults).iterdir())


def test_a_thread_and_the_main_program_are_told_apart_and_once(host: CommandHost) -> None:
    script(
        host,
        "import threading, sys\n"
        "sys.excepthook = lambda *error: print('somebody else shows it')\n"
        "thread = threading.Thread(target=lambda: [][1]); thread.start(); thread.join()\n"
        "raise KeyError('main')\n",
    )
    plan = host.playbook(BOTH)
    ended = host.finish(plan)
    assert "somebody else shows it" in ended["log"]
    found = [(event["exc_type"], event["message"]) for event in host.all_events(plan, "exception")]
    assert found == [("IndexError", "list index out of range"), ("KeyError", "'main'")]


def test_a_segmentation_fault_leaves_its_stacks(host: CommandHost) -> None:
    script(
        host,
        "import ctypes, os\nos.environ['LOCAL_RANK'] = '2'\n"
        "def deep():\n    ctypes.string_at(0)\n"
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('fork').Process(target=deep); child.start(); child.join()\n"
        "    print('child:', child.exitcode); deep()\n",
    )
    plan = host.playbook(BOTH)
    ended = host.finish(plan)
    assert (ended["end_reason"], ended["signal"]) == ("job-signaled", 11)
    assert "killed by SIGSEGV" in ended["message"]
    problems = [each for each in ended["summary"]["problems"] if each["code"] == "exception"]
    assert all("Segmentation fault" in each["what"] and "in deep" in each["traceback"] for each in problems)
    assert {each["rank"] for each in problems} == {2}
    assert ended["gpus_clean"] is True
    assert not list(Path(host.paths(plan).faults).iterdir())


def test_what_a_command_survives_is_no_problem_of_a_success(host: CommandHost) -> None:
    script(host, "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'raise ValueError(1)'])\n")
    plan = host.playbook(BOTH)
    ended = host.finish(plan)
    assert (ended["end_reason"], ended["summary"]["problems"]) == ("succeeded", [])
    assert [event["exc_type"] for event in host.all_events(plan, "exception")] == ["ValueError"]


def test_without_asking_for_it_nothing_is_hooked(host: CommandHost) -> None:
    script(host, "import sys\nprint('hooked' if 'ctl_hook' in sys.modules else 'free')\nraise ValueError\n")
    plan = host.playbook(BOTH.replace("tracebacks = true", ""))
    assert host.finish(plan)["log"].startswith("free\n")
    assert host.all_events(plan, "exception") == []


def hooked(tmp_path: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the hook as a job has it; `tmp_path` is its run folder."""
    for name in ("events", "faults"):
        (tmp_path / name).mkdir(exist_ok=True)
    path = os.pathsep.join([str(CHECKOUT / "remote_payload" / "hook"), env.pop("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "CTL_RUN_DIR": str(tmp_path), "CTL_RUN_ID": "r", **env}
    return subprocess.run(
        [sys.executable, *argv], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )


def events(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in (tmp_path / "events").iterdir() for line in path.read_text().splitlines()]


def test_the_next_sitecustomize_is_run_as_if_ours_were_not_there(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("marker = 'theirs'\n")
    code = "import sitecustomize; print(sitecustomize.marker, sitecustomize.__file__); raise ValueError"
    done = hooked(tmp_path, "-c", code, PYTHONPATH=str(other))
    assert done.stdout == f"theirs {other}/sitecustomize.py\n"
    assert [event["exc_type"] for event in events(tmp_path)] == ["ValueError"]


def test_a_hook_that_cannot_write_changes_nothing_but_says_so(tmp_path: Path) -> None:
    code = "import os, shutil, sys; shutil.rmtree('events'); print('here'); raise SystemError('whole')"
    done = hooked(tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (1, "here\n")
    assert "SystemError: whole" in done.stderr
    assert "ctl: the traceback hook failed in report" in done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(3)",
        "import sys; sys.exit('text')",
        "import os; os._exit(4)",
        "raise KeyboardInterrupt",
        "import os; os.closerange(3, 4096); print(open(os.devnull).fileno())",
        "import os; pid = os.fork(); os._exit(os.waitpid(pid, 0)[1] >> 8 if pid else 7)",
    ],
)
def test_other_ends_are_as_without_the_hook(tmp_path: Path, code: str) -> None:
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    done = hooked(tmp_path, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert events(tmp_path) == []


def test_vllms_process_name_tells_the_rank(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import multiprocessing\n"
        "def fail():\n    raise RuntimeError\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=fail, name='Worker_TP5_EP5')\n"
        "    child.start(); child.join()\n"
    )
    hooked(tmp_path, "job.py")
    assert [(event["rank"], event["exc_type"], event["message"]) for event in events(tmp_path)] == [
        (5, "RuntimeError", "")
    ]

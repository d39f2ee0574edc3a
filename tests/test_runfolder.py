"""Runs on the workstation: found by a part of their id, from any folder, and watched by one process at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller import history
from controller.core.errors import UsageError
from controller.core.events import parse_event
from controller.runfolder import Recorder, RunFolder, find_run, going_on

OLD, NEW = "20260101-000000-aaaaaa", "20260202-000000-bbbbbb"


@pytest.fixture(autouse=True)
def _own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for run_id, status in ((OLD, "launched"), (NEW, "refused")):
        RunFolder.create(tmp_path / "runs", run_id).write_local(host={"name": "gpu"}, status=status)
    return tmp_path / "runs"


def test_the_last_run_is_the_last_that_was_launched(runs: Path) -> None:
    assert find_run(runs, None).run_id == OLD


@pytest.mark.parametrize("part", [NEW, "20260202", "bbbbbb", "0202-0", "0-bbb"])
def test_a_unique_part_of_an_id_is_enough(runs: Path, part: str) -> None:
    assert find_run(runs, part).run_id == NEW


def test_ambiguous_and_unknown_ids_are_errors_that_help(runs: Path) -> None:
    with pytest.raises(UsageError, match="ambiguous") as caught:
        find_run(runs, "2026")
    assert OLD in caught.value.why
    assert NEW in caught.value.why
    with pytest.raises(UsageError) as caught:
        find_run(runs, "000000")
    assert caught.value.code == "run-ambiguous"
    with pytest.raises(UsageError, match="empty"):
        find_run(runs, "")
    with pytest.raises(UsageError) as caught:
        find_run(runs, "20260202-000000-bbbbbc")
    assert caught.value.why == f"like it: {NEW}"
    assert "no run of this workstation has the id" in caught.value.what
    for unlike in ("ffffff", "20991231-235959-123456"):
        with pytest.raises(UsageError) as caught:
            find_run(runs, unlike)
        assert (caught.value.code, "like it" in caught.value.why) == ("run-unknown", False)


@pytest.mark.parametrize("typo", ["bbbbbc", "20260203", "20260220-000000-bbbbbb"])
def test_a_part_that_is_mistyped_is_answered_with_what_it_is_like(runs: Path, typo: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_run(runs, typo)
    assert NEW in caught.value.why


def test_the_last_run_may_be_of_one_kind(runs: Path) -> None:
    for run_id, kind in ((OLD, "extract"), (NEW, "convert")):
        (runs / run_id / "local.json").write_text('{"status": "launched"}')
        (runs / run_id / "plan.json").write_text(json.dumps({"job": {"kind": kind}}))
    assert find_run(runs, None).run_id == NEW
    assert find_run(runs, None, kind="extract").run_id == OLD
    with pytest.raises(UsageError, match="no rehearsal of this folder yet"):
        find_run(runs, None, kind="rehearse")
    assert [run.run_id for run in going_on(runs)] == [OLD, NEW]
    (runs / NEW / "result.json").write_text('{"end_reason": "succeeded"}')
    assert [run.run_id for run in going_on(runs)] == [OLD]


def test_a_run_whose_plan_is_not_here_yet_is_not_passed_over_for_an_earlier_one(runs: Path) -> None:
    """An attach that was interrupted during its copy leaves no plan: that run may be the last extraction."""
    (runs / OLD / "plan.json").write_text(json.dumps({"job": {"kind": "extract"}}))
    (runs / NEW / "local.json").write_text('{"status": "launched"}')
    assert find_run(runs, None, kind="extract").run_id == NEW


def test_a_run_is_found_from_another_folder_by_the_history(runs: Path, tmp_path: Path) -> None:
    entry = history.Entry(run_id=OLD, host="gpu", name="x", created="now", folder=str(runs / OLD))
    history.record(entry)
    assert history.history_file().stat().st_mode & 0o077 == 0
    with history.history_file().open("a") as stream:
        stream.write('{"cut off')
    assert find_run(tmp_path / "elsewhere", "aaaaaa").path == runs / OLD
    with pytest.raises(UsageError, match="no run of this folder") as caught:
        find_run(tmp_path / "elsewhere", None)  # the last run of another project is never meant
    assert OLD in caught.value.why


def test_two_processes_do_not_copy_into_one_folder(runs: Path) -> None:
    folder = RunFolder(runs / OLD)
    script = (
        "import sys; from pathlib import Path; from controller.runfolder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).watching(): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match="watched") as caught, folder.watching():
        pass
    assert str(holder.pid) in caught.value.why
    holder.kill()
    holder.communicate()
    with folder.watching():
        assert (folder.path / ".watch.lock").read_text() == str(os.getpid())


def test_events_continue_their_sequence_after_a_restart(runs: Path) -> None:
    folder = RunFolder(runs / OLD)
    seen = []
    Recorder(folder, "gpu", seen.append)("stage", name="push", status="started")
    Recorder(folder, "gpu", seen.append)("stage", name="push", status="done")
    lines = (folder.path / "events" / "controller.jsonl").read_bytes().splitlines()
    parsed = [parse_event(line) for line in lines]
    assert [event.seq for event in parsed if event] == [0, 1]
    assert [event.data["status"] for event in seen] == ["started", "done"]


def test_the_folder_is_private(runs: Path) -> None:
    assert (runs / OLD).stat().st_mode & 0o077 == 0

"""What the workstation makes of the host's answers to `prune`: a refusal, a part, or all of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun
from support.pruned import OLD, copies, ended
from support.stubhost import StubHost

from controller import pruning
from controller.core.errors import ExitCode, RefusedError, RemoteFailed
from controller.history import Entry, history_file, record
from controller.stages import prune
from controller.stages.mirror import Mirror


@pytest.fixture
def host(tmp_path: Path) -> HostRun:
    return HostRun(tmp_path)


def wanted(host: HostRun) -> prune.Wanted:
    return prune.Wanted(older_than_s=None, keep=0, copied=copies(host))


def test_what_was_shown_goes(host: HostRun) -> None:
    ended(host)
    ctx, asked = StubHost(host.workdir).context(), wanted(host)
    shown = prune.look(ctx, asked)
    assert [row["run_id"] for row in shown["runs"]] == [f"{OLD}00"]
    assert [each["run_id"] for each in prune.run(ctx, asked, shown)["deleted"]] == [f"{OLD}00"]
    assert os.listdir(host.workdir / "runs") == []


def test_a_changed_folder_is_a_refusal_and_nothing_is_deleted(host: HostRun) -> None:
    paths = ended(host)
    ctx, asked = StubHost(host.workdir).context(), wanted(host)
    shown = prune.look(ctx, asked)
    Path(paths.log, "000001.log").write_text("more")
    with pytest.raises(RefusedError, match="no longer what was shown") as caught:
        prune.run(ctx, asked, shown)
    assert (caught.value.code, caught.value.exit_code) == ("prune-changed", ExitCode.REFUSED)
    assert os.path.exists(paths.result)


def test_a_part_is_no_refusal_and_says_what_went(host: HostRun) -> None:
    """One folder cannot be put aside, because something has that name already; the other goes."""
    paths = ended(host, 0)
    ended(host, 1)
    ctx, asked = StubHost(host.workdir).context(), wanted(host)
    shown = prune.look(ctx, asked)
    (host.workdir / "runs" / f".pruned-{OLD}00").write_text("a person's")
    with pytest.raises(RemoteFailed, match="1 of 2 run folders were deleted, 1 stay") as caught:
        prune.run(ctx, asked, shown)
    assert (caught.value.code, caught.value.exit_code) == ("prune-incomplete", ExitCode.UNEXPECTED)
    data: dict[str, Any] = caught.value.data
    assert [each["run_id"] for each in data["deleted"]] == [f"{OLD}01"]
    assert [each["run_id"] for each in data["failed"]] == data["remaining"] == [f"{OLD}00"]
    assert os.path.exists(paths.result)


def test_copies_are_told_by_their_sizes_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    here, there = tmp_path / "here", tmp_path / "there" / f"{OLD}00"
    for folder, size in ((here / f"{OLD}00", 10), (there, 30), (here / f"{OLD}01", 20)):
        (folder / "events").mkdir(parents=True)
        (folder / "events" / "controller.jsonl").write_text("ours alone")
        Mirror(folder).append("log/000001.log", 0, b"x" * size)
        (folder / "local.json").write_text('{"status": "launched"}')
    Mirror(there).replace("result.json", b"{}")
    record(Entry(run_id=there.name, host="h", name="n", created="", folder=str(there)), history_file())
    record(Entry(run_id=f"{OLD}02", host="h", name="n", created="", folder=str(tmp_path / "gone")), history_file())
    copied = pruning.copied_runs(here)
    assert copied == {f"{OLD}00": {"log/000001.log": 30, "result.json": 2}, f"{OLD}01": {"log/000001.log": 20}}

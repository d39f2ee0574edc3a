"""A copy of which files are damaged: they are named, locked out is nobody, and a contact with the host mends them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.hostrun import wait_until
from support.stubhost import StubHost

from controller import history, lookup
from controller.comparing import diff
from controller.core.errors import ConnectionFailed, UsageError
from controller.ending import summary
from controller.runfolder import RunFolder, find_run, going_on, last_run
from controller.stages import launch
from controller.workspace import Workspace, load_workspace

RUN, OTHER = "20260102-030405-abcdef", "20260101-000000-aaaaaa"

DOCUMENTS = ["local.json", "plan.json", "run.json", "summary.json", "result.json"]

DAMAGE = {
    "empty": b"", "cut": b'{"wire": 1, "run', "zeros": bytes(64), "bytes": b"\xff\xfe\x00", "list": b"[1]",
    "record of nothing": b"{}",
}  # fmt: skip

HOSTS = """schema = 1
[hosts.stub]
address = "127.0.0.1"
python = "/opt/python"
workdir = "{workdir}"
output_roots = ["out"]
accelerator = "cpu"
"""


@pytest.fixture
def host(tmp_path: Path) -> StubHost:
    return StubHost(tmp_path / "host")


@pytest.fixture
def workspace(tmp_path: Path, host: StubHost, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A project with a run that has ended on its host, and was copied here whole."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CTL_RUNS_DIR", raising=False)
    project = tmp_path / "project"
    project.mkdir()
    (project / "hosts.toml").write_text(HOSTS.format(workdir=host.workdir))
    monkeypatch.chdir(project)
    made = load_workspace()
    monkeypatch.setattr(lookup, "open_transport", lambda *_, **__: host.transport)
    monkeypatch.setattr(lookup, "pushed_context", lambda *_: host.context())
    launch.run(host.context(), host.plan(RUN, "/bin/true"), {})
    wait_until(lambda: (host.workdir / "runs" / RUN / "result.json").exists(), "it has ended")
    with lookup.open_run(made, RUN, "stub") as run:
        run.watch()
    return made


def damage(workspace: Workspace, name: str, how: bytes = b"") -> RunFolder:
    folder = RunFolder(workspace.runs_dir / RUN)
    assert (folder.path / name).is_file()
    (folder.path / name).write_bytes(how)
    return folder


@pytest.mark.parametrize("how", DAMAGE)
def test_whatever_is_no_record_is_damaged_and_says_how(tmp_path: Path, how: str) -> None:
    folder = RunFolder.create(tmp_path, RUN)
    assert folder.damaged() == {}
    (folder.path / "plan.json").write_bytes(DAMAGE[how])
    assert folder.read("plan.json") is None
    assert [*folder.damaged()] == ["plan.json"]
    assert folder.damaged()["plan.json"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_contact_names_a_damaged_document_and_brings_it_anew(
    workspace: Workspace, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damage(workspace, name)
    with lookup.open_run(workspace, RUN, None) as run:
        lookup.copy_what_is_new(run)
        assert run.ended
        assert run.summary is not None
    assert folder.damaged() == {}
    assert folder.launched
    told = capsys.readouterr().err
    assert f"{folder.path / name} is damaged" in told.replace("\n", "")
    with lookup.open_run(workspace, RUN, None) as run:
        lookup.copy_what_is_new(run)
    assert capsys.readouterr().err == ""  # once


def test_a_run_is_stopped_by_its_id_and_host_whatever_its_copy_holds(workspace: Workspace) -> None:
    for name in DOCUMENTS:
        damage(workspace, name, b"\0")
    with pytest.raises(UsageError) as caught:
        lookup.open_run(workspace, RUN, None)
    assert caught.value.code == "copy-damaged"
    assert "plan.json is damaged" in caught.value.what
    assert f"ctl attach {RUN} --host HOST" in caught.value.fix
    with lookup.open_run(workspace, RUN[-6:], "stub") as run:
        outcome = run.stop()
    assert (outcome.state, outcome.was_over) == ("finished", True)


@pytest.mark.parametrize("name", ["summary.json", "result.json", "plan.json"])
def test_the_summary_is_shown_all_the_same(
    workspace: Workspace, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(workspace, name)
    assert summary(RUN, None, as_json=True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["end_reason"] == "succeeded"
    assert f"{name} is damaged" in captured.err


def test_what_is_whole_is_shown_without_the_host(
    workspace: Workspace, host: StubHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(workspace, "run.json")

    def connect() -> None:
        raise ConnectionFailed("nobody answers")

    monkeypatch.setattr(host.transport, "connect", connect)
    assert summary(RUN, None, as_json=True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["end_reason"] == "succeeded"
    assert "run.json is damaged" in captured.err
    assert "stub cannot be asked for it: nobody answers" in captured.err


def test_a_verb_that_asks_no_host_names_the_file(workspace: Workspace) -> None:
    shutil.copytree(workspace.runs_dir / RUN, workspace.runs_dir / OTHER)
    damage(workspace, "plan.json")
    with pytest.raises(UsageError) as caught:
        diff(OTHER, RUN, as_json=True)
    assert caught.value.code == "copy-damaged"
    assert str(workspace.runs_dir / RUN / "plan.json") in caught.value.what


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_damaged_run_is_no_obstacle_to_others(workspace: Workspace, name: str) -> None:
    shutil.copytree(workspace.runs_dir / RUN, workspace.runs_dir / OTHER)
    damage(workspace, name)
    assert find_run(workspace.runs_dir, OTHER).run_id == OTHER
    last = last_run(workspace.runs_dir, "command")
    assert last is not None
    assert last.run_id == RUN  # it may well be
    assert [run.run_id for run in going_on(workspace.runs_dir)] == ([RUN] if name == "result.json" else [])


def test_a_history_that_is_no_text_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    entry = history.Entry(run_id=RUN, host="h", name="n", created="c", folder="/f")
    history.record(entry, path)
    path.write_bytes(b"\xff\xfe\n" + path.read_bytes())
    assert list(history.entries(path)) == [entry]

"""A run by its id, where a host is named too; every address is this machine's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from controller import ending, history, lookup
from controller.cli import app
from controller.core.errors import UsageError
from controller.core.setting import Setting
from controller.runfolder import RunFolder
from controller.transport.base import Transport
from controller.workspace import Workspace, load_workspace
from tools.demo import with_history

RUN_ID = "20260102-030405-abcdef"
HOST = """
[hosts.{name}]
address = "{address}"
python = "/opt/python"
workdir = "/srv/ctl"
output_roots = ["out"]
accelerator = "cpu"
"""


@dataclass
class Context:
    """Of a host that is asked for its list only."""

    host: Any


class Silent(Transport):
    """Nobody is asked."""

    def close(self) -> None: ...


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    hosts = (("mine", "127.0.0.1"), ("other", "127.0.0.2"), ("alias", "127.0.0.1"))
    text = "schema = 1\n" + "".join(HOST.format(name=name, address=address) for name, address in hosts)
    (tmp_path / "hosts.toml").write_text(text)
    workspace = load_workspace(cwd=tmp_path, environ={"HOME": str(tmp_path)})
    folder = RunFolder.create(workspace.runs_dir, RUN_ID)
    record = workspace.config.host("mine").record()
    folder.write_local(host=record, status="launched")
    (folder.path / "plan.json").write_text(json.dumps({"host": record, "payload": "0" * 64}))
    monkeypatch.setattr(lookup, "open_transport", lambda *_, **__: Silent())
    return workspace


@pytest.mark.parametrize("named", [None, "mine", "alias"])
def test_a_known_run_is_opened_by_every_name_of_its_host(project: Workspace, named: str | None) -> None:
    assert lookup.open_run(project, RUN_ID, named).host == "mine"


@pytest.mark.parametrize("named", ["other", "127.0.0.2"])
def test_a_known_run_is_of_no_other_host(project: Workspace, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        lookup.open_run(project, RUN_ID, named)
    assert (caught.value.code, caught.value.what) == (
        "run-elsewhere", f"run {RUN_ID} is of host `mine`, not of `{named}`",
    )  # fmt: skip
    assert "mine" in caught.value.fix


@pytest.fixture
def deserted(project: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Nobody may be asked."""

    def connect(*_: object, **__: object) -> Transport:
        raise AssertionError("a host was asked")

    monkeypatch.setattr(lookup, "open_transport", connect)
    return project


@pytest.mark.parametrize("wrong", [RUN_ID[:-1] + "0", RUN_ID[-6:-1] + "0", RUN_ID[:14] + "6" + RUN_ID[15:]])
@pytest.mark.parametrize("host", [None, Setting("mine"), Setting("other")])
def test_a_mistyped_id_connects_to_nothing(deserted: Workspace, wrong: str, host: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        lookup.open_run(deserted, wrong, host)
    assert (caught.value.code, caught.value.why) == ("run-unknown", f"like it: {RUN_ID}")
    assert ("`--host mine`" in caught.value.fix) == (host == "mine")


@pytest.mark.parametrize("host", ["mine", Setting("mine")])
def test_no_id_is_no_reason_to_ask_a_host(deserted: Workspace, host: str) -> None:
    with pytest.raises(UsageError, match="the run id is empty"):
        lookup.open_run(deserted, "", host)


@pytest.mark.parametrize("host", ["mine", Setting("mine")])
def test_an_id_that_the_host_has_not_is_answered_with_those_like_it(
    project: Workspace, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    there = "20250101-000000-123456"
    monkeypatch.setattr(lookup, "pushed_context", lambda target, _: Context(target.record()))
    monkeypatch.setattr(lookup, "list_runs", lambda _: {"runs": [{"run_id": there}]})
    for wrong, close in (("123457", there), (RUN_ID[:-1] + "0", RUN_ID)):
        if isinstance(host, Setting) and close == RUN_ID:
            continue  # no host is asked for it
        with pytest.raises(UsageError) as caught:
            lookup.open_run(project, wrong, host)
        assert (caught.value.code, caught.value.why) == ("run-unknown", f"like it: {close}")


def test_a_host_of_the_environment_says_nothing_of_a_known_run(project: Workspace) -> None:
    assert lookup.open_run(project, RUN_ID, Setting("other")).host == "mine"


@pytest.mark.parametrize("words", [[], ["--host", "gpu1"]])
def test_a_host_that_ctl_host_names_is_told_from_one_that_is_typed(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(ending, "summary", lambda _, host, **__: seen.append(host))
    monkeypatch.setenv("CTL_HOST", "gpu1")
    assert CliRunner().invoke(app, ["summary", "x", *words]).exit_code == 0
    assert seen == ["gpu1"]
    assert isinstance(seen[0], Setting) == (not words)


def test_a_host_that_was_renamed_serves_its_runs(project: Workspace, tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("schema = 1\n" + HOST.format(name="new", address="127.0.0.3"))
    renamed = load_workspace(cwd=tmp_path, environ={"HOME": str(tmp_path)})
    assert lookup.open_run(renamed, RUN_ID, "new").id == RUN_ID


def test_a_run_of_a_project_is_found_from_every_folder_with_its_host(
    project: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    folder = str(project.runs_dir / RUN_ID)
    history.record(history.Entry(run_id=RUN_ID, host="mine", name="x", created="", folder=folder))
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    away = load_workspace(cwd=elsewhere, environ={"HOME": str(tmp_path)})
    assert "mine" not in away.config.hosts
    assert lookup.open_run(away, RUN_ID, None).host == "mine"
    with pytest.raises(UsageError, match="unknown host"):
        lookup.open_run(away, RUN_ID, "nobody")


def test_the_run_of_a_demo_is_in_the_history_of_whoever_tries_it(tmp_path: Path) -> None:
    own = {"HOME": str(tmp_path / "me")}
    environment = with_history({"HOME": "/demo/home"}, own)
    assert history.history_file(environment) == history.history_file(own)
    assert environment["HOME"] == "/demo/home"

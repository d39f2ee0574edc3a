"""The hook of an ended run: once, with the summary, and never more than a warning."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from support.hostrun import wait_until
from support.stubhost import StubHost

from controller import afterwards, lookup
from controller.afterwards import Afterwards, notification, run_hook
from controller.core.errors import ConfigError
from controller.core.model import Host
from controller.core.validation import validate
from controller.options import view_mode
from controller.run import Run
from controller.runfolder import RunFolder
from controller.stages import launch
from controller.ui.board import Known
from controller.ui.stream import choose_view

SUMMARY = {
    "run_id": "20260101-000000-abcdef", "end_reason": "succeeded", "hosts": ["gpu1"],
    "samples": {"written": 9, "expected": 9},
}  # fmt: skip

RECORD = "import json, os, sys; open('got', 'a').write(json.dumps([json.load(sys.stdin), dict(os.environ)]) + '\\n')"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(tmp_path / "ctl-runs", "20260101-000000-abcdef")


def test_it_gets_the_summary_and_the_place_of_the_run(folder: RunFolder) -> None:
    assert run_hook(folder, [sys.executable, "-c", RECORD], SUMMARY) is None
    document, environ = json.loads(Path("got").read_text())
    assert document == SUMMARY
    assert (environ["CTL_RUN_ID"], environ["CTL_END_REASON"]) == (folder.run_id, "succeeded")
    assert environ["CTL_RUN_DIR"] == str(folder.path)


def test_it_runs_once_for_a_run_even_if_it_failed(folder: RunFolder) -> None:
    failing = [sys.executable, "-c", RECORD + "; print('no route'); sys.exit(3)"]
    assert "exit code 3: no route" in (run_hook(folder, failing, SUMMARY) or "")
    assert run_hook(folder, failing, SUMMARY) is None
    assert len(Path("got").read_text().splitlines()) == 1


def test_a_missing_program_and_one_that_hangs_are_told(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afterwards, "HOOK_TIMEOUT_S", 0.3)
    assert "could not be started" in (run_hook(folder, ["/nowhere/at-all"], SUMMARY) or "")
    other = RunFolder.create(folder.path.parent, "20260101-000000-abcde0")
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert "did not end within" in (run_hook(other, sleeping, SUMMARY) or "")


def test_a_notification_says_how_it_ended(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder.path / "notify-send"
    tool.write_text('#!/bin/sh\nfor word; do echo "$word"; done > shown\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder.path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "linux")
    assert run_hook(folder, "notify", SUMMARY) is None
    shown = Path("shown").read_text()
    assert "ctl: succeeded" in shown
    assert "9 of 9 samples" in shown


def test_a_notification_on_macos_passes_text_as_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    argv = notification({**SUMMARY, "hosts": ['"; do evil']})
    assert argv[0] == "osascript"
    assert "evil" in argv[-1]
    assert not any("evil" in word for word in argv[:-1])


@pytest.mark.parametrize("value", ["mail", [], ["", "x"], [1], {"a": 1}])
def test_what_is_neither_a_command_nor_notify_is_refused(value: object) -> None:
    host = {
        "name": "h", "address": "h", "python": "/p", "workdir": "/w/c", "output_roots": ["/w/o"], "gpus": 1,
        "on_finish": value,
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        validate(Host, host, where=str)
    assert "on_finish" in caught.value.what


@pytest.fixture
def ended(folder: RunFolder, tmp_path: Path) -> Run:
    """A run that has ended on its host and was not copied here, and a hook that cannot be started."""
    host = StubHost(tmp_path / "host")
    launch.run(host.context(), host.plan(folder.run_id, "/bin/true"), {})
    wait_until(lambda: (host.workdir / "runs" / folder.run_id / "result.json").exists(), "it has ended")
    hook = Afterwards(on_finish=["/nope/hook"])
    return Run(folder, host.context().transport, host.record, host.context().payload, afterwards=hook)


@pytest.mark.parametrize(
    ("quiet", "progress", "told"), [(1, "auto", True), (0, "none", True), (2, "auto", False), (0, "plain", True)]
)
def test_a_hook_that_failed_is_told_whatever_is_shown(ended: Run, quiet: int, progress: str, told: bool) -> None:
    stderr = io.StringIO()
    mode = view_mode(progress, quiet=quiet, verbose=False, as_json=False)
    with choose_view(stderr, {}, mode) as view:
        ended.add_sink(view.sink(run=ended.id, host=ended.host, known=Known()))
        ended.watch()
    assert ("on_finish: /nope/hook could not be started: No such file or directory" in stderr.getvalue()) == told
    if progress != "plain":
        assert len(stderr.getvalue().splitlines()) == told


def test_a_verb_that_only_copies_tells_of_it_too(ended: Run, capsys: pytest.CaptureFixture[str]) -> None:
    lookup.copy_what_is_new(ended)
    assert "on_finish: /nope/hook could not be started" in capsys.readouterr().err

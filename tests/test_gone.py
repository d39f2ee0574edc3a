"""A run that its host has pruned, by whatever was seen of it here, and every way to ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stubhost import PAYLOAD, StubHost

from controller import commandverbs, ending, lookup, reading, reporting
from controller import run as run_module
from controller.core.errors import ConnectionFailed, ExitCode, JobFailed, LaunchUnknown, UsageError
from controller.core.loglines import Selection
from controller.run import Run
from controller.runfolder import RunFolder
from controller.stages.mirror import Mirror

RUN = "20260101-000000-abcdef"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of which a line of log is here, and nothing on the host; `ended` or `lost` says that its end was seen."""
    host = StubHost(tmp_path / "host")
    folder = RunFolder.create(tmp_path / "ctl-runs", RUN)
    folder.write_local(host=host.record, status="launched")
    mirror = Mirror(folder.path)
    mirror.replace("plan.json", json.dumps(host.plan(RUN, "true")).encode())
    mirror.replace("run.json", b'{"state": "running"}')
    mirror.append("log/000001.log", 0, b"the line\n")
    with Run(folder, host.transport, host.record, PAYLOAD) as handle:
        yield handle


def ended(run: Run, clean: bool | str = True) -> None:
    result = {"run_id": RUN, "end_reason": "job-failed", "message": "exited with code 3", "gpus_clean": clean}
    run.folder.mirror.replace("result.json", json.dumps(result).encode())


def lost(run: Run) -> None:
    run._recorder("stage", name="watch", status="done", text="lost")


@pytest.mark.parametrize(("clean", "told"), [(True, True), ("unknown", "unknown"), (False, "unknown")])
def test_a_stop_of_one_that_had_ended_tells_its_end(run: Run, clean: bool | str, told: bool | str) -> None:
    """What was left at its end has been cleared up since: the host keeps a run that left something."""
    ended(run, clean)
    outcome = run.stop()
    assert (outcome.state, outcome.end_reason, outcome.was_over) == ("finished", "job-failed", True)
    assert (outcome.gpus_clean, outcome.killed, outcome.leftovers) == (told, [], [])
    assert "stub has deleted its folder since" in outcome.message


def test_one_that_was_lost_stays_lost(run: Run) -> None:
    lost(run)
    outcome = run.stop()
    assert (outcome.state, outcome.end_reason, outcome.gpus_clean) == ("lost", None, "unknown")
    assert run.watch().ended
    error = run.error()
    assert isinstance(error, JobFailed)
    assert error.code == "lost"
    with pytest.raises(UsageError, match="has ended"):
        commandverbs.stacks(run)


@pytest.mark.parametrize("verb", [Run.stop, Run.watch, Run.refresh, commandverbs.stacks])
def test_of_one_whose_end_was_not_seen_nothing_is_made_up(run: Run, verb: Any) -> None:
    run._recorder("stage", name="watch", status="done", text="running")
    with pytest.raises(UsageError) as caught:
        verb(run)
    assert (caught.value.code, caught.value.exit_code) == ("run-gone", ExitCode.USAGE)
    assert f"`ctl logs {RUN}`" in caught.value.fix


def test_one_whose_launch_was_not_confirmed_may_still_come(run: Run) -> None:
    (run.folder.path / "run.json").unlink()
    run.folder.write_local(status="unknown")
    for verb in (run.stop, run.watch):
        with pytest.raises(LaunchUnknown, match="has not arrived there so far") as caught:
            verb()
        assert caught.value.exit_code is ExitCode.UNKNOWN


def test_a_host_out_of_reach_is_no_reason_to_wait_ten_minutes_for_what_is_here(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(run_module, "REFRESH_PATIENCE_S", 0.0)
    transport: Any = run.context.transport
    transport.unreachable = 1000
    monkeypatch.setattr(reading, "load_workspace", lambda: None)
    monkeypatch.setattr(ending, "load_workspace", lambda: None)
    monkeypatch.setattr(lookup, "open_run", lambda *_, **__: run)
    assert reading.logs(RUN, None, reading.Wanted(selection=Selection())) is ExitCode.OK
    out, err = capfdbinary.readouterr()
    assert out == b"the line\n"
    assert err == b"unreachable, says the test: this is what was copied before\n"
    with pytest.raises(ConnectionFailed):  # of a summary there is nothing here
        ending.summary(RUN, None, as_json=True)


def test_what_was_copied_of_it_can_still_be_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    class Workspace:
        runs_dir = run.folder.path.parent

    for module in (reading, reporting):
        monkeypatch.setattr(module, "load_workspace", Workspace)
    monkeypatch.setattr(lookup, "open_run", lambda *_, **__: run)
    assert reading.logs(RUN, None, reading.Wanted(selection=Selection())) is ExitCode.OK
    out, err = capfdbinary.readouterr()
    assert out == b"the line\n"
    assert b"stub has no folder of run " + RUN.encode() + b": this is what was copied before" in err
    page = tmp_path / "page.html"
    assert reporting.report(RUN, None, output=page, show=False, as_json=False) is ExitCode.OK
    assert RUN in page.read_text()
    assert b"the report shows what was copied before" in capfdbinary.readouterr().err

"""A run whose supervisor was killed: lost where its job died too, else an orphan; and what each verb says of it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.hostrun import wait_until
from support.stubhost import PAYLOAD, StubHost

from controller import ending, lookup, stopping
from controller.core.endings import exit_code
from controller.core.errors import ExitCode
from controller.run import Run
from controller.runfolder import RunFolder, going_on
from controller.stages import launch
from remote_payload.host.journal import EventWriter
from remote_payload.host.layout import Layout, RunPaths
from remote_payload.host.liveness import judge, send_signal
from remote_payload.host.protocol import Liveness

RUN = "20260101-000000-abcdef"

ERROR = "neither its supervisor nor its job is alive, and it left no result (a reboot, or both were killed)"
RESUME = "`--stale resume` keeps what is written and adds the rest"


@pytest.fixture
def host(tmp_path: Path) -> StubHost:
    return StubHost(tmp_path / "host")


@pytest.fixture
def orphan(tmp_path: Path, host: StubHost) -> Iterator[Run]:
    """An extraction that has written 2 of 9 samples; its supervisor is dead, its job lives."""
    plan = host.plan(RUN, sys.executable, "-S", "-c", "open('up', 'w').write('1'); import time; time.sleep(300)")
    plan["job"]["kind"] = "extract"
    launch.run(host.context(), plan, {})
    wait_until(lambda: (host.workdir / "up").exists(), "the job runs")
    paths = host_paths(host)
    driver = EventWriter(paths.events, "driver", RUN, "stub")
    driver.emit("progress", done=0, total=9, unit="samples")
    driver.emit("phase", name="capture", status="started", text="")
    ledger = Path(paths.ledger, "rank-0.jsonl")
    ledger.write_text("".join(json.dumps({"index": index, "file": f"hs_{index}"}) + "\n" for index in (0, 1)))
    driver.emit("progress", done=2, total=9, unit="samples")
    kill(paths, "supervisor")
    folder = RunFolder.create(tmp_path / "ctl-runs", RUN)
    folder.write_local(host=host.record, status="launched")
    folder.write_plan(plan)
    with opened(folder, host) as run:
        yield run
    if judge(record(paths)["job"])[0] is Liveness.ALIVE:
        kill(paths, "job")


@pytest.fixture
def lost(orphan: Run, host: StubHost) -> Run:
    """The same, and then its job was killed."""
    kill(host_paths(host), "job")
    return orphan


def opened(folder: RunFolder, host: StubHost) -> Run:
    return Run(folder, host.transport, host.record, PAYLOAD)


def host_paths(host: StubHost) -> RunPaths:
    return Layout(str(host.workdir)).run(RUN)


def record(paths: RunPaths) -> Any:
    wait_until(lambda: json.loads(Path(paths.run).read_bytes())["job"], "the job is recorded")
    return json.loads(Path(paths.run).read_bytes())


def kill(paths: RunPaths, role: str) -> None:
    process = record(paths)[role]
    assert send_signal(process["pid"], process["start_ticks"], signal.SIGKILL)
    wait_until(lambda: judge(process)[0] is Liveness.DEAD, f"the {role} is dead")


@contextmanager
def telling(monkeypatch: pytest.MonkeyPatch, run: Run) -> Iterator[io.StringIO]:
    """Have the verbs find `run`, and yield what they print on stdout for people."""

    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Run]:
        yield run

    printed = io.StringIO()
    for module in (ending, stopping):
        monkeypatch.setattr(module, "load_workspace", lambda: None)
        monkeypatch.setattr(module, "out_console", lambda: Console(file=printed, width=200))
    monkeypatch.setattr(stopping, "err_console", lambda: Console(file=io.StringIO()))
    monkeypatch.setattr(lookup, "open_run", open_run)
    yield printed


def stop(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert stopping.stop(RUN, None, grace_s=0.5, as_json=True, sure=True) is ExitCode.OK
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_lost_run_has_a_summary_of_what_it_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: Run, host: StubHost
) -> None:
    assert lost.watch().state == "lost"
    again = opened(lost.folder, host)  # another process, later: no host is asked any more
    assert (again.state, again.ended, again.folder.is_over) == ("lost", True, True)
    assert going_on(lost.folder.path.parent) == []
    with telling(monkeypatch, again) as printed:
        assert ending.summary(RUN, None, as_json=True) is ExitCode.OK
        document = json.loads(capsys.readouterr().out)
        assert ending.summary(RUN, None, as_json=False) is ExitCode.OK
    assert (document["state"], document["end_reason"], document["gpus_clean"]) == ("lost", None, "unknown")
    assert document["samples"] == {"expected": 9, "written": 2, "skipped": 0, "failed": 0, "missing": 7}
    assert (document["last_stage"]["step"], document["last_stage"]["phase"]) == ("command", "capture")
    assert document["last_stage"]["seconds"] == pytest.approx(document["timings"]["extract_s"], abs=0.002)
    assert "host_s" not in document["timings"], "nobody knows how long it lived"
    assert document["gpu_hours"] is None
    seen = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(event.t for event in host_events(again))))
    assert document["last_seen"] == seen
    assert [(each["code"], each["what"]) for each in document["problems"]] == [("lost", ERROR)]
    said = printed.getvalue()
    assert f"run {RUN} on stub: lost: neither job nor supervisor lives" in said
    assert "2 of 9 written, 7 missing" in said
    assert said.count(ERROR) == 1
    assert RESUME in said.replace("\n  ", " ")
    error = again.error()
    assert (exit_code(error), error.code if error else "") == (ExitCode.JOB_FAILED, "lost")


def host_events(run: Run) -> list[Any]:
    return [event for event in run.events() if event.writer != "controller"]


def test_one_that_wrote_nothing_is_begun_anew(lost: Run, host: StubHost) -> None:
    Path(host_paths(host).ledger, "rank-0.jsonl").unlink()
    assert lost.watch().ended
    error = lost.error()
    assert error is not None
    assert error.fix == f"read what it wrote with `ctl logs {RUN}`, then start again"


def test_one_whose_launch_left_no_record_has_no_summary(tmp_path: Path, host: StubHost) -> None:
    """A start that is late may still come: nothing is noted here that would outlast that."""
    folder = RunFolder.create(tmp_path / "ctl-runs", RUN)
    folder.write_local(host=host.record, status="unknown")
    folder.write_plan(host.plan(RUN, "true"))
    os.makedirs(host_paths(host).folder)
    with opened(folder, host) as run:
        assert run.watch().state == "lost"
        assert run.summary is None
    assert not folder.is_over


def test_a_stop_of_a_lost_run_leaves_it_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: Run
) -> None:
    with telling(monkeypatch, lost) as printed:
        answer = stop(capsys)
        assert (answer["state"], answer["end_reason"], answer["was_over"]) == ("lost", None, True)
        assert (answer["gpus_clean"], answer["killed"], answer["ended"]) == (True, [], None)
        assert (answer["samples"]["written"], answer["last_stage"]["phase"]) == (2, "capture")
        assert stopping.stop(RUN, None, grace_s=0.5, as_json=False, sure=True) is ExitCode.OK
    first, second = printed.getvalue().splitlines()
    assert f"run {RUN}: lost: neither job nor supervisor lives; its last sign of life came while capturing" in first
    assert second.startswith("  nothing was stopped; it was over before, and stays lost; ")
    assert second.endswith("; 2 of 9 samples; host left clean")
    assert lost.watch().state == "lost"
    assert exit_code(lost.error()) is ExitCode.JOB_FAILED


@pytest.mark.parametrize("watched", [False, True])
def test_the_first_stop_of_an_orphan_says_what_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], orphan: Run, host: StubHost, watched: bool
) -> None:
    """Also where another window copies the run: what that brings is waited for."""
    other = opened(orphan.folder, host)
    thread = threading.Thread(target=other.watch, daemon=True)
    if watched:
        thread.start()
        wait_until(lambda: other.state == "orphaned" or (orphan.folder.path / "run.json").exists(), "it watches")
    with telling(monkeypatch, orphan):
        answer = stop(capsys)
    assert (answer["state"], answer["end_reason"], answer["was_over"]) == ("finished", "stopped", False)
    assert (answer["samples"]["written"], answer["samples"]["expected"]) == (2, 9)
    assert (answer["last_stage"]["step"], answer["last_stage"]["phase"]) == ("command", "capture")
    if watched:
        thread.join(30)
        assert not thread.is_alive()

"""The notebook API over a real sshd, with a stand-in for vLLM; no warning of any kind is passed over."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import wait_until
from support.stubproject import write_project

import controller
from controller.core.events import Event
from tools.sshd import SshdUnavailable, SshServer

pytestmark = [pytest.mark.sshd, pytest.mark.filterwarnings("error")]

SLOW_S = 0.4
"""A step of the stand-in where a run must be met under way: 24 samples then take some ten seconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    try:
        with SshServer(tmp_path_factory.mktemp("sshd"), alias="ctl-stub") as running:
            yield running
    except SshdUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home folder of the test's own, as the current folder of a user's notebook."""
    for name in [name for name in os.environ if name.startswith(("CTL_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    return project


WITHOUT = ("model-no-weights", "capability-architecture")
"""What preflight misses: a stand-in has no weights, and no vLLM knows its model."""


def launch(host: str, **arguments: Any) -> controller.Run:
    return controller.extract(host=host, allow=WITHOUT, **arguments)


def test_a_run_is_read_while_it_goes_on_and_after_it_ended_inside_an_event_loop(
    elsewhere: Path, server: SshServer
) -> None:
    write_project(elsewhere, server, "left", step_s=SLOW_S)

    async def cell() -> None:
        with launch("left", max_samples=8) as run:
            assert (run.summary, run.problem, run.ended) == (None, None, False)
            wait_until(lambda: any(event.type == "progress" for event in run.events()), "progress is copied here")
            assert "running" in repr(run)
            seen: list[Event] = []
            run.add_sink(Recorder(seen))
            summary = run.result(timeout=60)
            assert (summary["samples"]["written"], summary["samples"]["skipped"]) == (8, 1)
            assert {event.writer for event in seen} >= {"controller", "supervisor", "driver"}
            times = [event.t for event in run.events() if event.writer == "driver"]
            assert times == sorted(times)
            assert b"verified" in b"".join(run.logs())
            assert list(summary.to_pandas().index) == [2, 4, 5, 8]
            frame = run.ledger.to_pandas()
            assert Counter(frame["fate"]) == {"written": 8, "skipped": 1}
            assert frame["norm_8"].notna().sum() == 8
            assert frame["time"].notna().sum() == 8
            assert run.wait() is run  # an ended run asks nobody
            assert "8 of 8 written" in run._repr_mimebundle_()["text/plain"]

    asyncio.run(cell())
    files_of_an_earlier_run_are_only_deleted_with_a_yes()


def files_of_an_earlier_run_are_only_deleted_with_a_yes() -> None:
    """Then stop the run that deletes them: a stopped run has no result, and is no problem."""
    with pytest.raises(controller.CtlError) as caught:
        launch("left", stale="clear")
    assert caught.value.code == "confirmation-needed"
    assert "yes=True" in "\n".join(caught.value._render_traceback_())
    with launch("left", stale="clear", yes=True) as run, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.result)
        wait_until(lambda: run.folder.read("run.json"), "the run is under way")
        assert run.stop(grace_s=5).end_reason == "stopped"
        with pytest.raises(controller.CtlError, match="was stopped"):
            waiting.result(timeout=60)
        assert run.problem is None


class Recorder:
    def __init__(self, seen: list[Event]) -> None:
        self._seen = seen

    def event(self, event: Event) -> None:
        self._seen.append(event)

    def log(self, data: bytes) -> None: ...


def test_an_interrupt_detaches_and_says_how_to_attach(
    elsewhere: Path, server: SshServer, capsys: pytest.CaptureFixture[str]
) -> None:
    write_project(elsewhere, server, "left", step_s=SLOW_S)
    with launch("left") as run:
        launched = capsys.readouterr().err
        assert "  left: launch done" in launched, "a script shows what it does"
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(controller.Detached) as caught:
            run.wait()
        timer.join()
        assert issubclass(controller.Detached, KeyboardInterrupt)
        assert f'controller.attach("{run.id}")' in str(caught.value)
        assert caught.value._render_traceback_() == str(caught.value).splitlines()
        with pytest.raises(TimeoutError, match="running") as late:
            run.wait(timeout=0.5)
        assert isinstance(late.value, controller.WaitTimeout)
        assert (late.value.why, late.value.code) == ("the timeout of 0.5 s has passed", "wait-timeout")
        with pytest.raises(controller.CtlError, match="has no summary: it is running") as early:
            run.to_pandas()
        assert "run.wait()" in early.value.fix
        assert capsys.readouterr().err.count("  left: watch started") == 2
    with controller.attach(display="none") as quiet, pytest.raises(controller.WaitTimeout):
        quiet.wait(timeout=0.5)
    assert capsys.readouterr().err == ""
    with controller.attach() as again:
        assert again.id == run.id
        assert again.result(timeout=60)["samples"]["written"] == 24


def test_two_runs_at_once_in_threads(elsewhere: Path, server: SshServer) -> None:
    write_project(elsewhere, server, "left", "right", step_s=0.1)
    both = threading.Barrier(2, timeout=60)

    def one(host: str) -> tuple[str, int]:
        with launch(host) as run:
            both.wait()  # each is under way before either is waited for
            return run.host, run.result(timeout=60)["samples"]["written"]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, ["left", "right"])) == [("left", 24), ("right", 24)]
    assert len(list((elsewhere / "ctl-runs").iterdir())) == 2


def test_preflight_tells_what_is_missing_and_refuses_when_asked_to(elsewhere: Path, server: SshServer) -> None:
    write_project(elsewhere, server, "left", samples=3)
    findings = controller.preflight(host="left")
    assert {finding.code for finding in findings.failed} == set(WITHOUT)
    assert (findings.ok, findings.host, len(findings) > 5) == (False, "left", True)
    with pytest.raises(controller.CtlError, match="no weights"):
        findings.check()
    allowed = controller.preflight(host="left", allow=WITHOUT)
    assert allowed.check() is allowed
    assert not (elsewhere / "ctl-runs").exists()

"""The end of a run in words: what it left behind is told however it ended."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.plans import host
from support.recorded import START, started

from controller import diagnosis, ending, lookup
from controller.core.errors import CtlError, ExitCode
from controller.core.events import Event
from controller.run import Run
from controller.runfolder import RunFolder
from controller.transport.base import Transport

RUN_ID = "20260102-030405-abcdef"
LEFT = {
    "code": "not-clean", "what": "the run left something behind on the host",
    "why": "{'pid': 4711, 'comm': 'python'}",
    "fix": "have the processes ended by an administrator; the lease stays dirty until then",
}  # fmt: skip
RAISED = {
    "code": "exception", "what": "ValueError: bad shape", "traceback": "Traceback: bad shape", "where": "",
    "rank": None, "ranks": [None], "writer": "driver",
}  # fmt: skip
UNREADABLE = {"code": "verify-unreadable", "what": "verify.json cannot be read", "why": "cut off", "fix": ""}


class Unreachable(Transport):
    """Nobody is asked: all is on this workstation."""

    def close(self) -> None: ...


Tell = Callable[[Run], str]


@pytest.fixture(params=["summary", "attach"])
def tell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tell:
    """Print the end of a run as `ctl summary` does, or as a watch at its end; return all that a person reads."""
    printed = io.StringIO()
    monkeypatch.setattr(ending, "out_console", lambda: Console(file=printed, width=200))
    monkeypatch.setattr(ending, "load_workspace", lambda: None)

    def summary(run: Run) -> str:
        @contextmanager
        def open_run(*_: Any, **__: Any) -> Iterator[Run]:
            yield run

        monkeypatch.setattr(lookup, "open_run", open_run)
        assert ending.summary(run.id, None, as_json=False) is ExitCode.OK
        return printed.getvalue()

    def attach(run: Run) -> str:
        from controller.ui.errors import print_error

        try:
            ending.tell_end(run, as_json=False, told=())
        except CtlError as error:
            print_error(error)  # as the command line does
        return printed.getvalue() + capsys.readouterr().err

    return {"summary": summary, "attach": attach}[request.param]


def ended(root: Path, end_reason: str, problems: list[dict[str, Any]], events: Iterable[Event] = ()) -> Run:
    """A run that ended, as a watch leaves it here; its host was not left clean."""
    folder = RunFolder.create(root, RUN_ID)
    result = {"end_reason": end_reason, "message": end_reason, "gpus_clean": False, "duration_s": 3.0}
    (folder.path / "result.json").write_text(json.dumps(result))
    write_events(folder, events)
    document = {
        "schema_version": 1, "kind": "command", "run_id": RUN_ID, "state": "finished", "end_reason": end_reason,
        "hosts": ["gpu1"], "timings": {}, "gpus_clean": False, "problems": problems,
    }  # fmt: skip
    (folder.path / "summary.json").write_text(json.dumps(document))
    return Run(folder, Unreachable(), host().record(), "payload")


def write_events(folder: RunFolder, events: Iterable[Event]) -> None:
    for event in events:
        with (folder.path / "events" / f"{event.writer}.jsonl").open("a") as stream:
            stream.write(event.to_json() + "\n")


@pytest.mark.parametrize("reason", ["stopped", "job-failed", "job-signaled", "limit-exceeded", "supervisor-failed"])
def test_an_end_names_the_stage_that_it_came_in(tmp_path: Path, tell: Tell, reason: str) -> None:
    events = started()  # to the load, 73.2 s after the start
    events(265.2, "supervisor", "step", name="extract", status="failed", text="", seconds=198.0)
    run = ended(tmp_path, reason, [], events.events)
    assert tell(run).count("loading the model, after 3 min 12 s") == 1
    assert run.summary is not None
    assert run.summary["last_stage"] == {"step": "extract", "phase": "load", "seconds": pytest.approx(192.0)}


def test_a_success_names_no_stage(tmp_path: Path, tell: Tell) -> None:
    run = ended(tmp_path, "succeeded", [], started().events)
    assert "loading" not in tell(run)
    assert run.summary is not None
    assert run.summary["last_stage"] is None


def test_what_a_run_that_succeeded_left_behind_is_told(tmp_path: Path, tell: Tell) -> None:
    said = tell(ended(tmp_path, "succeeded", [UNREADABLE, LEFT]))
    assert "succeeded" in said
    for words in (LEFT["what"], "4711", LEFT["fix"], "code: not-clean", UNREADABLE["what"]):
        assert said.count(words) == 1


def test_what_a_stopped_run_left_behind_is_told_and_not_what_it_raised(tmp_path: Path, tell: Tell) -> None:
    said = tell(ended(tmp_path, "stopped", [RAISED, LEFT]))
    assert said.count(LEFT["what"]) == 1
    assert "bad shape" not in said


TRACE = 'Traceback (most recent call last):\n  File "/w.py", line 3, in f\n'


@pytest.mark.parametrize("tell", ["attach"], indirect=True)  # of a lost run there is no summary
@pytest.mark.parametrize(
    ("log", "known"),
    [
        (f"{TRACE}ValueError: bad shape\n", False),
        (f"{TRACE}OSError: [Errno 28] No space left on device\n", True),
        ("", None),
    ],
)
def test_a_lost_run_is_explained_whatever_its_log_shows(
    tmp_path: Path, tell: Tell, log: str, known: bool | None
) -> None:
    """Its log may tell what it suffered from, and the remedy of that; that nothing of it lives, it cannot."""
    folder = RunFolder.create(tmp_path, RUN_ID)
    (folder.path / "run.json").write_text(json.dumps({"state": "lost"}))
    (folder.path / "log").mkdir()
    (folder.path / "log" / "00000001.log").write_text(log)
    write_events(folder, [event for event in started().events if event.t <= START + 69.0])
    found = diagnosis.diagnose_run(folder).triage
    assert (None if found is None else found.record()["known"]) is known
    said = tell(Run(folder, Unreachable(), host().record(), "payload"))
    assert said.count("neither its supervisor nor its job is alive, and it left no result") == 1
    assert ("unknown cause" in said) == (known is False)
    assert said.count("its last sign of life came while reading the data set, after 0.0 s") == 1
    assert "then start again" in said
    if known and found is not None:
        assert said.count(found.record()["fix"].splitlines()[0]) == 1


@pytest.mark.parametrize("printed", [True, False])
def test_a_log_is_named_where_there_is_one(tmp_path: Path, tell: Tell, printed: bool) -> None:
    run = ended(tmp_path, "job-signaled", [], [])
    end = {"end_reason": "job-signaled", "message": "command was killed by SIGKILL", "signal": 9}
    event = Event(type="end", run=RUN_ID, host="gpu1", writer="supervisor", seq=0, t=START, data=end)
    write_events(run.folder, [event])
    (run.folder.path / "result.json").write_text(json.dumps(end))
    if printed:
        run.folder.mirror.append("log/000001.log", 0, b"a word\n")
    said = tell(run)
    assert said.count("cause: a process was killed by a signal: SIGKILL") == 1
    assert ("raw log" in said) == printed


def test_a_reason_that_was_shown_is_not_said_again(tmp_path: Path, tell: Tell) -> None:
    said = tell(ended(tmp_path, "job-failed", [RAISED, LEFT]))
    assert said.count("ValueError: bad shape") == 1


def test_a_run_that_left_nothing_has_no_such_words(tmp_path: Path, tell: Tell) -> None:
    assert "code:" not in tell(ended(tmp_path, "succeeded", []))

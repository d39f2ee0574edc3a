"""What `ctl stop` tells a script."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from controller import lookup, stopping
from controller.core.errors import ConnectionFailed, CopyFailed, ExitCode, Interrupted, RefusedError
from controller.runfolder import RunFolder
from controller.sinks import Sink
from controller.stages.stop import StopOutcome, Telling
from controller.stopping import Said
from controller.ui import terminal
from controller.ui.stopped import print_stop


class Ended:
    """A run whose stop ended with `clean`."""

    id = "20260102-030405-abcdef"
    host = "gpu1"

    folder = RunFolder(Path("nowhere"))
    summary = None
    ended = False

    @property
    def state(self) -> str:
        return "finished" if self.ended else "running"

    def __init__(self, clean: bool | str, *, was_over: bool = False) -> None:
        self._clean, self._was_over = clean, was_over

    def stop(self, *, grace_s: float, telling: Telling | None) -> StopOutcome:
        left = (
            [{"pid": 17, "comm": "python", "reason": "could not be killed: state D"}] if self._clean is False else []
        )
        return StopOutcome(
            state="stopped", end_reason="stopped", gpus_clean=self._clean, killed=[], leftovers=left, message="",
            was_over=self._was_over, had_ended=self._was_over,
        )  # fmt: skip

    def refresh(self, *, handover_s: float = 0.0) -> None:
        """Nothing is new."""

    def add_sink(self, sink: Sink) -> None: ...

    def remove_sink(self, sink: Sink) -> None: ...


@pytest.mark.parametrize(
    ("clean", "code"), [(True, ExitCode.OK), ("unknown", ExitCode.OK), (False, ExitCode.UNEXPECTED)]
)
def test_a_stop_that_leaves_something_does_not_end_with_0(
    monkeypatch: pytest.MonkeyPatch, clean: bool | str, code: ExitCode
) -> None:
    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield Ended(clean)

    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(stopping, "load_workspace", lambda: None)
    printed = io.StringIO()
    monkeypatch.setattr(stopping, "out_console", lambda: Console(file=printed))
    assert stopping.stop(Ended.id, None, grace_s=1.0, as_json=False, sure=True) is code
    assert ("could not be killed" in printed.getvalue()) == (clean is False)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (ConnectionFailed("gpu1 cannot be reached"), "gpu1 cannot be reached"),
        (CopyFailed("there is no room here"), "there is no room here"),
        (KeyboardInterrupt(), f"interrupted: `ctl attach {Ended.id}` copies the rest"),
    ],
)
def test_what_a_stop_did_is_told_though_the_rest_cannot_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: BaseException, said: str
) -> None:
    class Uncopied(Ended):
        def refresh(self, *, handover_s: float = 0.0) -> None:
            raise why

    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield Uncopied(False)

    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(stopping, "load_workspace", lambda: None)
    assert stopping.stop(Ended.id, None, grace_s=1.0, as_json=False, sure=True) is ExitCode.UNEXPECTED
    out, err = capsys.readouterr()
    assert said in err
    assert "could not be killed" in out


class Slow(Ended):
    """A run whose host says what it does, and of which the waiting may be interrupted."""

    def __init__(self, interrupted: bool) -> None:
        super().__init__(True)
        self._interrupted = interrupted

    def stop(self, *, grace_s: float, telling: Telling | None) -> StopOutcome:
        assert telling is not None
        telling.doing("2 processes asked to end")
        telling.waiting()
        if self._interrupted:
            raise KeyboardInterrupt
        return super().stop(grace_s=grace_s, telling=telling)


@pytest.mark.parametrize(("as_json", "interrupted"), [(False, False), (True, False), (False, True)])
def test_a_stop_says_what_goes_on_unless_a_program_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool, interrupted: bool
) -> None:
    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield Slow(interrupted)

    said = io.StringIO()
    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(stopping, "load_workspace", lambda: None)
    monkeypatch.setattr(stopping, "err_console", lambda: Console(file=said, width=200))
    if interrupted:
        with pytest.raises(Interrupted, match=f"gpu1 goes on stopping run {Ended.id}"):
            stopping.stop(Ended.id, None, grace_s=30.0, as_json=as_json, sure=True)
        return
    assert stopping.stop(Ended.id, None, grace_s=30.0, as_json=as_json, sure=True) is ExitCode.OK
    told = [
        f"stopping run {Ended.id} on gpu1: TERM to all its processes, KILL after 30 s",
        "  2 processes asked to end",
        "  still at it after 0 s",
        "  copying the rest of its log and records here",
    ]
    assert said.getvalue().splitlines() == ([] if as_json else told)
    out, err = capsys.readouterr()
    assert err == ""
    assert not as_json or json.loads(out)["run_id"] == Ended.id


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("queued", f"run {Ended.id} waits in the queue of gpu1: taking it out"),
        ("unknown", f"stopping run {Ended.id} on gpu1"),
        ("orphaned", f"stopping run {Ended.id} on gpu1: TERM to all its processes, KILL after 30 s"),
        ("lost", f"run {Ended.id} has ended: asking gpu1 whether it left anything"),
    ],
)
def test_a_stop_announces_what_it_can_do_to_such_a_run(state: str, said: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    Said(console, Ended.id, "gpu1", 30.0, state=state)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"{said}\n"


@pytest.mark.parametrize("waits", [True, False])
def test_a_run_that_was_launched_and_left_may_queue_only_if_it_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waits: bool
) -> None:
    """With --detach nothing of it was copied here: the plan says whether it would."""
    left = Ended(True)
    monkeypatch.setattr(Ended, "state", "unknown")
    left.folder = RunFolder.create(tmp_path, Ended.id)
    left.folder.write_plan({"job": {"limits": {"wait_for_lease": True} if waits else {}}})

    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield left

    said = io.StringIO()
    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(stopping, "load_workspace", lambda: None)
    monkeypatch.setattr(stopping, "err_console", lambda: Console(file=said, width=200))
    monkeypatch.setattr(stopping, "out_console", lambda: Console(file=io.StringIO()))
    assert stopping.stop(Ended.id, None, grace_s=5.0, as_json=False, sure=True) is ExitCode.OK
    how = "" if waits else ": TERM to all its processes, KILL after 5 s"
    assert said.getvalue().splitlines()[0] == f"stopping run {Ended.id} on gpu1{how}"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"end_reason": "stopped", "message": "stopped while it was queued; nothing was started"},
            "stopped while it was queued; nothing was started",
        ),
        ({"end_reason": "lease-busy", "message": "held by run R"}, "held by run R; nothing was started"),
        ({"end_reason": "cancelled", "message": "given up"}, "given up; nothing was started"),
        (
            {"end_reason": "stopped", "message": "stopped", "last_stage": {"step": "command", "phase": None}},
            "stopped; not known whether the host is clean",
        ),
        (
            {"end_reason": "stopped", "message": "stopped", "gpus_clean": True},
            "stopped; host left clean",
        ),
        (
            {"end_reason": None, "state": "lost", "message": "it was over before"},
            "nothing was stopped; it was over before; not known whether the host is clean",
        ),
    ],
)
def test_of_a_run_that_never_began_no_doubt_is_cast_on_the_host(record: dict[str, Any], said: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    blank = {"run_id": Ended.id, "state": "finished", "gpus_clean": "unknown", "last_stage": None, "samples": None}
    print_stop(console, {**blank, **record})
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1] == f"  {said}"


@dataclass
class Folder:
    """A workspace with the runs of `runs_dir`."""

    runs_dir: Path


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str | None]:
    """A folder whose last run is `Ended`: the runs that were opened to be stopped, by the ids that were asked for."""
    RunFolder.create(tmp_path, Ended.id).write_local(status="launched", host={"name": "gpu1"})
    opened: list[str | None] = []

    @contextmanager
    def open_run(_: Any, run_id: str | None, *__: Any, **___: Any) -> Iterator[Ended]:
        opened.append(run_id)
        run = Ended(True)
        run.folder = RunFolder(tmp_path / Ended.id)
        yield run

    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(stopping, "load_workspace", lambda: Folder(tmp_path))
    return opened


@pytest.mark.parametrize("answer", [True, False])
def test_the_last_run_is_not_stopped_by_mistake(
    monkeypatch: pytest.MonkeyPatch, unnamed: list[str | None], answer: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(terminal, "can_ask", lambda: True)
    monkeypatch.setattr(terminal, "ask_yes_no", lambda question: asked.append(question) or answer)
    if answer:
        assert stopping.stop(None, None, grace_s=1.0, as_json=True, sure=False) is ExitCode.OK
    else:
        with pytest.raises(RefusedError, match="nothing was stopped"):
            stopping.stop(None, None, grace_s=1.0, as_json=True, sure=False)
    assert asked == [f"stop run {Ended.id} on host gpu1?"]
    assert unnamed == ([Ended.id] if answer else []), "that run, and no host is asked before a person is"


def test_without_a_terminal_no_run_is_stopped_on_a_guess(
    monkeypatch: pytest.MonkeyPatch, unnamed: list[str | None]
) -> None:
    monkeypatch.setattr(terminal, "can_ask", lambda: False)
    with pytest.raises(RefusedError, match="nobody is there to confirm") as refused:
        stopping.stop(None, None, grace_s=1.0, as_json=True, sure=False)
    assert refused.value.code == "confirmation-needed"
    assert refused.value.fix == f"name the run: `ctl stop {Ended.id}`; or say `ctl stop --last`"
    assert unnamed == []


@pytest.mark.parametrize("seen", [True, False])
def test_another_run_is_named_and_not_stopped_where_the_last_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], seen: bool
) -> None:
    """`--last` means one run, whatever became of it: an earlier one was not asked for.

    Its end need not have been seen here.
    """
    for run_id in (earlier := "20260101-000000-abcdef", Ended.id):
        RunFolder.create(tmp_path, run_id).write_local(status="launched")
    stopped = Ended(True, was_over=True)
    stopped.folder, stopped.ended = RunFolder(tmp_path / Ended.id), seen
    if seen:
        (tmp_path / Ended.id / "result.json").write_text("{}")

    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield stopped

    said = io.StringIO()
    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(stopping, "load_workspace", lambda: None)
    monkeypatch.setattr(stopping, "err_console", lambda: Console(file=said, width=200))
    for run_id, others in ((None, [earlier]), (Ended.id, [])):
        said.seek(0)
        said.truncate()
        assert stopping.stop(run_id, None, grace_s=1.0, as_json=True, sure=True) is ExitCode.OK
        assert json.loads(capsys.readouterr().out)["others"] == others
        words = [f"it had ended before; of run {other} no end is known: ctl stop {other}" for other in others]
        assert said.getvalue().splitlines() == words


def test_no_other_run_is_named_where_the_last_was_stopped_by_this(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run_id in ("20260101-000000-abcdef", Ended.id):
        RunFolder.create(tmp_path, run_id).write_local(status="launched")
    stopped = Ended(True)
    stopped.folder = RunFolder(tmp_path / Ended.id)

    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield stopped

    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(stopping, "load_workspace", lambda: None)
    assert stopping.stop(None, None, grace_s=1.0, as_json=True, sure=True) is ExitCode.OK
    assert json.loads(capsys.readouterr().out)["others"] == []


@pytest.mark.parametrize("seen", [True, False])
def test_a_stop_of_an_ended_run_says_that_nothing_was_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: bool
) -> None:
    folder = RunFolder.create(tmp_path, Ended.id)
    (folder.path / "result.json").write_text(json.dumps({"message": "", "ended": "2026-01-02T03:09:00Z"}))
    stopped = Ended(True, was_over=True)
    stopped.folder, stopped.ended = folder, seen

    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield stopped

    said, printed = io.StringIO(), io.StringIO()
    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(stopping, "load_workspace", lambda: None)
    monkeypatch.setattr(stopping, "err_console", lambda: Console(file=said, width=200))
    monkeypatch.setattr(stopping, "out_console", lambda: Console(file=printed, width=200))
    assert stopping.stop(Ended.id, None, grace_s=1.0, as_json=False, sure=True) is ExitCode.OK
    assert said.getvalue().splitlines()[0] == (
        f"run {Ended.id} has ended: asking gpu1 whether it left anything"
        if seen
        else f"stopping run {Ended.id} on gpu1: TERM to all its processes, KILL after 1 s"
    )
    first, second = printed.getvalue().splitlines()
    assert first.endswith(f"run {Ended.id} had already ended at 2026-01-02T03:09:00Z: stopped on request")
    assert second.startswith("  nothing was stopped; ")

"""What `ctl stop` tells a script."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from controller import commands, lookup
from controller.core.errors import ExitCode, RefusedError
from controller.runfolder import RunFolder
from controller.stages.stop import StopOutcome


class Ended:
    """A run whose stop ended with `clean`."""

    id = "20260102-030405-abcdef"
    host = "gpu1"

    folder: RunFolder
    ended = False

    def __init__(self, clean: bool | str) -> None:
        self._clean = clean

    def stop(self, *, grace_s: float) -> StopOutcome:
        left = (
            [{"pid": 17, "comm": "python", "reason": "could not be killed: state D"}] if self._clean is False else []
        )
        return StopOutcome(
            state="stopped", end_reason="stopped", gpus_clean=self._clean, killed=[], leftovers=left, message=""
        )

    def watch(self, *, follow: bool) -> None:
        assert not follow


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
    monkeypatch.setattr(commands, "load_workspace", lambda: None)
    printed = io.StringIO()
    monkeypatch.setattr(commands, "out_console", lambda: Console(file=printed))
    assert commands.stop(Ended.id, None, grace_s=1.0, as_json=False, sure=True) is code
    assert ("could not be killed" in printed.getvalue()) == (clean is False)


def test_the_last_run_is_not_stopped_by_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield Ended(True)

    asked: list[str] = []
    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(commands, "load_workspace", lambda: None)
    monkeypatch.setattr(commands, "can_ask", lambda: True)
    monkeypatch.setattr(commands, "ask_yes_no", lambda question: bool(asked.append(question)))
    with pytest.raises(RefusedError, match="nothing was stopped"):
        commands.stop(None, None, grace_s=1.0, as_json=False, sure=False)
    assert asked == [f"stop run {Ended.id} on host gpu1?"]


def test_another_run_is_named_and_not_stopped_where_the_last_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--last` means one run, whatever became of it: an earlier one was not asked for."""
    for run_id in (earlier := "20260101-000000-abcdef", Ended.id):
        RunFolder.create(tmp_path, run_id).write_local(status="launched")
    (tmp_path / Ended.id / "result.json").write_text("{}")
    stopped = Ended(True)
    stopped.folder, stopped.ended = RunFolder(tmp_path / Ended.id), True

    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Ended]:
        yield stopped

    said = io.StringIO()
    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(commands, "load_workspace", lambda: None)
    monkeypatch.setattr(commands, "err_console", lambda: Console(file=said, width=200))
    for run_id, words in ((None, f"ctl stop {earlier}\n"), (Ended.id, "")):
        said.seek(0)
        said.truncate()
        assert commands.stop(run_id, None, grace_s=1.0, as_json=False, sure=True) is ExitCode.OK
        assert said.getvalue()[-len(words) :] == words if words else not said.getvalue()

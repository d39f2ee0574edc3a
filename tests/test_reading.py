"""`ctl logs --problem` of runs whose log shows no problem: that is an answer, whatever became of the run."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.plans import host
from support.recorded import Script, failing, finished, started

from controller import lookup, reading
from controller.core.errors import ExitCode
from controller.core.loglines import Selection
from controller.run import Run
from controller.runfolder import RunFolder
from controller.transport.base import Transport

RUN_ID = "20260102-030405-abcdef"


class Unreachable(Transport):
    """Nobody is asked: all is on this workstation."""

    def close(self) -> None: ...


def stopped() -> Script:
    add = started()
    add(265.2, "supervisor", "step", name="extract", status="failed", text="", seconds=198.0)
    return add


@pytest.mark.parametrize(
    ("script", "end_reason", "state", "said"),
    [
        (finished, "succeeded", "finished", f"no problem was reported: run {RUN_ID} succeeded"),
        (
            stopped, "stopped", "finished",
            f"no problem was reported: run {RUN_ID} stopped on request while loading the model, after 3 min 12 s",
        ),
        (started, None, "running", f"no problem was reported so far: run {RUN_ID} is running"),
        (
            started, None, "lost",
            f"neither the events nor the log of run {RUN_ID} say why it is lost: neither job nor supervisor lives",
        ),
        (
            failing, "job-failed", "finished",
            "a decoder layer is called with other arguments than this vLLM's takes: "
            "TypeError: DeepseekV2DecoderLayer.forward() missing 1 required positional argument: 'llama_4_scaling'; "
            f"the log does not show it: `ctl summary {RUN_ID}` does",
        ),
    ],
)  # fmt: skip
def test_a_log_without_a_problem_is_an_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    script: Any,
    end_reason: str | None,
    state: str,
    said: str,
) -> None:
    folder = RunFolder.create(tmp_path, RUN_ID)
    (folder.path / "log").mkdir()
    (folder.path / "log" / "000001.log").write_text("all is well\n")
    for event in script().events:
        with (folder.path / "events" / f"{event.writer}.jsonl").open("a") as stream:
            stream.write(event.to_json() + "\n")
    (folder.path / "run.json").write_text(json.dumps({"state": state}))
    if end_reason is not None:
        (folder.path / "result.json").write_text(json.dumps({"end_reason": end_reason, "message": "the message"}))
        (folder.path / "summary.json").write_text(json.dumps({"end_reason": end_reason}))

    @contextmanager
    def open_run(*_: Any, **__: Any) -> Iterator[Run]:
        yield Run(folder, Unreachable(), host().record(), "payload")

    monkeypatch.setattr(lookup, "open_run", open_run)
    monkeypatch.setattr(lookup, "copy_or_say", lambda *_: None)
    monkeypatch.setattr(reading, "load_workspace", lambda: None)
    told = io.StringIO()
    monkeypatch.setattr(reading, "err_console", lambda: Console(file=told, width=300))
    wanted = reading.Wanted(selection=Selection(), problem=True)
    assert reading.logs(RUN_ID, None, wanted) is ExitCode.OK
    assert capfd.readouterr().out == ""
    assert told.getvalue().strip() == said

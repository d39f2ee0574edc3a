"""A run folder, or any file, to a named cause: what `ctl summary`, `ctl triage` and `ctl logs --problem` show."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.recorded import failing, healthy

from controller import commands, diagnosis
from controller.core.errors import ExitCode, UsageError
from controller.core.events import Event
from controller.diagnosis import diagnose_files, diagnose_run, problem_lines, with_triage
from controller.runfolder import RunFolder

LOGS = Path(__file__).parent / "data" / "vllm-logs"
KEYERROR = LOGS / "h200-0.24-load-keyerror.log"
RUN_ID = "20260102-030405-abcdef"
CLI_TIMEOUT_S = 60.0


def make_run(
    root: Path, log: bytes, *, events: Any = None, reason: str = "job-failed", cut: int = 10_000
) -> RunFolder:
    """A mirrored run: its log in two segments cut at a byte, and events by writer."""
    folder = RunFolder.create(root, RUN_ID)
    (folder.path / "log").mkdir()
    (folder.path / "log" / "000001.log").write_bytes(log[:cut])
    (folder.path / "log" / "000002.log").write_bytes(log[cut:])
    for event in events or ():
        with (folder.path / "events" / f"{event.writer}.jsonl").open("a") as stream:
            stream.write(event.to_json() + "\n")
    (folder.path / "result.json").write_text(json.dumps({"end_reason": reason, "message": "exited with code 1"}))
    return folder


def test_a_run_without_events_is_judged_by_its_log(tmp_path: Path) -> None:
    folder = make_run(tmp_path, KEYERROR.read_bytes())
    record = with_triage({"end_reason": "job-failed", "problems": []}, folder)
    assert (record["triage"]["code"], record["triage"]["known"]) == ("topk-method", True)
    (quote,) = record["triage"]["evidence"]
    lines = (folder.path / quote["segment"]).read_bytes().split(b"\n")
    assert quote["text"].encode() in lines[quote["line"] - 1]
    assert json.loads(json.dumps(record)) == record


def test_a_run_with_events_is_judged_by_them(tmp_path: Path) -> None:
    found = diagnose_run(make_run(tmp_path, b"nothing to see\n", events=failing().events)).triage
    assert found is not None
    assert (found.code, found.rank) == ("layer-signature", 3)


def driver_was_told(text: str = "Engine core initialization failed. See root cause above.") -> Event:
    """What the driver reports of an engine core that did not come up: nothing of its own."""
    trace = f'Traceback (most recent call last):\n  File "/w/engine.py", line 1, in _load\nRuntimeError: {text}'
    data = {"rank": None, "exc_type": "RuntimeError", "message": text, "traceback": trace, "where": "driver"}
    return Event(type="exception", run=RUN_ID, host="h", writer="driver", seq=1, t=1.0, data=data)


@pytest.mark.parametrize(
    ("name", "code", "source"),
    [
        ("cpu-0.32-shm-full", "shm-full", "EngineCore"),
        ("cpu-0.32-module-missing", "module-missing", "VllmWorker-0"),
        ("cpu-0.32-killed-in-load", "killed", "EngineCore"),
        ("cpu-0.32-cores-per-rank", "cores-per-rank", "EngineCore"),
    ],
)
def test_what_the_driver_was_only_told_is_looked_for_in_the_log(
    tmp_path: Path, name: str, code: str, source: str
) -> None:
    """Such a process of vLLM fails outside of the capture, so it reports no event."""
    log = (LOGS / f"{name}.log").read_bytes()
    folder = make_run(tmp_path, log, events=[driver_was_told()])
    looked = diagnose_run(folder)
    found = looked.triage
    assert found is not None
    assert (found.code, found.source) == (code, source)
    assert [each.first.source for each in looked.failures][-1] == "driver"
    events = sorted((folder.path / "events").iterdir())
    same = diagnose_files([LOGS / f"{name}.log", *events]).triage
    assert same is not None
    assert (same.code, same.source) == (code, source)


def test_what_an_event_tells_is_not_looked_for_in_the_log(tmp_path: Path) -> None:
    shm = (LOGS / "cpu-0.32-shm-full.log").read_bytes()
    found = diagnose_run(make_run(tmp_path, shm, events=[driver_was_told("no kernel for this model")])).triage
    assert found is not None
    assert (found.code, found.exception) == ("unknown", "RuntimeError: no kernel for this model")


def kernel_said(text: str) -> Event:
    """What the supervisor of a failed run keeps of the kernel's log."""
    data = {"level": "warn", "code": "kernel", "text": text}
    return Event(type="notice", run=RUN_ID, host="h", writer="supervisor", seq=1, t=1.0, data=data)


def test_what_the_hosts_kernel_said_is_evidence(tmp_path: Path) -> None:
    log = (LOGS / "cpu-0.32-killed-rank.log").read_bytes()
    found = diagnose_run(make_run(tmp_path / "a", log)).triage
    assert found is not None
    assert found.code == "killed"
    oom = kernel_said("Out of memory: Killed process 4242 (VLLM::Worker_TP) total-vm:1kB")
    found = diagnose_run(make_run(tmp_path / "b", log, events=[oom])).triage
    assert found is not None
    assert found.code == "oom-killed"
    assert [(quote.segment, quote.line) for quote in found.evidence] == [("events/supervisor.jsonl", 0)]
    # Beside an exception it is only told.
    xid = kernel_said("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.")
    found = diagnose_run(make_run(tmp_path / "c", KEYERROR.read_bytes(), events=[xid])).triage
    assert found is not None
    assert found.code == "topk-method"
    assert any("Xid" in quote.text for quote in found.context)


def test_files_of_events_come_before_the_logs_beside_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path, KEYERROR.read_bytes(), events=failing().events)
    events = sorted((folder.path / "events").iterdir())
    found = diagnose_files([KEYERROR, *events]).triage
    assert found is not None
    assert (found.code, found.rank) == ("layer-signature", 3)
    alone = diagnose_files(events).triage
    assert alone is not None
    assert alone.code == found.code


@pytest.mark.parametrize("reason", ["succeeded", "stopped", "cancelled"])
def test_an_end_that_is_no_failure_has_no_cause(tmp_path: Path, reason: str) -> None:
    folder = make_run(tmp_path, KEYERROR.read_bytes(), events=healthy().events, reason=reason)
    assert with_triage({"end_reason": reason}, folder)["triage"] is None
    assert diagnose_run(folder).triage is None


def test_the_problem_is_shown_with_the_lines_around_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path, KEYERROR.read_bytes())
    shown = problem_lines(folder)
    assert shown is not None
    place, lines = shown
    text = b"".join(lines)
    assert place.startswith(str(folder.path / "log" / "00000"))
    assert b"Traceback (most recent call last):" in text
    assert b"KeyError: 'layers.2.mlp.gate.e_score_correction_bias'" in text
    assert len(text) < KEYERROR.stat().st_size


def test_a_run_without_a_problem_in_its_log_says_so(tmp_path: Path) -> None:
    assert problem_lines(make_run(tmp_path / "a", b"all is well\n", reason="succeeded")) is None
    shown = problem_lines(make_run(tmp_path / "b", b"all is well\n", events=failing().events))
    assert shown is not None
    said, lines = shown
    assert lines == []
    assert "llama_4_scaling" in said
    assert said.endswith(f"; the log does not show it: `ctl summary {RUN_ID}` does")


def test_of_a_huge_log_the_end_is_read_and_its_lines_are_numbered_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "LOG_LIMIT", 40_000)
    before = b"INFO 11-29 19:00:00 [x.py:1] healthy\n" * 5000
    data = before + KEYERROR.read_bytes()
    for cut in (10_000, len(before) + 3000):
        folder = make_run(tmp_path / str(cut), data, cut=cut)
        found = diagnose_run(folder).triage
        assert found is not None
        (quote,) = found.evidence
        lines = (folder.path / quote.segment).read_bytes().split(b"\n")
        assert quote.text.encode() in lines[quote.line - 1]


def test_a_run_folder_can_be_given_to_triage(tmp_path: Path) -> None:
    folder = make_run(tmp_path, b"", events=failing().events)
    found = diagnose_files([folder.path])
    assert found.triage is not None
    assert found.triage.code == "layer-signature"
    assert found.failures[0].first.rank == 3


def test_files_are_streams_of_their_own(tmp_path: Path) -> None:
    half = tmp_path / "node-0.log"
    half.write_bytes(b"(Worker_TP1 pid=1) INFO 11-29 19:00:00 [x.py:1] no line end")
    found = diagnose_files([half, KEYERROR]).triage
    assert found is not None
    assert [(quote.segment, quote.line) for quote in found.evidence] == [(str(KEYERROR), 86)]


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        diagnose_files([tmp_path / "none.log"])


def ctl(*words: str, cwd: Path = Path(__file__).parents[1]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "controller", "triage", *words],
        capture_output=True, text=True, timeout=CLI_TIMEOUT_S, check=False, cwd=cwd,
    )  # fmt: skip


def test_the_command_shows_traceback_cause_place_and_remedy() -> None:
    done = ctl(str(KEYERROR))
    assert done.returncode == 0, done.stderr
    assert "KeyError: 'layers.2.mlp.gate.e_score_correction_bias'" in done.stdout
    assert "cause: config.json lacks `topk_method`" in done.stdout
    assert f"{KEYERROR}:86" in done.stdout
    assert '"topk_method": "noaux_tc"' in done.stdout
    assert done.stdout.rstrip().endswith("code: topk-method")


def test_the_command_prints_whole_only_what_is_not_a_mere_consequence() -> None:
    killed = ctl(str(LOGS / "cpu-0.32-killed-rank.log")).stdout
    assert "Traceback" not in killed
    assert "then EngineCore: RuntimeError: cancelled" in killed
    assert "cause: a process was killed by a signal: VllmWorker-1" in killed
    full = ctl(str(LOGS / "cpu-0.32-shm-full.log")).stdout
    assert full.count("Traceback (most recent call last):") == 1
    assert "then main process: RuntimeError: Engine core initialization failed" in full
    assert "the machine said" not in full
    alone = ctl(str(LOGS.parent / "vllm-threads" / "parent-only.log")).stdout
    assert alone.count("Traceback (most recent call last):") == 1
    assert "beside it" not in alone


def test_the_command_takes_a_run_by_a_part_of_its_id(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("schema = 1\n")
    make_run(tmp_path / "ctl-runs", KEYERROR.read_bytes())
    for word in (RUN_ID, RUN_ID[-6:]):
        done = ctl(word, cwd=tmp_path)
        assert "cause: config.json lacks `topk_method`" in done.stdout, done.stderr
    (tmp_path / RUN_ID[-6:]).write_text("all is well\n")  # a file of that name is what was named
    assert ctl(RUN_ID[-6:], cwd=tmp_path).stdout == "no sign of a failure\n"
    unknown = ctl("beef00", "--json", cwd=tmp_path)
    assert (unknown.returncode, json.loads(unknown.stdout)["error"]["code"]) == (2, "run-unknown")


def test_the_command_says_that_a_healthy_log_is_one() -> None:
    done = ctl(str(LOGS / "h200-0.24-healthy-run.log"))
    assert (done.returncode, done.stdout) == (0, "no sign of a failure\n")
    document = json.loads(ctl(str(LOGS / "h200-0.24-healthy-run.log"), "--json").stdout)
    assert (document["problem"], document["triage"]) == (False, None)


def test_the_command_gives_one_document(tmp_path: Path) -> None:
    document = json.loads(ctl(str(LOGS / "cpu-0.32-killed-rank.log"), "--json").stdout)
    assert document["problem"] is True
    assert (document["triage"]["code"], document["triage"]["rank"]) == ("killed", 1)
    refused = ctl(str(tmp_path / "none.log"), "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["code"] == "log-unreadable"


KILLED = {"end_reason": "job-signaled", "message": "command was killed by SIGKILL", "gpus_clean": True}
UNSTARTED = {
    "end_reason": "job-failed", "message": "nosuchprog could not be started: [Errno 2] No such file or directory",
    "gpus_clean": True,
}  # fmt: skip
END = {"exit_code": None, "gpus_clean": True}


def silent(root: Path, result: dict[str, Any] | None, *events: tuple[str, dict[str, Any]]) -> RunFolder:
    """A run whose job printed nothing: no log was ever copied here."""
    folder = RunFolder.create(root, RUN_ID)
    for seq, (kind, data) in enumerate(events):
        event = Event(type=kind, run=RUN_ID, host="gpu1", writer="supervisor", seq=seq, t=5.0 + seq, data=data)
        with (folder.path / "events" / "supervisor.jsonl").open("a") as stream:
            stream.write(event.to_json() + "\n")
    if result is not None:
        (folder.path / "result.json").write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize("copied", [True, False])
def test_a_run_that_was_killed_before_a_word_names_the_signal(tmp_path: Path, copied: bool) -> None:
    """Also at the very end of a watch, when the event is there and result.json is not."""
    end = ("end", {**END, "end_reason": "job-signaled", "signal": 9, "message": KILLED["message"]})
    found = diagnose_files([silent(tmp_path, KILLED if copied else None, end).path]).triage
    assert found is not None
    assert (found.code, found.what) == ("killed", "a process was killed by a signal: SIGKILL")
    assert found.source == "", "it was told by the supervisor, which lived"


@pytest.mark.parametrize(
    ("result", "run", "problem", "said"),
    [
        (
            UNSTARTED, None, True,
            f"run {RUN_ID} failed while running the command, after 1.0 s: nosuchprog could not be started: "
            "[Errno 2] No such file or directory; neither its events nor its log say more",
        ),
        ({**KILLED, "end_reason": "succeeded"}, None, False, f"no problem was reported: run {RUN_ID} succeeded"),
        (None, {"state": "running"}, False, f"no problem was reported so far: run {RUN_ID} is running"),
        (
            None, None, False,
            f"no problem was reported so far: of run {RUN_ID} nothing was copied here, if it was launched",
        ),
        (
            None, {"state": "running", "lost": True}, True,
            f"neither the events nor the log of run {RUN_ID} say why it is lost: neither job nor supervisor lives",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("named", ["part", "whole", "folder"])
def test_a_run_that_printed_nothing_is_an_answer_of_triage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: dict[str, Any] | None,
    run: dict[str, Any] | None,
    problem: bool,
    said: str,
    named: str,
) -> None:
    step = {"name": "command", "text": "", "seconds": None}
    steps = [("step", {**step, "status": "started"}), ("step", {**step, "status": "failed", "seconds": 1.0})]
    folder = silent(tmp_path / "ctl-runs", result, *steps)
    if run is not None:
        (folder.path / "run.json").write_text(json.dumps(run))
        (folder.path / "summary.json").write_text(json.dumps({"state": "lost" if run.get("lost") else "-"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "load_workspace", lambda: Folder(tmp_path / "ctl-runs"))
    path = {"part": Path(RUN_ID[-6:]), "whole": Path(RUN_ID), "folder": folder.path}[named]
    assert commands.triage([path], as_json=False) is ExitCode.OK
    assert capsys.readouterr().out == f"{said}\n"
    assert commands.triage([path], as_json=True) is ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert (answer["problem"], answer["triage"], answer["files"]) == (problem, None, [])


@dataclass
class Folder:
    """A workspace with the runs of `runs_dir`."""

    runs_dir: Path


def test_any_other_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        diagnose_files([tmp_path])

"""Files, journals and the summary; and that every module of the host side imports alone, without site-packages."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host import finish
from remote_payload.host.files import atomic_write, read_json, read_lines, sha256_of, tail_text
from remote_payload.host.finish import Ending, write_result
from remote_payload.host.journal import EventWriter, Journal
from remote_payload.host.layout import RunPaths
from remote_payload.host.leftovers import Baseline
from remote_payload.host.protocol import EndReason, Result
from remote_payload.host.summary import build_lost_summary, build_summary, fold_exceptions

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "remote_payload" / "host").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", MODULES)
def test_a_host_module_imports_without_site_packages(module: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import remote_payload.host.{module}"
    run = subprocess.run(
        [sys.executable, "-S", "-I", "-B", "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_atomic_write_replaces_whole_and_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    atomic_write(str(path), b"one")
    atomic_write(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_write(str(tmp_path / "folder"), b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.json", "folder"]


def test_documents_are_read_or_named(tmp_path: Path) -> None:
    assert read_json(str(tmp_path / "absent")) is None
    (tmp_path / "bad").write_text("{")
    with pytest.raises(ValueError, match="bad is not JSON"):
        read_json(str(tmp_path / "bad"))
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        read_json(str(tmp_path / "list"))


def test_lines_that_are_cut_or_foreign_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a":1}\n[2]\n\xff\n{"b":2}\n{"c":')
    assert read_lines(str(tmp_path / "a.jsonl")) == [{"a": 1}, {"b": 2}]
    assert read_lines(str(tmp_path / "absent")) == []


def test_digest_and_tail(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"ab")
    (tmp_path / "2").write_bytes(b"c")
    size, digest = sha256_of([str(tmp_path / "1"), str(tmp_path / "2")])
    assert (size, digest[:8]) == (3, "ba7816bf")
    assert tail_text(str(tmp_path / "1"), 1) == "b"
    assert tail_text(str(tmp_path / "absent")) == ""


def test_a_journal_goes_on_after_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    Journal(str(path)).append({"index": 1}, durable=True)
    with path.open("ab") as file:
        file.write(b'{"index":')
    Journal(str(path)).append({"index": 2, "text": "☃ \udcff"})
    assert [record.get("index") for record in read_lines(str(path))] == [1, 2]


def test_events_of_many_threads_have_one_sequence_that_survives_a_restart(tmp_path: Path) -> None:
    writer = EventWriter(str(tmp_path), "rank-0", "run", "box")
    threads = [
        threading.Thread(target=lambda: [writer.emit("notice", text="x" * 500) for _ in range(50)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    EventWriter(str(tmp_path), "rank-0", "run", "box").emit("notice", text="again")
    events = read_lines(str(tmp_path / "rank-0.jsonl"))
    assert [event["seq"] for event in events] == list(range(1, 402))
    assert {key: events[-1][key] for key in ("wire", "run", "host", "writer", "type", "text")} == {
        "wire": 1, "run": "run", "host": "box", "writer": "rank-0", "type": "notice", "text": "again",
    }  # fmt: skip


def exception(rank: int | None, t: float, traceback: str, message: str = "boom") -> dict[str, Any]:
    return {
        "type": "exception", "rank": rank, "t": t, "exc_type": "TypeError", "message": message,
        "traceback": traceback, "where": "forward",
    }  # fmt: skip


def test_equal_tracebacks_are_folded_under_the_rank_that_failed_first() -> None:
    events = [exception(0, 2.0, "A"), exception(3, 1.0, "A"), exception(None, 3.0, "B", ""), exception(0, 4.0, "A")]
    first, second = fold_exceptions(events)
    assert (first["rank"], first["ranks"], first["what"], first["traceback"]) == (3, [3, 0], "TypeError: boom", "A")
    assert (second["rank"], second["what"]) == (None, "TypeError"), "an exception without a text keeps its type"


def result(**changes: Any) -> Result:
    base = Result(
        wire=1, run_id="20260101-000000-aaaaaa", end_reason="job-failed", step="job", exit_code=1, signal=None,
        oom_killed=None, message="job exited with code 1", ended="", duration_s=1.0, gpus_clean=True, leftovers=[],
        log_bytes=0, log_sha256="",
    )  # fmt: skip
    base.update(changes)  # type: ignore[typeddict-item]
    return base


PLAN: dict[str, Any] = {
    "run_id": "20260101-000000-aaaaaa", "payload": "0" * 64, "ctl_version": "1", "timings": {"push_s": 1.0},
    "job": {"kind": "extract"}, "host": {"name": "box"},
}  # fmt: skip


def test_the_time_of_a_run_is_that_of_all_its_parts(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path))
    events = [
        ("driver", "phase", "data", 2.0, 10.0), ("driver", "phase", "load", 40.0, 50.0),
        ("driver", "phase", "probe", 20.0, 70.0), ("driver", "phase", "canary", 8.0, 78.0),
        ("driver", "phase", "capture", 3.0, 81.0), ("driver", "phase", "canary-end", 5.0, 86.0),
        ("supervisor", "step", "rehearse", 1.0, 8.0), ("supervisor", "step", "extract", 88.5, 96.5),
        ("supervisor", "step", "verify", 0.5, 97.0),
    ]  # fmt: skip
    os.makedirs(paths.events)
    for number, (writer, kind, name, seconds, t) in enumerate(events):
        event = {"type": kind, "name": name, "status": "done", "seconds": seconds, "t": t, "writer": writer}
        with open(os.path.join(paths.events, f"{writer}.jsonl"), "a") as file:
            file.write(json.dumps({**event, "seq": number}) + "\n")
    summary = build_summary(paths, PLAN, result(duration_s=99.0))
    assert summary["timings"] == {
        "push_s": 1.0, "rehearse_s": 1.0, "data_s": 2.0, "load_s": 40.0, "probe_s": 20.0, "canary_s": 13.0,
        "extract_s": 3.0, "shutdown_s": 10.5, "verify_s": 0.5, "host_s": 99.0,
    }  # fmt: skip


def test_a_pause_is_counted_also_one_that_nothing_ended(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path))
    os.makedirs(paths.events)
    told = [
        ("driver", "notice", "disk-low", 10.0), ("driver", "notice", "disk-full", 12.0),
        ("driver", "notice", "disk-freed", 40.0), ("driver", "notice", "sample-deferred", 41.0),
        ("driver", "notice", "disk-full", 50.0), ("supervisor", "sample", "", 55.5),
    ]  # fmt: skip
    for number, (writer, kind, code, t) in enumerate(told):
        with open(os.path.join(paths.events, f"{writer}.jsonl"), "a") as file:
            file.write(json.dumps({"type": kind, "code": code, "t": t, "writer": writer, "seq": number}) + "\n")
    assert build_summary(paths, PLAN, result())["timings"]["paused_s"] == 35.5
    os.remove(os.path.join(paths.events, "driver.jsonl"))
    assert "paused_s" not in build_summary(paths, PLAN, result())["timings"]


def test_the_summary_merges_verify_and_lists_causes_before_the_verdict(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path))
    writer = EventWriter(paths.events, "driver", "run", "box")
    writer.emit("phase", name="load", status="done", seconds=12.0)
    writer.emit("phase", name="capture", status="done", seconds=5.0)
    EventWriter(paths.events, "rank-0", "run", "box").emit(
        "exception", rank=0, exc_type="E", message="", traceback="T"
    )
    verify = {
        "samples": {"expected": 3},
        "timings": {"extract_s": 4.0},
        "problems": [{"code": "missing"}],
        "run_id": "x",
    }
    Path(paths.verify).write_text(json.dumps(verify))

    summary = build_summary(paths, PLAN, result(gpus_clean=False, leftovers=[{"pid": 5}]))
    assert summary["timings"] == {"push_s": 1.0, "load_s": 12.0, "extract_s": 4.0, "host_s": 1.0}
    assert [p["code"] for p in summary["problems"]] == ["exception", "missing", "job-failed", "not-clean"]
    assert summary["samples"] == {"expected": 3}
    assert summary["run_id"] == PLAN["run_id"], "the envelope wins over what verify wrote"
    assert (summary["state"], summary["hosts"], summary["schema_version"]) == ("finished", ["box"], 1)
    assert summary["allowed"] == []
    allowed = build_summary(paths, {**PLAN, "allowed": ["disk-low"]}, result(end_reason="succeeded"))
    assert allowed["allowed"] == ["disk-low"]


def written(paths: RunPaths, *events: tuple[float, str, str, str, str | None, float | None]) -> None:
    """Write events (t, writer, type, name or state, status, seconds)."""
    os.makedirs(paths.events, exist_ok=True)
    for seq, (t, writer, kind, name, status, seconds) in enumerate(events):
        record = {"type": kind, "t": t, "writer": writer, "seq": seq, "status": status, "seconds": seconds}
        record.update({"state": name} if kind == "state" else {"name": name})
        with open(os.path.join(paths.events, f"{writer}.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")


CAPTURING = (
    (5.0, "driver", "phase", "load", "started", None), (45.0, "driver", "phase", "load", "done", 40.0),
    (45.0, "driver", "phase", "capture", "started", None),
)  # fmt: skip


def test_the_stage_that_a_stop_cut_off_has_its_time(tmp_path: Path) -> None:
    """Else most of a stopped run's time would be nobody's; what the stop itself took is not the capture's."""
    paths = RunPaths(str(tmp_path))
    written(
        paths, *CAPTURING, (119.0, "supervisor", "state", "stopping", None, None),
        (140.0, "supervisor", "end", "", None, None),
    )  # fmt: skip
    timings = build_summary(paths, PLAN, result(end_reason="stopped", duration_s=140.0))["timings"]
    assert timings == {"push_s": 1.0, "load_s": 40.0, "extract_s": 74.0, "host_s": 140.0}


def test_so_has_one_that_failed_or_was_cut_off_while_it_wrote_its_rest(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path))
    written(
        paths, (0.0, "supervisor", "step", "rehearse", "started", None),
        (4.0, "supervisor", "step", "rehearse", "failed", 4.0), *CAPTURING,
        (50.0, "driver", "phase", "capture", "done", 5.0), (50.0, "driver", "phase", "drain", "started", None),
        (52.0, "supervisor", "end", "", None, None),
    )  # fmt: skip
    timings = build_summary(paths, PLAN, result(duration_s=52.0))["timings"]
    assert (timings["rehearse_s"], timings["load_s"], timings["extract_s"]) == (4.0, 40.0, 7.0)


def test_a_lost_runs_time_ends_with_its_last_sign_of_life(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path))
    written(
        paths, *CAPTURING, (60.5, "sampler", "sample", "", None, None),
        (5000.0, "controller", "stage", "watch", "done", 3.0),  # of whoever looked later
    )  # fmt: skip
    summary = build_lost_summary(paths, PLAN, {"wire": 1})
    assert (summary["state"], summary["end_reason"], summary["gpus_clean"]) == ("lost", None, "unknown")
    assert summary["last_seen"] == "1970-01-01T00:01:00Z"
    assert summary["timings"] == {"push_s": 1.0, "load_s": 40.0, "extract_s": 15.5}
    assert "bootstrap_python" not in summary["versions"], "that of the host is not known here"


def test_a_lost_run_that_never_said_anything_was_never_seen(tmp_path: Path) -> None:
    summary = build_lost_summary(RunPaths(str(tmp_path)), PLAN, {"wire": 1})
    assert (summary["last_seen"], summary["timings"], summary["problems"]) == (None, {"push_s": 1.0}, [])


def test_an_extraction_that_was_not_verified_says_how_far_it_came(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path))
    os.makedirs(paths.ledger)
    assert "samples" not in build_summary(paths, PLAN, result()), "nothing is known of what was wanted"
    driver = EventWriter(paths.events, "driver", "run", "box")
    driver.emit("progress", done=0, total=10)  # before the load
    none = {"expected": 10, "written": 0, "skipped": 0, "failed": 0, "missing": 10}
    assert build_summary(paths, PLAN, result())["samples"] == none
    for done in (1, 2):
        driver.emit("progress", done=done, total=10)
    lines = {
        "driver": [
            {"index": 0, "kept": True},
            {"index": 3, "skipped": "empty"},
            {"index": 9, "failed": "job-failed"},
        ],
        "rank-0": [{"index": 2}, {"index": 4}, {"index": 4}],
        "rank-1": [{"index": 1}],
    }
    for name, records in lines.items():
        Path(paths.ledger, f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    counted = {"expected": 10, "written": 4, "skipped": 1, "failed": 0, "missing": 6}
    assert build_summary(paths, PLAN, result())["samples"] == counted
    command = {**PLAN, "job": {"kind": "command"}}
    assert "samples" not in build_summary(paths, command, result())
    Path(paths.verify).write_text(json.dumps({"samples": {"expected": 3}}))
    assert build_summary(paths, PLAN, result())["samples"] == {"expected": 3}, "a look at the files knows better"


@pytest.mark.parametrize(
    ("own", "before", "after", "told"),
    [
        (2, None, None, True),
        (0, 5, 9, False),  # its own cgroup knows: what was killed beside it is somebody else's
        (None, 5, 6, True),
        (None, 5, 5, False),
        (None, None, 6, None),
        (None, 5, None, None),
    ],
)
def test_an_oom_kill_is_in_the_result_where_memory_is_accounted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: int | None,
    before: int | None,
    after: int | None,
    told: bool | None,
) -> None:
    monkeypatch.setattr(finish, "count_oom_kills", lambda: after)
    paths = RunPaths(str(tmp_path))
    ending = Ending(EndReason.JOB_SIGNALED, "job was killed by SIGKILL", "job", signal=9)
    baseline = Baseline(shm=[], gpu_memory={}, oom_kills=before, leases=[])
    written = write_result(
        paths, PLAN, ending, clean=True, leftovers=[], boot_s=0.0, baseline=baseline, oom_kills=own
    )
    assert (written["oom_killed"], written["signal"], written["end_reason"]) == (told, 9, "job-signaled")
    assert json.loads(Path(paths.result).read_bytes()) == written


def test_an_unreadable_verify_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "verify.json").write_text("{")
    summary = build_summary(RunPaths(str(tmp_path)), PLAN, result(end_reason="succeeded"))
    assert [p["code"] for p in summary["problems"]] == ["verify-unreadable"]


def test_unknown_verbs_are_a_usage_error() -> None:
    main = ROOT / "remote_payload" / "host" / "main.py"
    run = subprocess.run([sys.executable, "-S", "-I", "-B", main, "dance"], capture_output=True, text=True)
    assert run.returncode == 64
    assert "usage: main.py probe|start|" in run.stderr
    assert os.fspath(main).endswith("main.py")

"""Triage of whole logs: recorded failures of real engines, excerpts of public threads, events, and places."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded import failing, view_of

from controller.core.logs import worker_tracebacks
from controller.core.tracebacks import Failure, fold
from controller.core.triage import EVIDENCE_LIMIT, PARTLY_WHY, Ending, PlacedLine, Triage, place_lines, triage
from controller.core.triage_catalogue import CATALOGUE

DATA = Path(__file__).resolve().parents[1] / "data"

LOGS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    # name: (cause, the process that failed first, its ranks)
    "cpu-0.32-tp1-pin-memory-mid-run": ("no-pinned-memory", "Worker", ()),
    "cpu-0.32-tp2-both-ranks-rename-race": ("same-file", "Worker_TP0", (0, 1)),
    "h200-0.24-load-keyerror": ("topk-method", "EngineCore", ()),
    "h200-0.24-state-count-mismatch-mid-run": ("state-count", "EngineCore", ()),
    "cpu-0.32-architecture": ("architecture", "", ()),
    "cpu-0.32-config-broken": ("config-broken", "", ()),
    "cpu-0.32-config-key": ("weights-config", "Worker", ()),
    "cpu-0.32-cores-per-rank": ("cores-per-rank", "EngineCore", ()),
    "cpu-0.32-disk-full": ("disk-full", "Worker", ()),
    "cpu-0.32-empty-message": ("empty-message", "Worker", ()),
    "cpu-0.32-engine-argument": ("engine-argument", "", ()),
    "cpu-0.32-engine-value": ("engine-value", "", ()),
    "cpu-0.32-engine-value-renamed": ("engine-value", "", ()),
    "cpu-0.32-heads": ("heads", "", ()),
    "cpu-0.32-head-size": ("head-size", "Worker", ()),
    "cpu-0.32-killed-rank": ("killed", "VllmWorker-1", (1,)),
    "cpu-0.32-layer-signature": ("layer-signature", "Worker", ()),
    "cpu-0.32-max-model-len": ("max-model-len", "", ()),
    "cpu-0.32-port-taken": ("port-taken", "", ()),
    "cpu-0.32-prompt-too-long": ("prompt-too-long", "", ()),
    "cpu-0.32-remote-code": ("remote-code", "", ()),
    "cpu-0.32-shard-truncated": ("shard-truncated", "Worker", ()),
    "cpu-0.32-shm-full": ("shm-full", "EngineCore", ()),
    "cpu-0.32-topk-method": ("topk-method", "Worker", ()),
    "cpu-0.32-weights-missing": ("shard-missing", "Worker", ()),
    "cpu-0.32-embedding-method": ("embedding-method", "Worker", ()),
    "cpu-0.32-host-memory": ("host-memory", "Worker", ()),
    "cpu-0.32-killed-in-load": ("killed", "EngineCore", ()),
    "cpu-0.32-kv-cache": ("kv-cache-small", "EngineCore", ()),
    "cpu-0.32-module-missing": ("module-missing", "VllmWorker-0", (0,)),
    "cpu-0.32-read-only": ("read-only", "Worker", ()),
    "pip-no-version": ("package-missing", "", ()),
    "uv-no-version": ("package-missing", "", ()),
    "cpu-0.32-rpc-timeout": ("step-timeout", "EngineCore", ()),
    "cpu-0.32-shapes": ("weights-config", "Worker", ()),
    "cpu-0.32-shard-missing": ("shard-missing", "Worker", ()),
    "cpu-0.32-symbol-missing": ("symbol-missing", "VllmWorker-0", (0,)),
}
HEALTHY = ("h200-0.24-healthy-run", "cpu-0.32-healthy")

SEVERAL = {("cpu-0.32-rpc-timeout", "broadcast-timeout")}
"""Logs that also match another entry, tried alone: the engine's wait for a step is a wait on the broadcast."""

THREADS = {
    "compile-cache": "compile-cache",
    "kv-cache": "kv-cache-small",
    "memory-step": "gpu-memory-step",
    "memory-taken": "gpu-memory-taken",
    "no-kernel-image": "no-kernel-image",
    "parent-only": "unknown",
    "shm-full": "shm-full",
    "step-timeout": "step-timeout",
}


def placed(path: Path) -> list[PlacedLine]:
    return place_lines([(path.name, path.read_bytes())])


def judged(path: Path) -> Triage:
    found = triage(placed(path))
    assert found is not None
    return found


@pytest.mark.parametrize("name", LOGS)
def test_a_recorded_failure_gives_its_cause_its_process_and_its_place(name: str) -> None:
    code, source, ranks = LOGS[name]
    path = DATA / "vllm-logs" / f"{name}.log"
    found = judged(path)
    assert (found.code, found.source, found.ranks) == (code, source, ranks)
    assert found.rank == (ranks[0] if ranks else None)
    lines = path.read_bytes().decode(errors="replace").split("\n")
    assert 1 <= len(found.evidence) <= EVIDENCE_LIMIT
    for quote in found.evidence:
        assert quote.segment == path.name
        assert quote.text[:100] in lines[quote.line - 1]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_has_no_cause(name: str) -> None:
    assert triage(placed(DATA / "vllm-logs" / f"{name}.log")) is None


def test_every_recorded_log_is_judged_here() -> None:
    assert {path.stem for path in (DATA / "vllm-logs").glob("*.log")} == {*LOGS, *HEALTHY}
    assert {path.stem for path in (DATA / "vllm-threads").glob("*.log")} == set(THREADS)


@pytest.mark.parametrize("name", THREADS)
def test_an_excerpt_of_a_public_thread(name: str) -> None:
    found = judged(DATA / "vllm-threads" / f"{name}.log")
    assert found.code == THREADS[name]
    assert found.known is (found.code != "unknown")
    if not found.known:
        assert found.what.startswith(f"unknown cause: {found.exception.partition(chr(10))[0]}")
        assert found.traceback.startswith("Traceback")
    page = (DATA.parents[1] / "docs" / "triage.md").read_text()
    assert f"`{name}.log`" in page


def test_the_catalogue_over_every_log_names_no_wrong_cause(capsys: pytest.CaptureFixture[str]) -> None:
    expected: dict[Path, str] = {DATA / "vllm-logs" / f"{name}.log": code for name, (code, *_) in LOGS.items()}
    expected |= {DATA / "vllm-logs" / f"{name}.log": "healthy" for name in HEALTHY}
    expected |= {DATA / "vllm-threads" / f"{name}.log": code for name, code in THREADS.items()}
    table: dict[tuple[str, str], int] = {}
    for path, code in expected.items():
        found = triage(placed(path))
        cell = (code, found.code if found else "healthy")
        table[cell] = table.get(cell, 0) + 1
    with capsys.disabled():
        print(f"\n{'is':<20} {'named':<20} logs")
        for (code, named), count in sorted(table.items()):
            print(f"{code:<20} {named:<20} {count:>4}{'' if code == named else '  WRONG'}")
    assert [cell for cell in table if cell[0] != cell[1]] == []


def test_each_entry_is_silent_on_the_logs_of_other_causes() -> None:
    """Alone, without the entries before it: what an entry says must not hang on its place in the order."""
    several = set()
    for name, (code, *_) in LOGS.items():
        lines = placed(DATA / "vllm-logs" / f"{name}.log")
        failures = worker_tracebacks(each.line for each in lines)
        for entry in CATALOGUE:
            found = triage(lines, failures, catalogue=(entry,))
            if found is not None and found.known and entry.code != code:
                several.add((name, entry.code))
    assert several == SEVERAL


def test_places_count_across_segments_and_a_line_may_lie_over_their_border() -> None:
    data = (DATA / "vllm-logs" / "h200-0.24-load-keyerror.log").read_bytes()
    (whole,) = judged(DATA / "vllm-logs" / "h200-0.24-load-keyerror.log").evidence
    cut = sum(len(line) + 1 for line in data.split(b"\n")[: whole.line - 1]) + 30
    found = triage(place_lines([("a", data[:cut]), ("b", data[cut:])]))
    assert found is not None
    assert [(quote.segment, quote.line, quote.text) for quote in found.evidence] == [("b", 1, whole.text)]
    numbered = place_lines([("a", b"x\ny\n"), ("b", b"z\n")], first=7)
    assert [(each.segment, each.number, each.line.text) for each in numbered] == [
        ("a", 7, "x"), ("a", 8, "y"), ("b", 1, "z"),
    ]  # fmt: skip


@given(cuts=st.lists(st.integers(0, 21_377), max_size=6))
def test_any_cut_into_segments_gives_the_same_cause_and_text(cuts: list[int]) -> None:
    data = (DATA / "vllm-logs" / "h200-0.24-load-keyerror.log").read_bytes()
    edges = [0, *sorted(cuts), len(data)]
    pieces = [(str(i), data[a:b]) for i, (a, b) in enumerate(pairwise(edges))]
    found, whole = triage(place_lines(pieces)), triage(place_lines([("0", data)]))
    assert found is not None
    assert whole is not None
    assert (found.code, found.traceback) == (whole.code, whole.traceback)


@pytest.mark.parametrize(
    "stamp", ["2026-03-11T17:58:00.349589Z ", "[2026-03-11T17:58:00Z] ", "vllm-1  | 2026-03-11T17:58:00+01:00 "]
)
def test_what_a_container_runtime_puts_before_a_line_is_no_part_of_it(stamp: str) -> None:
    path = DATA / "vllm-logs" / "cpu-0.32-tp2-both-ranks-rename-race.log"
    text = "".join(stamp + line for line in path.read_text().splitlines(keepends=True))
    found = triage(place_lines([("log", text.encode())]))
    assert found is not None
    assert (found.code, found.ranks) == ("same-file", (0, 1))


def test_events_come_before_the_log() -> None:
    view = view_of(failing().events)
    found = triage([], view.exceptions, Ending(end_reason="job-failed"))
    assert found is not None
    assert (found.code, found.rank, found.ranks) == ("layer-signature", 3, tuple(range(8)))
    assert found.where == "worker.py:77 in forward"
    (quote,) = found.evidence
    assert (quote.segment, quote.line) == ("events/rank-3.jsonl", 0)
    assert found.others == ("driver: RuntimeError: Engine core initialization failed. See root cause above.",)


def test_an_event_is_quoted_from_the_log_where_it_stands_there_too() -> None:
    path = DATA / "vllm-logs" / "h200-0.24-load-keyerror.log"
    (first, *_) = worker_tracebacks(each.line for each in placed(path))
    event = Failure(
        source="rank-0", rank=0, exc_type="KeyError", message=first.first.message, traceback=first.first.traceback
    )
    found = triage(placed(path), fold([event]))
    assert found is not None
    assert (found.rank, found.evidence[0].segment) == (0, path.name)


def test_an_unknown_failure_is_shown_and_not_explained() -> None:
    lines = ["Traceback (most recent call last):", '  File "/w.py", line 1, in a', "ValueError: nobody has seen this"]
    log = "".join(f"(Worker_TP2 pid=7) {line}\n" for line in lines).encode()
    found = triage(place_lines([("log", log)]))
    assert found is not None
    what = "unknown cause: ValueError: nobody has seen this, at /w.py:1 in a"
    assert (found.code, found.known, found.what, found.why, found.fix) == ("unknown", False, what, "", "")
    assert (found.rank, found.exception) == (2, "ValueError: nobody has seen this")
    assert [(quote.segment, quote.line) for quote in found.evidence] == [("log", 3)]


def test_of_a_chain_the_direct_cause_counts_and_what_was_merely_handled_does_not() -> None:
    inner = 'Traceback (most recent call last):\n  File "/w.py", line 1, in a\nOSError: Read-only file system\n'
    outer = '\nTraceback (most recent call last):\n  File "/w.py", line 2, in b\nRuntimeError: nothing was written\n'
    direct = "\nThe above exception was the direct cause of the following exception:\n"
    handled = "\nDuring handling of the above exception, another exception occurred:\n"
    codes = [triage(place_lines([("log", (inner + link + outer).encode())])) for link in (direct, handled)]
    assert [found and found.code for found in codes] == ["read-only", "unknown"]


def test_a_parents_traceback_after_its_childs_is_the_parents_own() -> None:
    found = judged(DATA / "vllm-logs" / "cpu-0.32-shm-full.log")
    assert found.source == "EngineCore"
    (parent,) = found.others
    assert parent.startswith("main process: RuntimeError: Engine core initialization failed.")
    assert found.context == ()  # what Python's exceptions say is not what the machine said


def test_warnings_behind_a_traceback_are_no_part_of_its_message() -> None:
    found = judged(DATA / "vllm-logs" / "cpu-0.32-killed-rank.log")
    assert found.others[-1] == (
        "main process: vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
        "See stack trace (above) for the root cause."
    )


def test_a_log_with_a_parents_part_alone_says_where_the_workers_would_be() -> None:
    found = judged(DATA / "vllm-threads" / "parent-only.log")
    assert "only a parent's words" in found.why
    assert "(EngineCore" in found.fix


def test_a_rank_that_lost_its_peer_does_not_hide_who_was_killed() -> None:
    log = (
        b"(Worker_TP0 pid=7) ERROR 11-29 19:00:00 [x.py:1] Traceback (most recent call last):\n"
        b'(Worker_TP0 pid=7) ERROR 11-29 19:00:00 [x.py:1]   File "/w.py", line 1, in a\n'
        b"(Worker_TP0 pid=7) ERROR 11-29 19:00:00 [x.py:1] RuntimeError: [gloo/pair.cc:1] Connection closed by peer\n"
        b"(EngineCore pid=3) ERROR 11-29 19:00:01 [x.py:1] Worker proc VllmWorker-1 died unexpectedly (-9)\n"
        b"kernel: Out of memory: Killed process 8 (VLLM::Worker_TP)\n"
    )
    found = triage(place_lines([("log", log)]))
    assert found is not None
    assert found.code == "oom-killed"
    assert [quote.line for quote in found.context] == [4]
    without_kernel = triage(place_lines([("log", log[: log.index(b"kernel:")])]))
    assert without_kernel is not None
    assert (without_kernel.code, without_kernel.rank) == ("killed", 1)


@pytest.mark.parametrize(
    ("line", "who"),
    [
        (
            "(EngineCore pid=3) ERROR 11-29 22:10:59 [x.py:1] Worker proc VllmWorker-1 died unexpectedly",
            "VllmWorker-1",
        ),
        ("RuntimeError: See root cause above. Failed core proc(s): {'EngineCore': -9}", "EngineCore"),
        ("ERROR 11-29 22:10:59 [x.py:1] Rank 1 pid 4242 died, exit code: -9", "pid 4242"),
    ],
)
def test_whoever_was_killed_is_named(line: str, who: str) -> None:
    found = triage(place_lines([("log", f"{line}\n".encode())]))
    assert found is not None
    assert (found.code, found.what) == ("killed", f"a process was killed by a signal: {who}")


def test_the_driver_names_a_process_that_is_gone_and_passes_on_what_a_rank_raised() -> None:
    frame = 'Traceback (most recent call last):\n  File "/w.py", line 1, in a\n'
    lost = f"{frame}remote_payload.extract.watch.EngineLostError: "
    gone = triage(place_lines([("log", f"{lost}the process of rank 1 (pid 7) is gone: it was killed\n".encode())]))
    assert gone is not None
    assert (gone.code, gone.what) == ("killed", "a process was killed by a signal: rank 1 (pid 7)")
    worker = "(Worker_TP1 pid=7) ERROR 11-29 19:00:00 [x.py:1] "
    raised = "".join(f"{worker}{line}\n" for line in (frame + "ValueError: wrong").splitlines())
    passed = triage(
        place_lines([("log", f"{raised}{lost}rank 1 raised ValueError: wrong (in load_model)\n".encode())])
    )
    assert passed is not None
    assert (passed.rank, passed.exception) == (1, "ValueError: wrong")


DIED = "(EngineCore pid=3) ERROR 11-29 19:00:01 [x.py:1] Worker proc VllmWorker-1 died unexpectedly (-9)\n"
OOM = "Out of memory: Killed process 4242 (python) total-vm:1kB"
XID = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        (f"[Sat Nov 29 18:59:58 2026] {OOM}", "oom-killed"),
        (f"Nov 29 18:50:00 box kernel: {OOM}", "oom-killed"),
        (f"2026-11-29T18:59:58+0000 box kernel: {OOM}", "oom-killed"),
        (f"kernel: {OOM}", "oom-killed"),
        (f"[12345.678901] {OOM.replace('4242', '3')}", "oom-killed"),  # the EngineCore's own pid
        (f"[Sat Nov 29 14:00:00 2026] {OOM}", "killed"),
        (f"Nov 28 19:00:00 box kernel: {OOM}", "killed"),
        (f"Aug 29 19:00:00 box kernel: {OOM}", "killed"),
        (f"2026-11-29T19:30:00+0000 box kernel: {OOM}", "killed"),
        (f"[12345.678901] {OOM}", "killed"),
        (f"[Sat Nov 29 18:59:58 2026] {XID}", "gpu-fault"),
        (f"[Fri Nov 27 18:59:58 2026] {XID}", "killed"),
    ],
)
def test_the_kernels_lines_count_only_around_the_failure(kernel: str, code: str) -> None:
    found = triage(place_lines([("log", f"{DIED}{kernel}\n".encode())]))
    assert found is not None
    assert found.code == code
    quoted = [quote.text for quote in (*found.evidence, *found.context)]
    assert any("kernel" in text or text.startswith("[") or "Out of" in text for text in quoted) is (code != "killed")


def test_midnight_and_new_year_lie_between_neighbours() -> None:
    log = DIED.replace("11-29 19:00:01", "01-01 00:00:05")
    near = triage(place_lines([("log", f"{log}Dec 31 23:59:50 box kernel: {OOM}\n".encode())]))
    far = triage(place_lines([("log", f"{log}Jan  1 23:59:50 box kernel: {OOM}\n".encode())]))
    assert near is not None
    assert far is not None
    assert (near.code, far.code) == ("oom-killed", "killed")


def test_the_host_says_that_the_kernel_killed_the_job() -> None:
    ending = Ending(end_reason="job-signaled", signal=9, message="extract was killed by SIGKILL", oom_killed=True)
    found = triage([], (), ending)
    assert found is not None
    assert found.code == "oom-killed"


def test_a_job_that_a_signal_ended_without_a_word() -> None:
    ending = Ending(end_reason="job-signaled", signal=9, message="the job was killed by signal 9 (SIGKILL)")
    found = triage(place_lines([("log", b"INFO 11-29 19:00:00 [x.py:1] loading\n")]), (), ending)
    assert found is not None
    assert (found.code, found.evidence[0].text) == ("killed", ending.message)
    assert triage(place_lines([("log", b"exit 7\n")]), (), Ending(end_reason="job-failed")) is None


def test_a_record_is_json_with_whole_words() -> None:
    record = judged(DATA / "vllm-logs" / "cpu-0.32-killed-rank.log").record()
    assert record["known"] is True
    assert record["evidence"][0]["text"].startswith("Worker proc VllmWorker-1 died unexpectedly")
    assert set(record) == {
        "known", "code", "what", "why", "fix", "rank", "ranks", "source", "exception", "where", "evidence", "context",
        "others", "traceback",
    }  # fmt: skip


def test_a_line_of_a_process_is_the_cause_where_its_traceback_is_missing() -> None:
    """The parent says that it stands above; of the engine core's record the frames are cut off."""
    parent = (DATA / "vllm-threads" / "parent-only.log").read_bytes()
    line = b"(EngineCore pid=7) ERROR 11-30 12:00:00 [core.py:9] AssertionError: "
    known = b"Given number of CPU id list ['0', '1'] doesn't match local world size 4."
    for said, code in ((known, "cores-per-rank"), (b"the sky is not blue", "unknown")):
        found = triage(place_lines([("log", line + said + b"\n" + parent)]))
        assert found is not None
        assert (found.code, found.source, found.exception) == (code, "EngineCore", f"AssertionError: {said.decode()}")
        assert found.why != PARTLY_WHY
        assert (found.evidence[0].line, found.evidence[0].segment) == (1, "log")
    for harmless in (line.replace(b"ERROR", b"INFO"), line[len(b"(EngineCore pid=7) ") :]):
        found = triage(place_lines([("log", harmless + known + b"\n" + parent)]))
        assert found is not None
        assert (found.code, found.why) == ("unknown", PARTLY_WHY)


def test_a_refused_value_is_named_with_what_it_should_be() -> None:
    found = judged(DATA / "vllm-logs" / "cpu-0.32-engine-value.log")
    assert found.what == "[engine] `max_num_seqs` is 'eight', and should be a valid integer"
    assert found.exception.split("\n")[1] == "max_num_seqs"
    assert "Input should be a valid integer" in found.evidence[1].text

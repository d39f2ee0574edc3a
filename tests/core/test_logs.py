"""LogFolder and worker_tracebacks, on real vLLM logs and on bytes that no log should hold."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.logs import LINE_CAP, Level, LogFolder, LogLine, parse_line, worker_tracebacks

LOGS = Path(__file__).parent.parent / "data" / "vllm-logs"


def lines_of(*pieces: bytes) -> list[LogLine]:
    folder = LogFolder()
    lines = [line for piece in pieces for line in folder.feed(piece)]
    return lines + folder.close()


def fixture(name: str) -> list[LogLine]:
    return lines_of((LOGS / name).read_bytes())


@pytest.mark.parametrize(
    ("raw", "source", "rank", "level", "text"),
    [
        (
            "(EngineCore pid=3898) INFO 11-29 19:37:20 [core.py:114] Initializing",
            "EngineCore",
            None,
            "INFO",
            "Initializing",
        ),
        ("(Worker_TP1 pid=7) ERROR 11-29 19:43:59 [m.py:1]   File", "Worker_TP1", 1, "ERROR", "  File"),
        ("(Worker_DP0_TP3_EP3 pid=7) WARNING 11-29 19:43:59 [m.py:1] w", "Worker_DP0_TP3_EP3", 3, "WARNING", "w"),
        ("(VllmWorker-0 pid=7) WARNING 11-29 19:43:59 [m.py:1] w", "VllmWorker-0", 0, "WARNING", "w"),
        ("INFO 11-29 19:37:19 [vllm.py:1006] plain", "", None, "INFO", "plain"),
        (
            "(EngineCore pid=7) 2026-11-29 19:38:00,735 - INFO - a.py:6 - j: x",
            "EngineCore",
            None,
            "INFO",
            "a.py:6 - j: x",
        ),
        ("[rank5]:[W1129 19:28:07.66 ProcessGroupNCCL.cpp:1575] Warning: leak", "", 5, "WARNING", "Warning: leak"),
        ("/opt/x.py:138: FutureWarning: old", "", None, "WARNING", "/opt/x.py:138: FutureWarning: old"),
        ("(not a prefix) text", "", None, None, "(not a prefix) text"),
    ],
)
def test_a_line_tells_its_process_rank_and_level(
    raw: str, source: str, rank: int | None, level: str | None, text: str
) -> None:
    line = parse_line(raw)
    assert (line.source, line.rank, line.level, line.text) == (source, rank, level, text)
    assert line.raw == raw


def test_of_a_progress_bar_only_the_last_state_is_left() -> None:
    lines = fixture("h200-0.24-healthy-run.log")
    bars = [line for line in lines if line.progress]
    assert [bar.text.split("|")[0] for bar in bars] == [
        "Capturing CUDA graphs (PIECEWISE): 100%",
        "Capturing CUDA graphs (FULL): 100%",
    ]
    assert {bar.source for bar in bars} == {"EngineCore"}


def test_a_record_written_behind_a_bar_is_a_line_of_its_own() -> None:
    lines = fixture("cpu-0.32-tp1-pin-memory-mid-run.log")
    number = next(i for i, line in enumerate(lines) if line.text == "WorkerProc hit an exception.")
    assert lines[number].source == "Worker"
    assert lines[number].level is Level.ERROR
    assert lines[number - 1].progress
    assert lines[number - 1].text.startswith("Processed prompts:   0%")
    assert "(Worker" not in lines[number - 1].text


def test_a_carriage_return_before_the_line_feed_is_no_progress_bar() -> None:
    (line,) = lines_of(b"(Worker pid=1) ERROR 11-29 19:09:50 [m.py:1] hit\r\n")
    assert (line.text, line.progress) == ("hit", False)


def test_the_partial_line_shows_a_bar_that_has_no_end_yet() -> None:
    folder = LogFolder()
    assert folder.feed(b"done\n\rLoading: 10%\rLoading: 20%")[0].text == "done"
    assert folder.partial is not None
    assert (folder.partial.text, folder.partial.partial) == ("Loading: 20%", True)
    assert folder.feed(b"\rLoading: 30%\n")[0].text == "Loading: 30%"
    assert folder.partial is None
    assert folder.close() == []


def test_a_bar_that_wipes_itself_stays_on_show() -> None:
    (line,) = lines_of(b"\rLoading: 100%\r             \r\n")
    assert line.text == "Loading: 100%"


def test_a_long_line_is_cut_and_says_by_how_much() -> None:
    (line, after) = lines_of(b"x" * (LINE_CAP + 1000), b"y" * 500 + b"\n", b"after\n")
    assert line.text == "x" * LINE_CAP + "… +1500 bytes"
    assert after.text == "after"


def test_a_character_split_by_the_cap_is_counted_as_left_out() -> None:
    (line,) = lines_of(b"x" * (LINE_CAP - 1) + "é".encode() + b"\n")
    assert line.text == "x" * (LINE_CAP - 1) + "… +2 bytes"


def test_a_bar_without_end_does_not_grow_in_memory() -> None:
    folder = LogFolder()
    for step in range(2000):
        assert folder.feed(b"\rLoading: %d" % step + b"." * 100) == []
    assert folder.partial is not None
    assert folder.partial.text.startswith("Loading: 1999")


def test_control_bytes_and_invalid_utf8_break_nothing() -> None:
    (line, last) = lines_of(b"\x00\x01\xff\xfe(\x1b[31m\x07\n", b"ok")
    assert line.text.startswith("\x00\x01��")
    assert last.text == "ok"


PIECES = st.sampled_from(
    [
        b"\r",
        b"\n",
        b"\r\n",
        b"bar 10%",
        b"  ",
        b"\x00",
        b"\xff",
        "é▏".encode(),
        b"(Worker_TP1 pid=7) ",
        b"ERROR 11-29 19:43:59 [m.py:1] ",
        b"z" * (LINE_CAP // 2 + 1),
    ]
)


@given(data=st.lists(PIECES, max_size=25).map(b"".join), cuts=st.lists(st.integers(0, 40_000), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_lines(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    assert lines_of(*pieces) == lines_of(data)


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.glob("*.log")))
def test_a_real_log_byte_by_byte_is_the_same_log(name: str) -> None:
    data = (LOGS / name).read_bytes()[:8000]
    assert lines_of(*(data[i : i + 1] for i in range(len(data)))) == lines_of(data)


def test_both_ranks_failing_alike_are_one_failure() -> None:
    first, *others = worker_tracebacks(fixture("cpu-0.32-tp2-both-ranks-rename-race.log"))
    assert first.first.rank == 0
    assert first.ranks == (0, 1)
    assert first.same_text == "same on rank 1"
    assert first.first.exc_type == "FileNotFoundError"
    assert first.first.where == "/opt/payload/pworker.py:20 in write_st"
    # the place is the same, the file is not: that is not lost
    (different,) = first.different_messages
    assert "2-82d87edf" in different.message
    assert "0-bc640939" in first.first.message
    assert [each.first.distance for each in others] == [1, 2]


def test_a_worker_comes_before_those_who_only_heard_of_it() -> None:
    found = worker_tracebacks(fixture("cpu-0.32-tp1-pin-memory-mid-run.log"))
    assert [each.first.label for each in found] == ["Worker", "EngineCore", "main process"]
    first = found[0].first
    assert first.traceback.startswith("Traceback (most recent call last):\n  File ")
    assert first.traceback.endswith(first.summary)
    assert "multiproc_executor.py:1063]" not in first.traceback
    # the warm-up's ValueError was logged as a warning and is no failure
    assert all(each.first.exc_type != "ValueError" for each in found)


def test_what_a_process_logs_and_then_dies_with_is_one_failure() -> None:
    first, parent = worker_tracebacks(fixture("h200-0.24-load-keyerror.log"))
    assert first.first.source == "EngineCore"
    assert first.first.summary == "KeyError: 'layers.2.mlp.gate.e_score_correction_bias'"
    assert first.same == ()
    assert parent.first.message.startswith("Engine core initialization failed")


def test_a_healthy_log_holds_no_failure() -> None:
    assert worker_tracebacks(fixture("h200-0.24-healthy-run.log")) == ()


def test_a_message_of_several_lines_and_a_chain_stay_whole() -> None:
    record = "(Worker_TP0 pid=7) ERROR 11-29 19:43:59 [m.py:1] "
    body = """Traceback (most recent call last):
  File "/w.py", line 1, in a
    f()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/w.py", line 3, in b
    g()
torch.OutOfMemoryError: CUDA out of memory.
Tried to allocate 20.00 GiB."""
    interleaved = "(Worker_TP1 pid=8) INFO 11-29 19:43:59 [m.py:1] unrelated\n"
    log = interleaved.join(f"{record}{line}\r\n" for line in body.splitlines())
    (found,) = worker_tracebacks(lines_of(log.encode()))
    assert found.first.traceback == body
    assert found.first.exc_type == "torch.OutOfMemoryError"
    assert found.first.message == "CUDA out of memory.\nTried to allocate 20.00 GiB."
    assert found.first.where == "/w.py:3 in b"


def test_an_empty_message_still_names_the_type() -> None:
    (found,) = worker_tracebacks(
        lines_of(b'Traceback (most recent call last):\n  File "/w.py", line 1, in a\nAssertionError\n')
    )
    assert found.first.summary == "AssertionError"


def test_a_process_that_died_in_mid_traceback_is_reported() -> None:
    (found,) = worker_tracebacks(
        lines_of(b'Process VllmWorker-5:\nTraceback (most recent call last):\n  File "/w.py", line 1, in a\n')
    )
    assert found.first.rank == 5
    assert found.first.exc_type == ""
    assert "/w.py" in found.first.traceback

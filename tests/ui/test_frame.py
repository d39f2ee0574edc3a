"""Frames of the dashboard: what they say, and that no size breaks them. test_replay.py has whole recorded screens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from support.frames import screen
from support.recorded import LOG, START, Script, failing, healthy, loading, sample, started, view_of

from controller.core.runview import RunView
from controller.ui.board import Snapshot
from controller.ui.frame import render
from controller.ui.glyphs import ASCII, UNICODE, Glyphs
from controller.ui.keymap import Pane, UiState

CAUSE = {"known": True, "what": "a layer is called wrongly", "why": "versions differ " * 9, "fix": "use hooks " * 9}

SIZES = [(60, 20), (100, 30), (200, 60)]

LOADED = {
    "running": view_of(healthy().events),
    "failed": view_of(failing().events),
    "loading": view_of(started().events),
}


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("name", [*LOADED, "nothing"])
def test_no_size_breaks_the_frame(name: str, glyphs: Glyphs) -> None:
    view = LOADED.get(name, RunView())
    ranks = {index: index for index in range(8)}
    states = [UiState(pane=pane) for pane in Pane] + [UiState(wrap=True), UiState(confirming=True)]
    for width in (20, 41, 60, 79, 100, 133, 200):
        for height in (5, 12, 20, 24, 30, 60):
            for state in states:
                lines = screen(
                    view, LOG * 20, width, height, quiet_s=95.0, glyphs=glyphs, state=state, ranks=ranks, cause=CAUSE
                )
                assert len(lines) <= height
                assert max(cell_len(line) for line in lines) <= width


def test_ascii_frames_are_ascii() -> None:
    text = "\n".join(screen(LOADED["failed"], b"", 100, 30, glyphs=ASCII))
    assert text.isascii()
    assert "x failed" in text


def test_what_matters_survives_the_smallest_terminal() -> None:
    text = "\n".join(screen(LOADED["failed"], LOG * 20, 60, 20))
    assert "failed" in text
    assert "rank 3 (same on ranks 0-2, 4-7)" in text
    assert "llama_4_scaling" in text  # the end of the message
    text = "\n".join(screen(LOADED["running"], LOG * 20, 60, 19))
    for needed in ("running", "capture", "412/1,000", "2 skipped", "gpu 7", "TP0"):
        assert needed in text


def test_silence_is_told_with_what_is_under_way() -> None:
    view = LOADED["loading"]
    assert "no output for 1 min 30 s; load is under way" in "\n".join(screen(view, b"", 80, 24, quiet_s=90))
    assert "no output" not in "\n".join(screen(view, b"", 80, 24, quiet_s=30))


def test_lost_contact_is_not_a_word_about_the_run() -> None:
    add = started()
    add(100.0, "controller", "contact", status="reconnecting", text="no sign of life from the host for 20 s")
    text = "\n".join(screen(view_of(add.events), b"", 100, 30, now=START + 124))
    assert "running when last seen" in text
    assert "reconnecting for 24 s; the run goes on without us" in text
    assert "no sign of life" in text


def test_a_missing_sensor_does_not_break_its_row() -> None:
    add = started()
    gpu = {"index": 0, "util": None, "memory_used": None, "memory_total": 95 * 2**30, "power_w": None}
    add(80.0, "supervisor", "sample", gpus=[gpu], cpu_percent=None, memory_used=None, memory_total=None)
    (row,) = [line for line in screen(view_of(add.events), b"", 100, 30) if line.startswith(" gpu 0")]
    assert "-/95.0 GiB" in row


def test_a_host_without_gpus_shows_its_cpu() -> None:
    add = Script()
    add(1.0, "supervisor", "state", state="running", text="")
    add(2.0, "supervisor", "sample", gpus=[], cpu_percent=187.0, memory_used=3 * 2**30, memory_total=31 * 2**30)
    (row,) = [line for line in screen(view_of(add.events), b"", 100, 30) if line.startswith(" cpu")]
    assert "187 %" in row
    assert "3.0/31.0 GiB" in row


def test_a_load_says_how_far_it_is_and_how_long_it_usually_takes() -> None:
    text = "\n".join(screen(LOADED["loading"], b"", 100, 30, shards=(25, 62), usual={"load": 512.0}))
    assert "now   loading the weights, then compiling · 25 of 62 shards · usually 8 min 32 s" in text
    text = "\n".join(screen(LOADED["loading"], b"", 60, 20, shards=(25, 62), usual={"load": 512.0}))
    assert "now   25 of 62 shards · usually 8 min 32 s" in text  # what gives way on a narrow terminal
    assert "now" not in "\n".join(screen(LOADED["failed"], b"", 100, 30, shards=(25, 62)))


@pytest.mark.parametrize("size", [(60, 20), (80, 24)], ids=["60x20", "80x24"])
@pytest.mark.parametrize(
    ("phase", "says"), [("load", "25 of 62 shards · usually 8 min 32 s"), ("probe", "usually 3.0 s"), ("capture", "")]
)
def test_on_a_small_terminal_the_log_gives_way_to_what_is_done_now(
    phase: str, says: str, size: tuple[int, int]
) -> None:
    """The samples' row is there before the load, and says nothing of it; of the capture it says all."""
    add = loading()
    if phase != "load":
        add(585.0, "driver", "phase", name="load", status="done", seconds=511.8)
        add(585.1, "driver", "phase", name=phase, status="started")
    usual = {"load": 512.0, "probe": 3.0, "capture": 136.0}
    lines = screen(view_of(add.events), LOG * 20, *size, shards=(25, 62), usual=usual)
    assert any(line.startswith(" samples") and "0/1,000" in line for line in lines)
    now = [line for line in lines if " now " in line]
    assert [line.endswith(says) for line in now] == ([True] if says else [])
    assert any("loading the weights · 25" in line for line in now) == (phase == "load" and size == (80, 24))
    assert any("TP0" in line for line in lines), "the log keeps a place"


def test_before_the_first_sample_no_row_says_that_it_came_to_nothing() -> None:
    assert "0 tokens" not in "\n".join(screen(view_of(loading().events), b"", 100, 30))


def test_a_resumed_capture_is_not_measured_by_those_of_all_samples() -> None:
    """The time left beside it is that of the samples which are left."""

    def now(kept: int) -> str:
        add = Script()
        add(0.0, "driver", "phase", name="capture", status="started")
        for t, done in enumerate((kept, kept + 5, kept + 10)):
            add(1.0 + t, "driver", "progress", done=done, total=100, tokens=done, bytes=done, skipped=0, failed=0)
        lines = screen(view_of(add.events), b"", 100, 30, usual={"capture": 173.0})
        (line,) = [line for line in lines if " now " in line]
        return line

    assert now(0).endswith("capturing hidden states · usually 2 min 53 s")
    assert now(50).endswith("capturing hidden states")


def test_a_run_that_is_being_stopped_promises_nothing_of_its_samples() -> None:
    """What the last minute was like says nothing of what is to come: nothing is."""
    add = healthy()
    gpus = [{"index": 0, "util": 50.0}]
    sizes = {"cpu_percent": 1.0, "memory_used": 1, "memory_total": 2, "disk_total": 1 << 40, "disk_free": 9 << 30}
    add(644.0, "supervisor", "sample", gpus=gpus, **sizes)
    before = "\n".join(screen(view_of(add.events), b"", 100, 30))
    add(645.0, "supervisor", "step", name="extract", status="failed", text="stopped on request", seconds=577.8)
    add(645.0, "supervisor", "state", state="stopping", text="stopped on request")
    for promise in ("tokens/s ·", "MiB/s", "to last sample", "too little room", "full in"):
        assert promise in before
        assert promise not in "\n".join(screen(view_of(add.events), b"", 100, 30))
    lines = screen(view_of(add.events), b"", 80, 24)
    assert lines[0].startswith(" ● stopping")
    assert any(line.endswith("now   ending the processes of the run") for line in lines)
    assert any("412/1,000" in line for line in lines)
    add(646.0, "supervisor", "notice", level="info", code="stopping", text="SIGTERM to 9 processes, 15 s to end")
    (now,) = [line for line in screen(view_of(add.events), b"", 80, 24) if " now " in line]
    assert now.endswith("SIGTERM to 9 processes, 15 s to end")


def test_the_end_of_a_run_that_did_its_work_goes_on_to_say_how_long_it_takes() -> None:
    add = healthy()
    for name in ("capture", "drain"):
        add(644.0, "driver", "phase", name=name, status="done", seconds=1.0)
    add(645.0, "supervisor", "step", name="extract", status="done", seconds=600.0)
    add(646.0, "supervisor", "state", state="stopping", text="all steps succeeded")
    view = replace(view_of(add.events), ending_s=60.0)
    assert " left" in next(line for line in screen(view, b"", 100, 30) if line.startswith(" samples"))


@pytest.mark.parametrize(("glyphs", "drawn"), [(UNICODE, "━" * 20 + "─" * 60), (ASCII, "=" * 20 + "-" * 60)])
def test_a_push_has_a_bar_and_the_time_that_is_left(glyphs: Glyphs, drawn: str) -> None:
    script = Script()
    sent = {"text": "d.jsonl: 25% of 400 bytes", "done": 100, "total": 400}
    script(0.0, "controller", "stage", name="data", status="started", text="d.jsonl: 400 bytes")
    script(10.0, "controller", "stage", name="data", status="started", **sent)
    lines = screen(view_of(script.events), b"", 130, 30, now=START + 20.0, glyphs=glyphs)
    assert any("data 20 s  d.jsonl: 25% of 400 bytes" in line for line in lines)
    assert any(f"now   {drawn}  25 %  1 min 00 s left" in line for line in lines)


def test_a_rank_stands_by_its_gpu_with_its_silence() -> None:
    ranks = {1: 0, 3: 1}  # CUDA_VISIBLE_DEVICES=1,3
    rows = screen(LOADED["running"], b"", 100, 30, ranks=ranks, silent={0: 2.0, 1: 190.0})
    (first,) = [line for line in rows if line.startswith(" gpu 1")]
    assert first.split()[2] == "r0"
    assert first.endswith("2 s")
    (second,) = [line for line in rows if line.startswith(" gpu 3")]
    assert second.endswith("3 m")
    (other,) = [line for line in rows if line.startswith(" gpu 0")]
    assert other.split()[2] == "-"
    assert other.endswith("-")


def test_histories_have_fixed_scales() -> None:
    """A GPU that is a third full and used at 5 % looks so, whatever the others do."""
    add = started()
    for t in range(30):
        sample(add, 80.0 + t, 5.0)
    (row,) = [line for line in screen(view_of(add.events), b"", 133, 30) if line.startswith(" gpu 7")]
    use, filled = row.split()[2], row.split()[5]
    assert set(use) <= set("▁▂")
    assert set(filled) == {"▆"}  # 72.6 of 95 GiB


@pytest.mark.parametrize("last", ["drain", "canary-end"])
def test_while_the_engine_ends_the_screen_says_so(last: str) -> None:
    add = healthy()
    for name in ("capture", last):
        add(644.0, "driver", "phase", name=name, status="done", seconds=1.0)
    (line,) = [line for line in screen(view_of(add.events), b"", 100, 30) if " now " in line]
    assert line.endswith("shutting down the engine")
    add(645.0, "supervisor", "step", name="extract", status="done", seconds=600.0)
    add(645.0, "supervisor", "step", name="verify", status="started")
    (line,) = [line for line in screen(view_of(add.events), b"", 100, 30) if " now " in line]
    assert line.endswith("reading back what was written")


def test_a_run_that_was_looked_at_often_is_watched_once() -> None:
    add = Script()
    add(0.0, "controller", "stage", name="launch", status="done", seconds=0.5)
    for t in (1.0, 10.0, 20.0):
        add(t, "controller", "stage", name="watch", status="started")
        add(t + 1, "controller", "stage", name="watch", status="done", text="running")
    add(30.0, "controller", "stage", name="watch", status="started")
    text = "\n".join(screen(view_of(add.events), b"", 100, 30))
    assert (text.count("watch"), text.count("launch")) == (1, 1)


def test_a_refused_preflight_does_not_look_like_a_start() -> None:
    add = Script()
    add(0.0, "controller", "stage", name="preflight", status="started")
    assert "preparing" in screen(view_of(add.events), b"", 100, 30)[0]
    add(1.0, "controller", "stage", name="preflight", status="failed", text="1 of 12 checks failed")
    assert screen(view_of(add.events), b"", 100, 30)[0].startswith(" ✗ refused")
    add(2.0, "controller", "stage", name="connect", status="failed")
    assert screen(view_of(add.events), b"", 100, 30)[0].startswith(" ✗ not launched")


def test_a_question_that_was_not_answered_with_yes_is_no_failure_and_goes_on_nowhere() -> None:
    add = Script()
    add(0.0, "controller", "stage", name="preflight", status="done", seconds=2.0)
    add(2.0, "controller", "stage", name="confirm", status="started")

    def last(view: RunView, *, last: bool) -> list[str]:
        shot = Snapshot(view=view, now=START + 5.0, host_now=START + 5.0)
        return [line.plain.rstrip() for line in render(shot, 80, 24, last=last)]

    asked = view_of(add.events)
    assert last(asked, last=False)[0].startswith(" ● preparing")
    lines = last(asked, last=True)  # Ctrl-C at the question
    assert lines[0].startswith(" ! not launched")
    assert lines[2:] == [" ctl     ✓ preflight 2.0 s  ○ confirm"], "nothing turns, and nothing is waited for"
    add(5.0, "controller", "stage", name="confirm", status="failed", text="declined")
    lines = last(view_of(add.events), last=True)
    assert lines[0].startswith(" ! declined")
    assert lines[2:] == [" ctl     ✓ preflight 2.0 s  ! confirm 3.0 s  declined"]


def test_of_a_launch_that_was_left_nobody_says_that_there_was_none() -> None:
    add = Script()
    add(0.0, "controller", "stage", name="launch", status="started")
    shot = Snapshot(view=view_of(add.events), now=START + 5.0, host_now=START + 5.0)
    assert "not launched" not in render(shot, 80, 24, last=True)[0].plain


def test_a_stop_that_ended_the_run_is_done_on_its_last_frame() -> None:
    add = healthy()
    add(700.0, "controller", "stage", name="stop", status="started")
    end = {"end_reason": "stopped", "exit_code": None, "signal": None, "message": "", "gpus_clean": True}
    add(705.0, "supervisor", "end", **end)
    (row,) = [line for line in screen(view_of(add.events), b"", 133, 30) if line.startswith(" ctl ")]
    assert "✓ stop" in row


def test_messages_stand_once_and_go_when_they_are_past() -> None:
    add = Script()
    add(0.0, "controller", "finding", level="warn", code="output-clear", what="3 entries in /out will be deleted")
    for t in (1.0, 60.0):
        add(t, "driver", "notice", level="warn", code="canary", text="no prompt could be cut")
    text = "\n".join(screen(view_of(add.events), b"", 100, 30))
    assert (text.count("no prompt could be cut"), text.count("will be deleted")) == (1, 1)
    add(61.0, "supervisor", "step", name="clear", status="started")
    assert "will be deleted" in "\n".join(screen(view_of(add.events), b"", 100, 30))
    add(62.0, "supervisor", "step", name="clear", status="done", seconds=1.0)
    assert "will be deleted" not in "\n".join(screen(view_of(add.events), b"", 100, 30))


def test_the_log_shows_a_rank_a_filter_or_a_place() -> None:
    def log(**state: Any) -> list[str]:
        lines = screen(LOADED["running"], LOG, 100, 40, state=UiState(**state))
        return lines[next(index for index, line in enumerate(lines) if line.startswith(" log")) :]

    assert [line.split()[0] for line in log(rank=3)[1:]] == ["TP3"]
    assert "rank 3" in log(rank=3)[0]
    assert [line.split()[1] for line in log(needle="BFLOAT")[1:]] == ["19:38:17"]
    assert "filter: nothing_" in log(needle="nothing", typing=True)[0]
    assert "no line matches" in log(needle="nothing")[0]
    paused = log(frozen=2)
    assert "paused, 4 below" in paused[0]
    assert len(paused) == 3
    assert "Capturing CUDA graphs: 100%" in paused[2]  # a bar is folded to its last state
    assert "Capturing CUDA graphs:   0%" not in "\n".join(paused)


def test_a_question_waits_on_the_last_line() -> None:
    lines = screen(LOADED["running"], LOG, 100, 30, state=UiState(confirming=True))
    assert lines[-1] == " stop run 20261129-184150-a1b2c3 on gpu-host-1? y stops it, any other key does not"


def test_the_whole_traceback_can_be_read_at_any_size() -> None:
    seen: set[str] = set()
    for top in range(20):
        seen |= set(screen(LOADED["failed"], LOG, 60, 8, state=UiState(pane=Pane.TRACE, trace_top=top)))
    text = "\n".join(seen)
    assert all(word in text for word in ("in load_model", "worker.py", "in forward", "llama_4_scaling"))


def test_hostile_text_is_harmless_everywhere() -> None:
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\x1b[31m[red]mark[/red]\rover\u202ewritten\x00"
    add = Script()
    add(0.0, "controller", "stage", name=evil, status="started", text=evil)
    add(1.0, "controller", "finding", level="fail", code=evil, what=evil, why=evil, fix=evil)
    add(2.0, "supervisor", "state", state=evil, text=evil)
    add(3.0, "rank-0", "exception", rank=0, exc_type=evil, message=evil, traceback=evil, where=evil)
    add(4.0, "driver", "phase", name=evil, status="started", text=evil)
    add(5.0, "driver", "notice", level="warn", code=evil, text=evil)
    add(6.0, "controller", "contact", status="lost", text=evil)
    tail = f"{evil}\n(Worker pid=1) ERROR 11-29 19:43:59 [m.py:1] {evil}\n".encode()
    cause = {"known": True, "what": evil, "why": evil, "fix": evil}
    for events in (add.events, [*add.events, *failing().events[-1:]]):
        view = view_of(events, playbook=evil)
        lines = screen(view, tail, 100, 40, cause=cause)
        text = "\n".join(lines)
        assert "[red]mark[/red]" in text
        assert not set(text) & set("\x1b\x07\x00\r\u202e")
        assert "52;c" not in text

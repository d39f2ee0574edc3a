"""Frames of the dashboard against recorded screens.

After a wanted change: `CTL_WRITE_GOLDEN=1 pytest tests/ui/test_frame.py`, then read the difference.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from support.recorded import START, Script, failing, healthy, log_lines, started, view_of

from controller.core.logs import LogLine, parse_line
from controller.core.runview import RunView
from controller.ui.frame import render
from controller.ui.glyphs import ASCII, UNICODE, Glyphs

GOLDEN = Path(__file__).parent / "golden"
SIZES = [(60, 20), (100, 30), (200, 60)]


def screen(
    view: RunView,
    tail: list[LogLine],
    width: int,
    height: int,
    *,
    now: float = START + 643.5,
    quiet_s: float = 0.0,
    glyphs: Glyphs = UNICODE,
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, legacy_windows=False)
    frame = render(view, tail, width, height, now, quiet_s=quiet_s, glyphs=glyphs)
    with console.capture() as capture:
        console.print(frame)
    return [line.rstrip() for line in capture.get().splitlines()]


RECORDED = {
    "healthy": (view_of(healthy().events), 0.0),
    "failed": (view_of(failing().events), 0.0),
    "loading": (view_of(started().events), 95.0),
}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_screens(name: str, size: tuple[int, int]) -> None:
    view, quiet_s = RECORDED[name]
    width, height = size
    lines = screen(view, log_lines(), width, height, quiet_s=quiet_s)
    path = GOLDEN / f"{name}-{width}x{height}.txt"
    if os.environ.get("CTL_WRITE_GOLDEN"):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("name", [*RECORDED, "nothing"])
def test_no_size_breaks_the_frame(name: str, glyphs: Glyphs) -> None:
    view, quiet_s = RECORDED.get(name, (RunView(), 0.0))
    for width in (20, 41, 60, 79, 100, 133, 200):
        for height in (5, 12, 20, 24, 30, 60):
            lines = screen(view, log_lines() * 20, width, height, quiet_s=quiet_s, glyphs=glyphs)
            assert len(lines) <= height
            assert max(cell_len(line) for line in lines) <= width


def test_ascii_frames_are_ascii() -> None:
    text = "\n".join(screen(RECORDED["failed"][0], [], 100, 30, glyphs=ASCII))
    assert text.isascii()
    assert "x failed" in text


def test_what_matters_survives_the_smallest_terminal() -> None:
    text = "\n".join(screen(RECORDED["failed"][0], log_lines() * 20, 60, 20))
    assert "failed" in text
    assert "rank 3 (same on ranks 0-2, 4-7)" in text
    assert "llama_4_scaling" in text  # the end of the message
    text = "\n".join(screen(RECORDED["healthy"][0], log_lines() * 20, 60, 20))
    for needed in ("running", "capture", "412/1,000", "2 skipped", "gpu 7", "TP0"):
        assert needed in text


def test_silence_is_told_with_what_is_under_way() -> None:
    view, _ = RECORDED["loading"]
    assert "no output for 1 min 30 s; load is under way" in "\n".join(screen(view, [], 80, 24, quiet_s=90))
    assert "no output" not in "\n".join(screen(view, [], 80, 24, quiet_s=30))


def test_lost_contact_is_not_a_word_about_the_run() -> None:
    add = started()
    add(100.0, "controller", "contact", status="reconnecting", text="no sign of life from the host for 20 s")
    text = "\n".join(screen(view_of(add.events), [], 100, 30, now=START + 124))
    assert "running when last seen" in text
    assert "reconnecting for 24 s; the run goes on without us" in text
    assert "no sign of life" in text


def test_a_missing_sensor_does_not_break_its_row() -> None:
    add = started()
    gpu = {"index": 0, "util": None, "memory_used": None, "memory_total": 95 * 2**30, "power_w": None}
    add(80.0, "supervisor", "sample", gpus=[gpu], cpu_percent=None, memory_used=None, memory_total=None)
    (row,) = [line for line in screen(view_of(add.events), [], 100, 30) if line.startswith(" gpu 0")]
    assert "-/95.0 GiB" in row


def test_a_host_without_gpus_shows_its_cpu() -> None:
    add = Script()
    add(1.0, "supervisor", "state", state="running", text="")
    add(2.0, "supervisor", "sample", gpus=[], cpu_percent=187.0, memory_used=3 * 2**30, memory_total=31 * 2**30)
    (row,) = [line for line in screen(view_of(add.events), [], 100, 30) if line.startswith(" cpu")]
    assert "187 %" in row
    assert "3.0/31.0 GiB" in row


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
    tail = [parse_line(evil), parse_line(f"(Worker pid=1) ERROR 11-29 19:43:59 [m.py:1] {evil}")]
    for events in (add.events, [*add.events, *failing().events[-1:]]):
        view = view_of(events, playbook=evil)
        lines = screen(view, tail, 100, 40)
        text = "\n".join(lines)
        assert "[red]mark[/red]" in text
        assert not set(text) & set("\x1b\x07\x00\r\u202e")
        assert "52;c" not in text

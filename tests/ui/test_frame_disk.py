"""What frames of the dashboard say of the disk, and of a run that waits for room on it."""

from __future__ import annotations

import re

from support.frames import screen
from support.recorded import START, freed, healthy, paused, started, view_of

from controller.ui.board import Snapshot
from controller.ui.frame import render


def test_the_disk_says_when_it_is_full_and_warns_before_it_is_too_late() -> None:
    add = healthy()
    gpus = [{"index": 0, "util": 50.0}]
    sizes = {"cpu_percent": 1.0, "memory_used": 1, "memory_total": 2, "disk_total": 1 << 40}
    add(650.0, "supervisor", "sample", gpus=gpus, disk_free=900 << 30, **sizes)
    (line,) = [line for line in screen(view_of(add.events), b"", 100, 30) if line.startswith(" disk")]
    assert line == " disk    900 GiB left · 22.9 GiB still to write"  # it is never full at any rate
    assert "disk 900 GiB left" in "\n".join(screen(view_of(add.events), b"", 120, 20))  # one of the figures
    add(652.0, "supervisor", "sample", gpus=gpus, disk_free=9 << 30, **sizes)
    assert "too little room: 9.00 GiB left · 22.9 GiB still" in "\n".join(screen(view_of(add.events), b"", 60, 20))
    (line,) = [line for line in screen(view_of(add.events), b"", 100, 30) if line.startswith(" disk")]
    short = " disk    too little room: 9.00 GiB left · 22.9 GiB still to write · full in "
    assert re.fullmatch(short + r"\S.* at this rate", line)


def test_the_disk_foretells_nothing_where_nothing_is_to_come_or_nobody_knows() -> None:
    sizes = {"cpu_percent": 1.0, "memory_used": 1, "memory_total": 2, "disk_total": 1 << 40, "disk_free": 900 << 30}
    for unit, amount in (("samples", 1 << 30), ("steps", 0)):  # all written; a command, which tells no bytes
        add = started()
        for second, done in enumerate((60, 64)):
            add(
                600.0 + second, "driver", "progress", done=done, total=64, tokens=0, bytes=amount * done, skipped=0,
                failed=0, unit=unit,
            )  # fmt: skip
        add(602.0, "supervisor", "sample", gpus=[], **sizes)
        (line,) = [line for line in screen(view_of(add.events), b"", 100, 30) if line.startswith(" disk")]
        assert line == " disk    900 GiB left"


def test_a_pause_is_seen_at_once_and_promises_nothing() -> None:
    lines = screen(view_of(paused().events), b"", 100, 30, now=START + 714.0)
    text = "\n".join(lines)
    assert lines[0].startswith(" ● paused: the disk is full")
    assert " now   waiting for room on the disk · for 1 min 04 s" in text
    assert "No sample is admitted until space is freed" in text
    for promise in ("left \n", "to last sample", "full in", "usually", "running"):
        assert promise not in text
    shot = Snapshot(view=view_of(paused().events), now=START + 714.0, host_now=START + 714.0)
    assert {str(span.style) for span in render(shot, 100, 30)[0].spans} == {"bold yellow", "bold"}


def test_what_the_disk_said_is_gone_once_there_is_room_also_on_a_last_frame() -> None:
    add = freed()
    assert "No sample is admitted" not in "\n".join(screen(view_of(add.events), b"", 100, 30, now=START + 781.0))
    add(790.0, "supervisor", "end", end_reason="job-signaled", exit_code=None, signal=9, message="", gpus_clean=True)
    text = "\n".join(screen(view_of(add.events), b"", 100, 30, now=START + 791.0))
    assert ("killed by a signal" in text, "No sample is admitted" in text) == (True, False)

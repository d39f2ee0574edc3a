"""What the dashboard costs while a job prints 10,000 lines a second: python benchmarks/dashboard.py [SECONDS]

Goals: under 5 % of a core, and memory that does not grow. A run of eight GPUs is fed as `watch` feeds it, in pieces
of what a quarter of a second brings, with samples, progress and progress bars between; frames go to a pseudo-terminal
of each size, whose other end is read by a process of its own. The share is CPU seconds (user and system) of this
process over wall-clock seconds.
"""

from __future__ import annotations

import fcntl
import os
import pty
import resource
import struct
import subprocess
import sys
import termios
import time

from controller.core.events import Event
from controller.ui.board import Known, RunBoard
from controller.ui.live import LiveView

LINES_A_SECOND = 10_000
PIECES_A_SECOND = 4
SIZES = ((60, 20), (100, 30), (200, 60))
GIB = 2**30


def piece(number: int) -> bytes:
    """Return the output of a quarter of a second: lines of eight ranks, and the state of a bar."""
    count = LINES_A_SECOND // PIECES_A_SECOND
    lines = (
        f"(Worker_TP{index % 8} pid={4000 + index % 8}) INFO 11-29 19:38:17 [worker.py:131] "
        f"sample {number * count + index} of 1000000 was written: [712, 4, 7168] bfloat16 in 0.013 s\n"
        for index in range(count)
    )
    bar = f"(Worker_TP0 pid=4000) \rCapturing: {number % 100}%|####   | {number % 100}/100"
    return "".join(lines).encode() + bar.encode() + b"\n"


class Script:
    """Events with the right sequence numbers."""

    def __init__(self, board: RunBoard) -> None:
        self._board = board
        self._seq: dict[str, int] = {}

    def __call__(self, writer: str, event_type: str, /, **data: object) -> None:
        seq = self._seq[writer] = self._seq.get(writer, 0) + 1
        self._board.event(
            Event(type=event_type, run="run", host="gpu1", writer=writer, seq=seq, t=time.time(), data=data)
        )


def feed(board: RunBoard, seconds: float, pieces: list[bytes]) -> None:
    """Feed for `seconds`, whatever the dashboard does with it."""
    add = Script(board)
    add("supervisor", "state", state="running", text="")
    add("driver", "phase", name="capture", status="started")
    due = time.monotonic()
    for number in range(round(seconds * PIECES_A_SECOND)):
        gpus = [
            {"index": index, "util": 80.0 + index, "memory_used": 70 * GIB, "memory_total": 95 * GIB,
             "power_w": 390.0, "temperature_c": 62.0}
            for index in range(8)
        ]  # fmt: skip
        if number % 8 == 0:
            add("supervisor", "sample", gpus=gpus, cpu_percent=10.0, memory_used=GIB, memory_total=9 * GIB,
                disk_free=900 * GIB, disk_total=999 * GIB)  # fmt: skip
        if number % 4 == 0:
            add("driver", "progress", done=number, total=10**6, tokens=number * 700, bytes=number * GIB, skipped=0,
                failed=0)  # fmt: skip
        if pieces:
            board.log(pieces[number % len(pieces)])
        due += 1 / PIECES_A_SECOND
        time.sleep(max(0.0, due - time.monotonic()))


def measure(size: tuple[int, int], seconds: float, pieces: list[bytes]) -> tuple[float, int]:
    """Return the share of a core, and by how many bytes the resident memory grew in the second half."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    # The end of a pseudo-terminal is an error to its reader, which has nothing to say.
    reader = subprocess.Popen(["cat"], stdin=primary, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with os.fdopen(secondary, "w", encoding="utf-8") as stream:
        # The terminal belongs to no session here, so the view is told that it is in the foreground.
        view = LiveView(stream, on_screen=lambda: True)
        with view:
            board = view.sink(run="run", host="gpu1", known=Known(ranks={index: index for index in range(8)}))
            feed(board, seconds / 2, pieces)
            half = rss()
            before, began = os.times(), time.monotonic()
            feed(board, seconds / 2, pieces)
            after, passed = os.times(), time.monotonic() - began
    os.close(primary)
    reader.terminate()
    reader.wait(timeout=10)
    return (after.user + after.system - before.user - before.system) / passed, rss() - half


def rss() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(seconds: float) -> None:
    pieces = [piece(number) for number in range(8)]
    print(
        f"{LINES_A_SECOND:,} lines a second for {seconds:.0f} s, {len(pieces[0]) * PIECES_A_SECOND / 2**20:.1f} MiB/s"
    )
    for size in SIZES:
        idle, _ = measure(size, seconds / 4, [])
        busy, grown = measure(size, seconds, pieces)
        print(
            f"{size[0]:>3}x{size[1]}  {busy * 100:5.1f} % of a core (without a log {idle * 100:.1f} %; goal 5 %), "
            f"memory {grown / 2**20:+.1f} MiB in the second half"
        )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 40.0)

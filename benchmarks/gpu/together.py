"""Engines that are loaded at the same time and timed one after another, in turns, on the same GPU.

Loading takes minutes and timing seconds; and rounds in turns see the same clocks and temperatures. A child calls
`serve_rounds`, the parent `take_turns`. An engine without work waits for a line and uses neither GPU nor CPU.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from bench import HOST_ENV, OUT, STOP_TIMEOUT_S, end_group, gpu_mib_below

START_LIMIT_S = 280.0
ROUND_LIMIT_S = 90.0


def serve_rounds(facts: Mapping[str, Any], round_: Callable[[], Mapping[str, Any]]) -> None:
    """Say that this engine is ready, and run a round for each line of stdin, until its end."""
    _tell({"ready": dict(facts)})
    for _ in sys.stdin:
        _tell({"round": dict(round_())})


def _tell(message: Mapping[str, Any]) -> None:
    print(f"TURN {json.dumps(message)}", flush=True)


class Child:
    """One engine's process. `facts` and `rounds` are what it told; `error` says why it takes no more turns."""

    def __init__(self, name: str, argv: Sequence[str], part: str) -> None:
        self.name, self.facts, self.rounds, self.error = name, dict[str, Any](), list[dict[str, Any]](), ""
        self._log = OUT / "logs" / f"{part}-{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._last: deque[str] = deque(maxlen=5)
        self._told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            text=True, errors="replace", env={**os.environ, **HOST_ENV},
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                self._last.append(line.strip())
                if line.startswith("TURN "):
                    seconds = round(time.monotonic() - self._started, 1)
                    self._told.put({**json.loads(line.removeprefix("TURN ")), "after_s": seconds})
        self._told.put(None)

    def wait_ready(self) -> None:
        told = self._next(START_LIMIT_S - (time.monotonic() - self._started), "ready")
        if told is not None:
            self.facts = {**told["ready"], "load_s": told["after_s"]}

    def take_turn(self) -> None:
        if self.error:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; what it said last tells why
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        told = self._next(ROUND_LIMIT_S, "round")
        if told is not None:
            self.rounds.append(told["round"])
            self.facts["gpu_mib"] = gpu_mib_below(self._process.pid)

    def _next(self, limit_s: float, kind: str) -> dict[str, Any] | None:
        try:
            told = self._told.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            self.error = f"no {kind} in time"
            self.end()
            return None
        if told is None:
            self.error = f"ended with {self._process.wait()} before a {kind}: {' | '.join(self._last)}"
        return told

    def end(self) -> None:
        """Close its stdin, at which it leaves its rounds and ends what it started, and kill what is left."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone, with a line unread
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        end_group(self._process.pid)
        self._process.wait(STOP_TIMEOUT_S)


def take_turns(
    argvs: Mapping[str, Sequence[str]], *, part: str, rounds: int, after: Callable[[list[Child]], None]
) -> list[Child]:
    """Start every engine, then time `rounds` rounds of each in turns; `after` is called after each round of all."""
    children = [Child(name, argv, part) for name, argv in argvs.items()]
    try:
        for child in children:
            child.wait_ready()
            print(child.name, child.error or json.dumps(child.facts), flush=True)
        for _ in range(rounds):
            for child in children:
                child.take_turn()
            after(children)
    finally:
        for child in children:
            child.end()
    return children

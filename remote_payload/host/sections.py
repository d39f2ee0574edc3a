"""Run the parts of a probe side by side, each in a process of its own with a deadline of its own.

A stat on a dead mount, a wedged driver or /proc/PID/cmdline of a stuck process can hang so that not even SIGKILL
ends it. A thread could not be left behind; a child process can.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Tuple

Note = Callable[[str], None]
"""Called by a section with what it is about to touch, so that a timeout can say where it hung."""

Results = Dict[str, Dict[str, Any]]
"""By section name: {"ok", "seconds", "error" (if not ok), "timed_out" (if it did), "data" (if ok)}."""

READ_SIZE = 1 << 16
REAP_S = 0.5
"""A killed process is gone within milliseconds, or stuck."""

RESULT_LIMIT = 1 << 24
"""16 MiB: a section that says more than this is broken, and would fill the parent's memory."""


class Section(NamedTuple):
    """One part. `run` gets `note` and the results so far, and returns JSON data; an exception becomes its error."""

    name: str
    deadline_s: float
    run: Callable[[Note, Results], Any]
    after: Tuple[str, ...] = ()  # started when all of these have ended, well or not


class _Worker:
    def __init__(self, section: Section, results: Results, deadline: float) -> None:
        self.section = section
        self.started = time.monotonic()
        self.deadline = min(deadline, self.started + section.deadline_s)
        self.output = bytearray()
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _work(section, results, writer)
        os.close(writer)
        # In both processes, because either may be the first to need the group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(self.pid, self.pid)

    def read(self) -> bool:
        """Take what there is; True when the worker has said all.

        Notes are lines of JSON strings, the answer is a line with an object. It is not awaited that the pipe ends:
        something that the section left behind may hold it open.
        """
        piece = os.read(self.reader, READ_SIZE)
        self.output += piece
        return not piece or self.output.endswith(b"}\n") or len(self.output) > RESULT_LIMIT

    def end(self, timed_out: bool) -> Dict[str, Any]:
        """Stop the worker and whatever it started, and return its result."""
        os.close(self.reader)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only a zombie is left of the group
            os.killpg(self.pid, signal.SIGKILL)
        seconds = time.monotonic() - self.started
        result: Dict[str, Any] = {"ok": False, "seconds": round(seconds, 3)}
        lines = bytes(self.output).decode("utf-8", "replace").split("\n")[:-1]
        if timed_out:
            at = " at %s" % json.loads(lines[-1]) if lines else ""
            result["timed_out"] = True
            result["error"] = "timed out after %.3g s%s" % (self.deadline - self.started, at)
            return result
        if lines and lines[-1].startswith("{"):
            result.update(json.loads(lines[-1]))
        else:
            result["error"] = "the section's process ended without a result"
        return result


def run_sections(sections: List[Section], deadline_s: float) -> Results:
    """Run all sections and return their results, `deadline_s` (and REAP_S) seconds from now at the latest.

    Must be called from a process with one thread: the sections are forked from it.
    """
    end = time.monotonic() + deadline_s
    results: Results = {}
    waiting = list(sections)
    working: Dict[int, _Worker] = {}
    ended: List[int] = []
    while waiting or working:
        for section in [section for section in waiting if all(name in results for name in section.after)]:
            waiting.remove(section)
            worker = _Worker(section, results, end)
            working[worker.reader] = worker
        pause = min(worker.deadline for worker in working.values()) - time.monotonic()
        ready, _, _ = select.select(list(working), [], [], max(0.0, pause))
        said_all = [working[reader] for reader in ready if working[reader].read()]
        now = time.monotonic()
        late = [worker for worker in working.values() if worker.deadline <= now and worker not in said_all]
        for worker in said_all + late:
            del working[worker.reader]
            results[worker.section.name] = worker.end(timed_out=worker in late)
            ended.append(worker.pid)
    _reap(ended)
    return {section.name: results[section.name] for section in sections}


def _reap(pids: List[int]) -> None:
    """Collect killed workers, except one that is stuck in the kernel: waiting would pass its hang on to us."""
    deadline = time.monotonic() + REAP_S
    while pids:
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if not pids or time.monotonic() >= deadline:
            return
        time.sleep(0.005)


def _work(section: Section, results: Results, writer: int) -> NoReturn:
    """The child: never returns, and holds none of our descriptors that could keep the caller's connection open."""
    code = 1
    try:
        os.setpgid(0, 0)  # so that the parent can kill this process and its children as one group
        silence = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silence, descriptor)
        try:
            answer = {"ok": True, "data": section.run(lambda text: _write(writer, json.dumps(text) + "\n"), results)}
        except Exception as error:  # noqa: BLE001 - whatever it was, it is this section's error and no other's
            answer = {"ok": False, "error": "%s: %s" % (type(error).__name__, error)}
        _write(writer, json.dumps(answer) + "\n")
        code = 0
    finally:
        # Not sys.exit: nothing of the parent's (buffers, handlers, a test runner) may run twice.
        os._exit(code)


def _write(descriptor: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(descriptor, data) :]

"""The follower: reads what a command prints or writes about its progress, and collects what died of a fatal signal.

It is a process of its own beside the supervisor, because a regular expression of somebody's can take forever: then
progress stands still, and nothing else. It runs only for jobs that ask for one of the two.

Progress becomes `progress` events of the writer `driver`, at most one a second: a command has no driver that could
write them itself. Fatal signals become `exception` events of the writer `faults`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import time
from typing import Any, BinaryIO, Dict, Iterator, Optional

from remote_payload.host.children import start_verb
from remote_payload.host.files import read_json
from remote_payload.host.journal import EventWriter, complain
from remote_payload.host.layout import Layout, RunPaths
from remote_payload.host.segments import LogFiles

TICK_S = 0.5

COUNTS = ("done", "total", "tokens", "bytes", "skipped", "failed")
"""Fields of a progress event that are whole numbers; other named groups are its `values`."""

VALUE_CHARS = 300
"""Of a value or its name: an event is for a line on a screen, and is sent to every one who watches."""

READ_BYTES = 1 << 20
"""Looked at of what is new, from its end: a job that floods its output is not followed line by line."""

CARRY_BYTES = 1 << 13
"""Kept of a line that is not complete yet; the longest that can match."""

RESTART_S = 1.0

FINISH_S = 5.0
"""For the last look; it reads a megabyte and the fault files."""

FAULT_BYTES = 1 << 20

STOP = "follow.stop"
"""In the run folder: the job has ended, look once more and go."""

PR_SET_PDEATHSIG = 1
"""prctl option: the signal that this process gets when its parent dies."""

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]+)?")


class FollowKeeper:
    """Starts the follower where one is wanted and missing, and ends it with the job."""

    def __init__(self, workdir: str, plan: Dict[str, Any]) -> None:
        self._workdir, self._run_id, self._host = workdir, plan["run_id"], plan["host"]["name"]
        self._paths = Layout(workdir).run(plan["run_id"])
        self._wanted = bool(plan["job"].get("watched") or plan["job"].get("tracebacks"))
        self._process: Optional["subprocess.Popen[bytes]"] = None
        self._started = -RESTART_S

    def ensure(self) -> None:
        """Start it if the plan asks for one and none runs; a job goes on without, if it cannot be started."""
        if not self._wanted or (self._process is not None and self._process.poll() is None):
            return
        if time.monotonic() - self._started < RESTART_S:
            return
        self._started = time.monotonic()
        request = {"workdir": self._workdir, "run_id": self._run_id}
        try:
            self._process = start_verb("follow", request, run_id=self._run_id, log=self._paths.supervisor_log)
        except OSError as error:  # no memory, no process left, a full disk: tried again at the next look
            complain("the follower could not be started: %s" % error)

    def finish(self) -> None:
        """Have it look once more, and end it; one that is stuck in an expression is killed.

        Raises OSError (a full disk), subprocess.TimeoutExpired (it is stuck inside the kernel).
        """
        if self._process is None:
            return
        os.close(os.open(os.path.join(self._paths.folder, STOP), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._process.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            complain("the follower did not end within %g s: it is killed, the last progress is lost" % FINISH_S)
            self._process.kill()
            self._process.wait(FINISH_S)
            collect_faults(self._paths, self._run_id, self._host)
        self._process = None


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `follow`: {"workdir", "run_id"}: run until the supervisor says so or is gone, or the run has ended."""
    paths = Layout(request["workdir"]).run(request["run_id"])
    plan = read_json(paths.plan) or {}
    host, parent = plan["host"]["name"], os.getppid()
    _die_with_parent()
    progress = Progress(paths, plan) if plan["job"].get("watched") else None
    while True:
        # A supervisor that died before we asked for our parent is known by the result alone, which `stop` writes.
        last = (
            os.getppid() != parent or os.path.exists(os.path.join(paths.folder, STOP)) or os.path.exists(paths.result)
        )
        if progress is not None:
            progress.look(last=last)
        collect_faults(paths, plan["run_id"], host)
        if last:
            return 0
        time.sleep(TICK_S)


def _die_with_parent() -> None:
    """Have the kernel kill this process with the supervisor: one stuck in an expression would see nothing itself."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


class Progress:
    """Turns new lines into progress events; made once for each follower."""

    def __init__(self, paths: RunPaths, plan: Dict[str, Any]) -> None:
        watched = plan["job"]["watched"]
        self._patterns = [re.compile(pattern) for pattern in watched.get("patterns", [])]
        self._json = "file" in watched
        self._log = LogFiles(paths)
        self._file = watched.get("file")
        self._unit = watched.get("unit")
        self._events = EventWriter(paths.events, "driver", plan["run_id"], plan["host"]["name"])
        self._readers: Dict[str, _NewBytes] = {}
        self._state: Dict[str, Any] = {}
        self._told: Dict[str, Any] = {}

    def look(self, *, last: bool = False) -> None:
        """Read what is new and emit one event if it says something new. Raises OSError.

        The `last` look also takes a line without an end: a progress bar may stop at its last step.
        """
        for line in self._lines(last):
            found = _from_json(line) if self._json else self._matched(line)
            for name, value in found.items():
                if name in COUNTS:
                    self._state[name] = int(value)
                else:
                    self._state.setdefault("values", {})[name] = value
        if self._state and self._state != self._told:
            self._told = json.loads(json.dumps(self._state))
            fields = {**dict.fromkeys(COUNTS, 0), "total": None, "unit": self._unit, **self._told}
            self._events.emit("progress", **fields)

    def _lines(self, last: bool) -> Iterator[str]:
        paths = [self._file] if self._json else self._log.segments()
        for path in paths:
            reader = self._readers.setdefault(path, _NewBytes(path))
            for line in re.split(rb"[\r\n]", reader.read(last)):
                yield line.decode("utf-8", "replace")

    def _matched(self, line: str) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        for pattern in self._patterns:
            for match in pattern.finditer(line):
                found.update({name: _value(text) for name, text in match.groupdict().items() if text is not None})
        return {name: value for name, value in found.items() if name not in COUNTS or _whole(value)}


class _NewBytes:
    """What a growing file got since the last time: complete lines, the newest READ_BYTES of them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._carry = b""

    def read(self, last: bool) -> bytes:
        """Return the new lines; with `last` also the one that has no end."""
        try:
            with open(self._path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # it was written anew
                    self._offset, self._carry = 0, b""
                if size - self._offset > READ_BYTES:
                    self._offset, self._carry = size - READ_BYTES, b""
                file.seek(self._offset)
                data = self._carry + file.read(size - self._offset)
        except FileNotFoundError:
            return b""
        self._offset = size
        if last:
            return data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._carry = data[end:][-CARRY_BYTES:]
        return data[:end]


def _from_json(line: str) -> Dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:  # another writer's line, or one that is cut
        return {}
    if not isinstance(record, dict):
        return {}
    scalars = {name: value for name, value in record.items() if isinstance(value, (int, float, str))}
    kept = {name[:VALUE_CHARS]: _short(value) for name, value in scalars.items()}
    return {name: value for name, value in kept.items() if name not in COUNTS or _whole(value)}


def _short(value: Any) -> Any:
    """Return a text or number of at most VALUE_CHARS characters; an integer beyond 64 bits counts nothing real."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of %d bits" % value.bit_length()
    return value[:VALUE_CHARS] if isinstance(value, str) else value


def _value(text: str) -> Any:
    """Return a number where the text is one: `1,234` and `1_234` are 1234."""
    if len(text) > VALUE_CHARS or not _NUMBER.fullmatch(text):
        return text[:VALUE_CHARS]
    plain = text.replace(",", "").replace("_", "")
    return int(plain) if re.fullmatch(r"[-+]?[0-9]+", plain) else float(plain)


def _whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 62


# ------------------------------------------------------------------------------------------ fatal signals


def collect_faults(paths: RunPaths, run_id: str, host: str) -> None:
    """Turn the fault files of processes that are gone into events, and remove them. Raises OSError."""
    try:
        names = sorted(os.listdir(paths.faults))
    except FileNotFoundError:
        return
    for name in names:
        path = os.path.join(paths.faults, name)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its process lives
            head, _, stacks = file.read(FAULT_BYTES).partition(b"\n")
            if stacks.strip():
                when = os.fstat(file.fileno()).st_mtime  # what is found late, of a lost run, did not happen late
                _tell(paths, run_id, host, head, stacks.decode("utf-8", "replace").strip(), when)
            elif not head and time.time() - os.fstat(file.fileno()).st_mtime < FINISH_S:
                continue  # between its creation and its lock
            os.unlink(path)


def _tell(paths: RunPaths, run_id: str, host: str, head: bytes, stacks: str, when: float) -> None:
    try:
        owner = json.loads(head)
    except ValueError:
        owner = {}
    first = stacks.splitlines()[0]
    frame = re.search(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)', stacks)
    events = EventWriter(paths.events, "faults", run_id, host)
    try:
        events.emit(
            "exception",
            t=when,
            rank=owner.get("rank"),
            exc_type="fatal signal",
            message=first,
            traceback=stacks,
            where="{file}:{line} in {function}".format(**frame.groupdict()) if frame else "",
            process="%s (pid %s)" % (owner.get("process", ""), owner.get("pid")),
        )
    finally:
        events.close()

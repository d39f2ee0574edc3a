"""The log pump: moves what a job prints from its FIFO into log segments.

It is a process of its own, so that the death of the supervisor does not stall the job, and its own death only
stalls the job until the next contact starts another. Bytes go by splice(2), which takes them from the pipe only
once they are in the file: a killed pump loses none and writes none twice.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import subprocess
import termios
import time
from typing import Any, BinaryIO, Callable, Dict, Optional

from remote_payload.host.children import start_verb
from remote_payload.host.files import read_json, write_all
from remote_payload.host.journal import EventWriter, complain
from remote_payload.host.layout import Layout, RunPaths
from remote_payload.host.segments import LogFiles, Segments, cap_of
from remote_payload.host.times import Times

PIPE_BYTES = 1 << 20
"""The most that an unprivileged user may ask for by default: what a job can print while no pump runs."""

POLL_MS = 100

TAKE_OVER_S = 2.0
"""How long a new pump waits for the lock; whoever asks whether a pump runs holds it for an instant."""

RESTART_S = 1.0
"""A pump that cannot start (disk full, no memory) is not tried more often than this."""

_SPLICE_F_NONBLOCK = 2


class PumpKeeper:
    """Starts a pump wherever one is missing; used by the supervisor and by every tail."""

    def __init__(self, workdir: str, run_id: str) -> None:
        self._workdir = workdir
        self._run_id = run_id
        self._paths = Layout(workdir).run(run_id)
        self._files = LogFiles(self._paths)
        self._process: Optional["subprocess.Popen[bytes]"] = None
        self._started = -RESTART_S

    def ensure(self) -> bool:
        """Start a pump if the log is open and none runs; return whether one was started."""
        if self._process is not None and self._process.poll() is None:
            return False
        if not os.path.exists(self._files.pipe) or os.path.exists(self._files.closed) or self.is_running():
            return False
        if time.monotonic() - self._started < RESTART_S:
            return False
        self._started = time.monotonic()
        request = {"workdir": self._workdir, "run_id": self._run_id}
        self._process = start_verb("pump", request, run_id=self._run_id, log=self._paths.supervisor_log)
        return True

    def is_running(self) -> bool:
        try:
            descriptor = os.open(self._files.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def wait_end(self, timeout_s: float) -> bool:
        """Wait until no pump runs; False if one still does after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.is_running():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.1, deadline - time.monotonic()))
        return True


def open_pipe(paths: RunPaths) -> int:
    """Make the FIFO if need be and return a descriptor open for reading and writing.

    Because every writer is a reader too, a job never meets SIGPIPE, whatever happens to the pump.
    """
    os.makedirs(paths.log, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(paths.pipe, 0o600)
    descriptor = os.open(paths.pipe, os.O_RDWR | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # over the user's share of pipe memory: the default size does as well
        fcntl.fcntl(descriptor, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
    return descriptor


def write_within(pipe: int, data: bytes, timeout_s: float) -> bool:
    """Write into the log's FIFO; False if it took no more within `timeout_s` seconds, and the rest was left out.

    The descriptor is the job's too, so it stays blocking: only as much is written at once as always finds room.
    """
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    for begin in range(0, len(data), select.PIPE_BUF):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        write_all(pipe, data[begin : begin + select.PIPE_BUF])
    return True


def close_log(paths: RunPaths, pipe: int, keeper: PumpKeeper, timeout_s: float) -> Optional[str]:
    """Have all that was printed written to the log, then end the pump; `pipe` comes from `open_pipe`.

    Returns None, or what stayed behind after `timeout_s` seconds (a full disk).
    """
    deadline = time.monotonic() + timeout_s
    left = _bytes_waiting(pipe)
    while left and time.monotonic() < deadline:
        keeper.ensure()
        time.sleep(0.02)
        left = _bytes_waiting(pipe)
    os.close(os.open(LogFiles(paths).closed, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    ended = keeper.wait_end(max(1.0, deadline - time.monotonic()))
    if left:
        return "%d bytes of the log could not be written within %g s" % (left, timeout_s)
    return None if ended else "the log pump did not end within %g s" % timeout_s


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `pump`: run until the log is closed, or nobody has the pipe open for writing any more."""
    files = LogFiles(Layout(request["workdir"]).run(request["run_id"]))
    lock = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + TAKE_OVER_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return 0
            time.sleep(0.05)
    paths = Layout(request["workdir"]).run(request["run_id"])
    host = ((read_json(paths.plan) or {}).get("host") or {}).get("name", "")

    def tell(gap: Dict[str, Any]) -> None:
        text = "the log is over its cap: segment %(segment)d (%(bytes)d bytes, sha256 %(sha256)s) was given up" % gap
        try:
            events = EventWriter(paths.events, "pump", request["run_id"], host)
            events.emit("notice", level="warn", code="log-gap", text=text)
            events.close()
        except OSError as error:  # the record of the gap itself is on disk already
            complain("event lost: %s: %s" % (text, error))

    segments = Segments(files, cap_of(paths))
    try:
        pump(files, segments, tell)
    finally:
        segments.close()
    return 0


def pump(files: LogFiles, segments: Segments, tell: Callable[[Dict[str, Any]], None] = lambda gap: None) -> None:
    """Move bytes until the end; `tell` gets each gap that the cap makes.

    Raises OSError, for example on a full disk; the job then waits in its write().
    """
    source = os.open(files.pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    times = Times(files)
    poll = select.poll()
    poll.register(source, select.POLLIN)
    try:
        while True:
            closed = os.path.exists(files.closed)  # asked before reading: what came before it is not left behind
            room = segments.room()
            if room == 0:
                for gap in segments.rotate():
                    tell(gap)
                continue
            begin = segments.size
            moved = _move(source, segments.target, min(room, PIPE_BYTES))
            if moved:
                times.note(segments.number, begin)
            if moved == 0 or (moved is None and closed):
                return
            if moved is None:
                poll.poll(POLL_MS)
    finally:
        os.close(source)
        times.close()


def _bytes_waiting(pipe: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def _move(source: int, target: int, count: int) -> Optional[int]:
    """Move up to `count` bytes; 0 when nobody can write any more, None when there is nothing to read now."""
    try:
        return _splice(source, target, count)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
    # A file system without splice (some network and FUSE ones): a kill between these two lines can lose a piece.
    try:
        data = os.read(source, count)
    except BlockingIOError:
        return None
    write_all(target, data)
    return len(data)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.splice.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint,
]  # fmt: skip
_libc.splice.restype = ctypes.c_ssize_t


def _splice(source: int, target: int, count: int) -> int:
    # os.splice is there from Python 3.10 on; the host may have 3.9.
    moved: int = _libc.splice(source, None, target, None, count, _SPLICE_F_NONBLOCK)
    if moved < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return moved

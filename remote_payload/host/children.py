"""The processes that ctl itself starts on the host: payload verbs in the background, and commands with a deadline.

A supervisor adopts orphans and has to reap them, but must not steal the exit status of its own children from those
who wait for it: so these are registered here from before they can end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import IO, Any, Dict, Iterator, List, Optional, Sequence, Set

from remote_payload.host.framing import pack_frame
from remote_payload.host.liveness import ZOMBIE_STATES, read_stat
from remote_payload.host.members import HELPER_ENV, RUN_ENV

MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "main.py")

_lock = threading.RLock()
_own: Set[int] = set()


class CommandFailed(Exception):
    """A command could not be run, ended with an error, or passed its deadline; the message says which."""


@contextlib.contextmanager
def registering() -> Iterator[Set[int]]:
    """Hold off `reap_adopted` while a child is started; its pid is to be added to the set that this yields."""
    with _lock:
        yield _own


def start_verb(
    verb: str, request: Dict[str, Any], body: bytes = b"", *, run_id: str, log: str, pass_fds: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start `main.py VERB` in a session of its own, with nothing of this process but `pass_fds`.

    Its request comes through a pipe on stdin, so that secrets appear in no argument, environment or file; its output
    is appended to `log`. Raises OSError if it cannot be executed or ended before it had read the request.
    """
    environ = {name: value for name, value in os.environ.items() if name != RUN_ENV}
    environ[HELPER_ENV] = run_id
    with open(log, "ab") as output, registering() as own:
        process = subprocess.Popen(
            [sys.executable, "-S", "-I", "-B", MAIN, verb],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environ,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
        own.add(process.pid)
    stdin: Optional[IO[bytes]] = process.stdin
    if stdin is not None:
        with stdin:
            stdin.write(pack_frame(request, body))
    return process


class Command:
    """A command with a deadline that is run again and again, such as nvidia-smi, but never twice at once.

    A stuck driver leaves it unkillable inside the kernel. Then it is left behind, and no second one is started
    beside it until it is gone.
    """

    def __init__(self) -> None:
        self._stuck: Optional["subprocess.Popen[bytes]"] = None
        self._turn = threading.Lock()

    def run(self, argv: List[str], timeout_s: float) -> str:
        """Return its stdout. Raises CommandFailed."""
        with self._turn:
            if self._stuck is not None and self._stuck.poll() is None:
                raise CommandFailed("%s (pid %d) hangs since an earlier call" % (argv[0], self._stuck.pid))
            self._stuck = None
            return self._run(argv, timeout_s)

    def _run(self, argv: List[str], timeout_s: float) -> str:
        try:
            with registering() as own:
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
                own.add(process.pid)
        except OSError as error:
            raise CommandFailed("%s cannot be run: %s" % (argv[0], error)) from error
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            self._stuck = process
            raise CommandFailed("%s gave no answer within %g s" % (argv[0], timeout_s)) from error
        with registering() as own:
            own.discard(process.pid)
        if process.returncode != 0:
            text = (stderr or stdout).decode("utf-8", "replace").strip()
            raise CommandFailed("%s exited %d: %s" % (argv[0], process.returncode, text[-500:]))
        return stdout.decode("utf-8", "replace")


def reap_adopted() -> None:
    """Reap the ended processes that this subreaper adopted, leaving those started here to their own waiters."""
    with _lock:
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in _own:
                continue
            stat = read_stat(int(name))
            if stat is not None and stat.ppid == os.getpid() and stat.state in ZOMBIE_STATES:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(stat.pid, os.WNOHANG)

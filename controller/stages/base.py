"""What every stage gets, and the one way to call the payload on the host."""

from __future__ import annotations

import json
import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from controller.core.errors import ConnectionLost, CtlError, HostUnusable, RefusedError, RemoteFailed
from controller.transport.base import Process, Transport
from remote_payload.host.framing import pack_frame
from remote_payload.host.layout import Layout
from remote_payload.host.protocol import HostRecord

HOST_ERROR = 70
"""Exit code of a payload verb that reports its error as JSON (EX_SOFTWARE of sysexits.h)."""

CALL_TIMEOUT_S = 60.0
"""For one answer of the payload; everything slow on the host has a shorter deadline of its own."""


class Emit(Protocol):
    """Writes one event of the controller: `emit("stage", name="push", status="started")`."""

    def __call__(self, event_type: str, /, **fields: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One host, one connection, one run."""

    transport: Transport
    host: HostRecord
    payload: str  # hash; the payload that is called
    emit: Emit
    cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def layout(self) -> Layout:
        return Layout(self.host["workdir"])

    def argv(self, verb: str) -> Sequence[str]:
        """Return the remote argv for a payload verb: isolated, without byte code written beside the payload."""
        main = posixpath.join(self.layout.payload(self.payload), "remote_payload", "host", "main.py")
        return (self.host["bootstrap_python"], "-I", "-B", main, verb)

    def call(
        self, verb: str, request: dict[str, Any], *, body: bytes = b"", timeout: float = CALL_TIMEOUT_S
    ) -> bytes:
        """Send one request to a payload verb and return its stdout.

        Raises RemoteFailed with the host's own explanation, ConnectionLost, ConnectionFailed.
        """
        done = self.transport.run(self.argv(verb), stdin=pack_frame(request, body), timeout=timeout)
        if done.code == 0:
            return done.stdout
        raise host_error(verb, done.code, done.stdout, done.stderr)

    def call_json(
        self, verb: str, request: dict[str, Any], *, body: bytes = b"", timeout: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Like `call`, for verbs that answer with one JSON object."""
        return _answer(verb, self.call(verb, request, body=body, timeout=timeout))

    def call_telling(
        self,
        verb: str,
        request: dict[str, Any],
        *,
        tell: Callable[[str], None],
        idle: Callable[[], None],
        idle_s: float,
        timeout: float,
    ) -> dict[str, Any]:
        """Like `call_json`, for verbs that say what they do, in lines {"doing": TEXT}, before they answer.

        `tell` gets each text as it comes; `idle` is called whenever `idle_s` seconds have passed without any. A
        payload of an earlier version only answers.
        """
        process = self.transport.start(self.argv(verb))
        end, answer, rest = time.monotonic() + timeout, b"", b""
        try:
            process.write(pack_frame({**request, "tell": True}), timeout=CALL_TIMEOUT_S)
            process.close_stdin()
            while (data := _read_until(process, end, idle, idle_s)) != b"":
                if data is None:
                    raise ConnectionLost(
                        f"`{verb}` did not end on the host within {timeout:g} s",
                        fix="check the host's load and disks, then run the same command again",
                    )
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if (doing := _doing(line)) is not None:
                        tell(doing)
                    else:
                        answer += line + b"\n"
            code = process.wait(timeout=CALL_TIMEOUT_S)
        finally:
            process.close()
        if code != 0:
            raise host_error(verb, code, answer + rest, process.stderr)
        return _answer(verb, answer + rest)


def _read_until(process: Process, end: float, idle: Callable[[], None], idle_s: float) -> bytes | None:
    """Return some bytes of a process, b"" at its end; None where none came before `end`, by the monotonic clock."""
    while (left := end - time.monotonic()) > 0:
        try:
            return process.read(timeout=min(idle_s, left))
        except TimeoutError:
            idle()
    return None


def _doing(line: bytes) -> str | None:
    """Return what a line says that the verb does; None for a line of its answer, or of an error."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    doing = record.get("doing") if isinstance(record, dict) and len(record) == 1 else None
    return doing if isinstance(doing, str) else None


def _answer(verb: str, output: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(output)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise RemoteFailed(
            f"the host's answer to `{verb}` is not JSON",
            why=output[-400:].decode(errors="replace"),
            fix="report this with the output of `ctl preflight`",
        )
    return answer


_NOT_EXECUTABLE, _NOT_FOUND, _KILLED = 126, 127, 128  # exit codes of POSIX shells; the last and more: by a signal


def python_error(name: str, python: str, code: int, stderr: bytes, *, failed: str) -> RemoteFailed:
    """Explain a program of ours that the host's `bootstrap_python` did not run to an answer; `failed` is its code.

    Most often there is no such Python (`python-missing`), or it is none (`python-unusable`); what left a traceback,
    or was killed, is one.
    """
    why = stderr[-1000:].decode(errors="replace").strip()
    fix = (
        f"set `bootstrap_python` of [hosts.{name}] in hosts.toml to a Python 3.9 or newer of the host; "
        "find one there with `command -v python3`"
    )
    if code in (_NOT_EXECUTABLE, _NOT_FOUND):
        return HostUnusable(f"{name} has no {python} that can be run", why=why, fix=fix, code="python-missing")
    what = f"{python} on {name} did not run what it was given (exit code {code})"
    if code < _KILLED and b"Traceback" not in stderr:
        why = why or "it printed no answer and no error, as no Python does"
        return HostUnusable(what, why=why, fix=fix, code="python-unusable")
    return RemoteFailed(what, why=why, fix=fix, code=failed)


def host_error(verb: str, code: int, stdout: bytes, stderr: bytes) -> CtlError:
    """Turn a payload verb's failure into the error that it describes itself."""
    if code == HOST_ERROR:
        try:
            error = json.loads(stdout)["error"]
            return RemoteFailed(error["what"], why=error["why"], fix=error["fix"], code=error["code"])
        except (ValueError, KeyError, TypeError):
            pass  # not our JSON after all: the raw output below says more than a guess
    tail = (stderr or stdout)[-2000:].decode(errors="replace").strip()
    missing = code in (_NOT_EXECUTABLE, _NOT_FOUND)
    return (HostUnusable if missing else RemoteFailed)(
        f"`{verb}` failed on the host with exit code {code}",
        why=tail,
        fix="check `bootstrap_python` in hosts.toml: it must be Python 3.9 or newer",
        code="python-missing" if missing else None,
    )


@contextmanager
def refusals(is_refusal: Callable[[str], bool]) -> Iterator[None]:
    """Raise as a RefusedError what the host calls a refusal by its code: it looked once more, and said no."""
    try:
        yield
    except RemoteFailed as error:
        if not is_refusal(error.code):
            raise
        raise RefusedError(error.what, why=error.why, fix=error.fix, code=error.code, data=error.data) from error


Sink = Callable[[Any], None]

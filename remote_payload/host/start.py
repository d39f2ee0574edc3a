"""Launch exactly once: whoever holds the run's start.lock may launch it, or give it up, and nobody twice."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import time
from typing import Any, BinaryIO, Dict, Iterator, Optional, cast

from remote_payload.host.children import start_verb
from remote_payload.host.errors import HostError, ProtocolError
from remote_payload.host.files import atomic_write, is_at, read_json, tail_text, write_json
from remote_payload.host.layout import Layout, RunPaths, check_run_id
from remote_payload.host.protocol import Confirmation, Result, RunRecord, check_plan, check_record, confirm_line

LOCK_WAIT_S = 60.0
"""Longer than a launch takes with two queries of a slow nvidia-smi, so that a repeated start learns how it went."""

WORD_WAIT_S = 50.0
"""Within LOCK_WAIT_S, so that of two racing starters the second still gets its answer."""


def main(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `start`: {"nonce", "workdir"}, body {"plan": Plan, "secrets": {name: value}}; answers one `confirm_line`.

    Raises HostError if it is not known how the launch went, or it failed; it may then be asked again.
    """
    check_record(request, {"nonce": str, "workdir": str}, "start request")
    try:
        content = check_record(json.loads(body), {"plan": dict, "secrets": dict}, "start request's body")
    except ValueError as error:
        raise ProtocolError("the start request's body is not JSON: %s" % error) from error
    plan = check_plan(content["plan"])
    missing = sorted(set(plan["job"]["secret_env"]) - set(content["secrets"]))
    if missing:
        raise ProtocolError("the start request lacks the secrets %s" % ", ".join(missing))
    # Ignored here, it stays ignored in the supervisor and the job from their first instruction on.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    paths = _make_run_folder(request["workdir"], plan["run_id"])
    with hold_start_lock(paths, LOCK_WAIT_S) as lock:
        word = _earlier_word(paths) or _launch(request["workdir"], paths, plan, content["secrets"], lock)
    confirmation = Confirmation(
        nonce=request["nonce"],
        outcome=word["outcome"],
        run=word.get("run"),
        result=word.get("result"),
        detail=word.get("detail"),
    )
    out.write(confirm_line(confirmation).encode())
    return 0


def cancel(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `cancel`: {"workdir", "run_id", "reason"}: keep a run from being launched, now and later.

    Answers {"outcome": "cancelled"}, or {"outcome": "exists", "run"} if it was launched before. Raises HostError if
    a launch is under way and does not end: then nobody knows.
    """
    check_record(request, {"workdir": str, "run_id": str, "reason": str}, "cancel request")
    paths = _make_run_folder(request["workdir"], check_run_id(request["run_id"]))
    with hold_start_lock(paths, LOCK_WAIT_S):
        run = read_json(paths.run)
        outcome = "cancelled"
        if run is not None or os.path.exists(paths.result):
            outcome = "exists"
        elif not os.path.exists(paths.cancelled):
            atomic_write(paths.cancelled, request["reason"].encode())
    out.write(json.dumps({"outcome": outcome, "run": run}).encode() + b"\n")
    return 0


@contextlib.contextmanager
def hold_start_lock(paths: RunPaths, timeout_s: float) -> Iterator[int]:
    """Hold start.lock; yields its descriptor.

    Raises HostError if it is not to be had within `timeout_s` seconds (`start-busy`), or if the run's folder was
    deleted meanwhile (`run-gone`).
    """
    descriptor = _take_start_lock(paths, timeout_s)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take_start_lock(paths: RunPaths, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            descriptor = os.open(paths.start_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise HostError(
                "run-gone",
                "the folder of this run is gone",
                "%s was deleted while a start or a stop of the run waited for it" % paths.folder,
                "launch a new run",
            ) from None
        if _locks(descriptor, paths.start_lock):
            return descriptor
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise HostError(
                "start-busy",
                "another start or stop of this run is under way",
                "start.lock was not given up within %g s" % timeout_s,
                "ask again in a minute; ctl ps shows what became of it",
            )
        time.sleep(0.05)


def _locks(descriptor: int, path: str) -> bool:
    """Try for the lock; say whether it is held now, and is still the one that others find at `path`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return is_at(descriptor, path)
    except BlockingIOError:
        return False
    except BaseException:
        os.close(descriptor)
        raise


def _make_run_folder(workdir: str, run_id: str) -> RunPaths:
    layout = Layout(workdir)
    paths = layout.run(run_id)
    os.makedirs(layout.runs, mode=0o700, exist_ok=True)
    os.makedirs(paths.folder, mode=0o700, exist_ok=True)
    return paths


def _earlier_word(paths: RunPaths) -> Optional[Dict[str, Any]]:
    """Return what became of this id, None if it was never launched.

    A plan.json alone is no launch: a supervisor that dies before run.json has started nothing, and while one lives
    before that, the lock is not to be had.
    """
    run = cast("Optional[RunRecord]", read_json(paths.run))
    result = cast("Optional[Result]", read_json(paths.result))
    if run is not None or result is not None:
        return {"outcome": "exists", "run": run, "result": result}
    if os.path.exists(paths.cancelled):
        return {"outcome": "cancelled", "detail": {"reason": tail_text(paths.cancelled)}}
    return None


def _launch(
    workdir: str, paths: RunPaths, plan: Dict[str, Any], secrets: Dict[str, str], lock: int
) -> Dict[str, Any]:
    write_json(paths.plan, plan)
    word_read, word_write = os.pipe()
    with os.fdopen(word_read, "rb", buffering=0) as word:
        request = {"workdir": workdir, "run_id": plan["run_id"], "lock_fd": lock, "word_fd": word_write}
        try:
            start_verb(
                "supervise",
                request,
                json.dumps(secrets).encode(),
                run_id=plan["run_id"],
                log=paths.supervisor_log,
                pass_fds=(lock, word_write),
            )
        except OSError as error:
            raise _supervisor_died(paths, str(error)) from error
        finally:
            os.close(word_write)  # ours: the end of the supervisor is then the end of the stream
        return _await_word(word.fileno(), paths)


def _await_word(descriptor: int, paths: RunPaths) -> Dict[str, Any]:
    deadline = time.monotonic() + WORD_WAIT_S
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise HostError(
                "start-timeout",
                "the supervisor has not confirmed within %g s" % WORD_WAIT_S,
                tail_text(paths.supervisor_log),
                "start the same run again to learn how it went",
            )
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            raise _supervisor_died(paths, "it ended without a word")
        data += piece
    word: Dict[str, Any] = json.loads(data)
    return word


def _supervisor_died(paths: RunPaths, why: str) -> HostError:
    log = tail_text(paths.supervisor_log)
    return HostError(
        "supervisor-died",
        "the supervisor ended before it held the job",
        "%s; supervisor.log: %s" % (why, log or "(empty)"),
        "nothing was started; look at bootstrap_python and workdir of this host",
    )

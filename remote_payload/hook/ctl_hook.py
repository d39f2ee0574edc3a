"""Tells the run of every exception that ends a Python process or thread of a job, and of every fatal signal.

The job's own script is not touched and must never be broken by this: it works on any CPython from 3.7 on, needs the
standard library only, imports next to nothing before something fails, and whatever goes wrong in here is one line
on stderr.

Exceptions become `exception` events in `events/py-PID-RANDOM.jsonl` of the run folder, each file with one writer. A
fatal signal leaves no time for that: `faulthandler` writes the stacks into `faults/PID-RANDOM.txt`, which the host's
follower turns into an event once the process is gone. The file starts with one JSON line that says whose it is, and
is locked (flock) for as long as the process lives, whatever PID namespace it is in.
"""

import faulthandler
import os
import sys
import threading
from importlib.machinery import PathFinder
from typing import Any, Optional

TRACEBACK_LIMIT = 1 << 20
"""Characters kept of a traceback, half of them from each end: mutual recursion prints a thousand frames a cause."""

HIGH_DESCRIPTOR = 200
"""Where the fault file's descriptor goes: scripts that close or count the low ones are left alone."""

_RANKS = frozenset(("RANK", "LOCAL_RANK", b"RANK", b"LOCAL_RANK"))

_MULTIPROCESSING = ("multiprocessing.process", "multiprocess.process")

_folder = ""
_fault_fd = -1
_fault_path = ""
_seq = 0
_writer = ""
_lock = threading.Lock()


def install() -> None:
    """Hook this process, if it belongs to a run. Never raises."""
    global _folder
    _folder = os.environ.get("CTL_RUN_DIR", "")
    if not _folder or not os.path.isdir(_folder):
        return
    for step in (_watch_faults, _watch_ranks, _hook_exceptions, _hook_multiprocessing, _follow_forks):
        try:
            step()
        except Exception as error:  # noqa: BLE001 - reported; the script must run without us
            _complain(step.__name__, error)


def chain(ours: Any) -> None:
    """Run the `sitecustomize` that stands behind ours in sys.path; its errors are its own."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module  # the import system hands out what stands here in the end
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules["sitecustomize"] = ours
        raise


def rank() -> Optional[int]:
    """Return this process's rank: RANK or LOCAL_RANK as torchrun sets them, else from vLLM's process name."""
    for name in ("RANK", "LOCAL_RANK"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    name = _process_name()
    for mark in ("_TP", "VllmWorker-"):
        digits = _leading_digits(name.partition(mark)[2])
        if digits:
            return int(digits)
    return None


def report(kind: Any, error: Optional[BaseException], trace: Any) -> None:
    """Write one `exception` event; the same exception only once. Never raises."""
    if error is None or issubclass(kind, (KeyboardInterrupt, SystemExit)):
        return
    try:
        if getattr(error, "_ctl_reported", False):
            return
        try:
            error._ctl_reported = True  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            pass  # a class with slots: it may then be told twice
        _write(kind, error, trace)
    except Exception as failure:  # noqa: BLE001 - reported; the script's own error must come through
        _complain("report", failure)


# ------------------------------------------------------------------------------------------- exceptions


def _hook_exceptions() -> None:
    import atexit

    before, before_thread = sys.excepthook, threading.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        report(kind, error, trace)
        before(kind, error, trace)

    def thread_excepthook(args: Any) -> None:
        report(args.exc_type, args.exc_value, args.exc_traceback)
        before_thread(args)

    sys.excepthook = excepthook
    threading.excepthook = thread_excepthook
    # A script may put its own hook in place of ours; the interpreter keeps what it died of all the same.
    atexit.register(_report_last)


def _report_last() -> None:
    last = getattr(sys, "last_value", None)
    if last is not None:
        report(type(last), last, last.__traceback__)


def _hook_multiprocessing() -> None:
    for name in _MULTIPROCESSING:
        if name in sys.modules:
            _patch_processes(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Patches multiprocessing when, and only if, somebody imports it: that costs 15 ms."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _MULTIPROCESSING:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                _patch_processes(module)
            except Exception as error:  # noqa: BLE001 - reported; the import itself went well
                _complain("multiprocessing", error)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_processes(module: Any) -> None:
    """`_bootstrap` prints what a child's `run` raises and exits: no excepthook is ever called there."""
    original = module.BaseProcess._bootstrap
    if getattr(original, "_ctl", False):
        return

    def _bootstrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = self.run

        def reporting(*run_args: Any, **run_kwargs: Any) -> Any:
            _name_fault_file(self.name)
            try:
                return run(*run_args, **run_kwargs)
            except BaseException as error:
                report(type(error), error, error.__traceback__)
                raise

        try:
            self.run = reporting
        except AttributeError:
            pass  # a class with slots: its children are watched for fatal signals only
        return original(self, *args, **kwargs)

    _bootstrap._ctl = True  # type: ignore[attr-defined]
    module.BaseProcess._bootstrap = _bootstrap


def _write(kind: Any, error: BaseException, trace: Any) -> None:
    global _seq, _writer
    import json
    import time
    import traceback

    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # our own frame says nothing of the script
    text = "".join(traceback.format_exception(kind, error, trace))
    if len(text) > TRACEBACK_LIMIT:
        half = TRACEBACK_LIMIT // 2
        text = "%s\n... %d characters left out ...\n%s" % (text[:half], len(text) - 2 * half, text[-half:])
    frames = traceback.extract_tb(trace)
    try:
        message = str(error)
    except Exception as failure:  # noqa: BLE001 - said in its place
        message = "(its text cannot be had: %s)" % type(failure).__name__
    with _lock:
        if not _writer:
            _writer = "py-%d-%s" % (os.getpid(), os.urandom(3).hex())
        _seq += 1
        record = {
            "wire": 1,
            "seq": _seq,
            "run": os.environ.get("CTL_RUN_ID", ""),
            "host": os.environ.get("CTL_HOST", ""),
            "writer": _writer,
            "t": time.time(),
            "type": "exception",
            "rank": rank(),
            "exc_type": kind.__name__,
            "message": message[:TRACEBACK_LIMIT],
            "traceback": text,
            "where": "%s:%s in %s" % (frames[-1][0], frames[-1][1], frames[-1][2]) if frames else "",
            "process": _whose(),
        }
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        path = os.path.join(_folder, "events", _writer + ".jsonl")
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            while line:
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------------------------- fatal signals


def _watch_faults() -> None:
    """Open this process's fault file and have faulthandler write there."""
    global _fault_fd, _fault_path
    import fcntl

    folder = os.path.join(_folder, "faults")
    if not os.path.isdir(folder):
        return
    _fault_path = os.path.join(folder, "%d-%s.txt" % (os.getpid(), os.urandom(3).hex()))
    low = os.open(_fault_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _fault_fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    finally:
        os.close(low)
    fcntl.flock(_fault_fd, fcntl.LOCK_EX)
    _name_fault_file(_process_name())
    faulthandler.enable(_fault_fd, all_threads=True)


def _name_fault_file(name: str, told: Optional[int] = None) -> None:
    """Write the file's first line anew: ranks and names are often set after the start."""
    import json

    if _fault_fd < 0:
        return
    record = {"pid": os.getpid(), "rank": rank() if told is None else told, "process": name or _whose()}
    os.ftruncate(_fault_fd, 0)
    os.lseek(_fault_fd, 0, os.SEEK_SET)
    os.write(_fault_fd, json.dumps(record).encode() + b"\n")


def _watch_ranks() -> None:
    """A launcher that forks its ranks has each set RANK by itself: `os.environ` passes every change to `putenv`."""
    putenv = os.putenv

    def watching(name: Any, value: Any) -> None:
        putenv(name, value)
        if name in _RANKS and bytes(os.fsencode(value)).isdigit():
            try:
                _name_fault_file(_process_name(), int(value))
            except Exception as error:  # noqa: BLE001 - reported; the variable is set
                _complain("putenv", error)

    os.putenv = watching


def _follow_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """A forked child is a process of its own: another file, another writer, and a lock that nobody holds."""
    global _fault_fd, _seq, _writer, _lock
    _seq, _writer, _lock = 0, "", threading.Lock()
    inherited, _fault_fd = _fault_fd, -1
    try:
        if inherited >= 0:
            faulthandler.disable()
            os.close(inherited)  # the parent's lock stays: it is the parent's own descriptor that holds it
            _watch_faults()
    except Exception as error:  # noqa: BLE001 - reported; the fork itself went well
        _complain("fork", error)


# ---------------------------------------------------------------------------------------------- helpers


def _process_name() -> str:
    for module in _MULTIPROCESSING:
        if module in sys.modules:
            try:
                return str(sys.modules[module].current_process().name)
            except AttributeError:
                pass  # it is being imported
    return ""


def _whose() -> str:
    name = _process_name()
    argv = getattr(sys, "argv", None) or [""]
    return name if name not in ("", "MainProcess") else os.path.basename(argv[0])


def _leading_digits(text: str) -> str:
    end = 0
    while end < len(text) and text[end].isdigit():
        end += 1
    return text[:end]


def _complain(where: str, error: BaseException) -> None:
    try:
        os.write(2, ("ctl: the traceback hook failed in %s: %r\n" % (where, error)).encode())
    except OSError:
        pass  # there is no stderr to say it on

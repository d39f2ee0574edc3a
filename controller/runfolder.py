"""The folder of a run on the workstation: `./ctl-runs/RUN_ID/`.

It holds the mirror of the host's run folder (see `stages.mirror`), `events/controller.jsonl` with what was seen
from here, and `local.json`, which says how to reach the run again. Folders are 0700 and files 0600: logs may quote
data.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.core.endings import OVER
from controller.core.errors import UsageError
from controller.core.events import Event
from controller.core.runview import kind_word
from controller.history import entries
from controller.localdisk import make_folder
from controller.private import private, write_private
from controller.stages.mirror import COPY_DAMAGED, LOCAL_EVENTS, Mirror
from remote_payload.host.layout import MIRRORED_DOCUMENTS, RUN_ID, check_run_id
from remote_payload.host.protocol import RunState

LOCAL_SCHEMA = 1

LOCAL = "local.json"

CLOSE_IDS, ALIKE = 3, 0.8
"""How many ids an unknown one is answered with, and how like (difflib's ratio) they must be: one wrong figure of six
leaves 0.83, while two runs of the same minute come to about 0.75."""

UNKNOWN = "unknown"
"""The state of a run of which nothing that its host said is held here."""

RUN_UNKNOWN = "run-unknown"
"""Code of the error that no run has an id; `like` in its data are those that are like it."""

ALREADY_WATCHED = "already-watched"
"""Code of the error that another process mirrors into the same folder."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run on this workstation."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def launched(self) -> bool:
        """Whether a host has this run, or may have it: where the record of that is damaged, it may."""
        local, why = _document(self.path / LOCAL)
        return bool(why) or (local or {}).get("status") in ("launched", "unknown")

    @property
    def state(self) -> str:
        """The last word about the run that is held here (a RunState), "unknown" where there is none."""
        if self.read("result.json") is not None:
            return RunState.FINISHED.value
        if self.is_lost:
            return RunState.LOST.value
        record = self.read("run.json")
        return str(record["state"]) if record else UNKNOWN

    @property
    def is_lost(self) -> bool:
        """Whether the host's last word was that the run is lost: a watch has noted so in its summary here."""
        return (self.read("summary.json") or {}).get("state") == RunState.LOST.value

    @property
    def is_over(self) -> bool:
        """Whether the end of the run was seen here."""
        return self.state in OVER

    @property
    def kind(self) -> str | None:
        """The kind of its job (see `core.runview.KINDS`), None where its plan is not here."""
        return ((self.read("plan.json") or {}).get("job") or {}).get("kind")

    @property
    def mirror(self) -> Mirror:
        return Mirror(self.path)

    @classmethod
    def create(cls, runs_dir: Path, run_id: str) -> RunFolder:
        """Make the folder of a new run, or return the existing one (attach from another workstation)."""
        path = runs_dir / check_run_id(run_id)
        # `parents=True` would give the folder above the mode of the umask.
        make_folder(runs_dir, 0o700)
        path.mkdir(mode=0o700, exist_ok=True)
        (path / "events").mkdir(mode=0o700, exist_ok=True)
        return cls(path)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a JSON document of the folder, None if it is not there (yet), or damaged: see `damaged`.

        A full disk, a lost power supply or a hand may leave anything in its place. No verb may fail of that as long
        as the host has the file: a copy brings it anew.
        """
        document, _ = _document(self.path / name)
        return document

    def damaged(self) -> dict[str, str]:
        """Return {name: what is wrong} of the documents that are there and cannot be read as such."""
        found = {name: _document(self.path / name)[1] for name in (LOCAL, *MIRRORED_DOCUMENTS)}
        return {name: why for name, why in found.items() if why}

    def missing(self, name: str, fix: str) -> UsageError:
        """Return the error that a document is needed that `read` did not give; a damaged one is named."""
        why = self.damaged().get(name)
        if why is None:
            return UsageError(f"{self.path} holds no {name}", fix=fix)
        return UsageError(f"{self.path / name} is damaged", why=why, fix=fix, code=COPY_DAMAGED)

    def write_local(self, **fields: Any) -> None:
        """Merge `fields` into local.json: host (as in the plan), status, name.

        The status is planned, refused, launched or unknown.
        """
        record = {"schema": LOCAL_SCHEMA, **(self.read(LOCAL) or {}), **fields}
        self._write(LOCAL, record)

    def write_plan(self, plan: Any) -> None:
        self._write("plan.json", plan)

    def write_summary(self, document: Mapping[str, Any]) -> None:
        """Replace summary.json by what is known here: the host's, and what this side adds to it.

        The next copy brings the host's again, and whoever watches then adds to it anew.
        """
        self._write("summary.json", document)

    def _write(self, name: str, document: Any) -> None:
        temporary = self.path / f".{name}.part"
        write_private(temporary, json.dumps(document, indent=1).encode())
        os.replace(temporary, self.path / name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hold the right to mirror into this folder. Raises UsageError if another process has it."""
        with open(self.path / ".watch.lock", "a+", encoding="utf-8", opener=private) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise UsageError(
                    f"run {self.run_id} is being watched from here already",
                    why=f"process {lock.read().strip() or 'unknown'} copies it into {self.path}",
                    fix=f"read its log with `ctl logs {self.run_id}`, or detach the other one with Ctrl-C",
                    code=ALREADY_WATCHED,
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield


def _document(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the JSON object in a file, or None and what is wrong with it: "" where there is no file."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, error.strerror or str(error)
    except ValueError as error:
        return None, str(error)
    # Nothing writes an empty one.
    return (document, "") if isinstance(document, dict) and document else (None, "it holds no record")


class Recorder:
    """Writes the controller's own events to `events/controller.jsonl` and hands them to the sinks.

    A disk that takes none does not disturb what is being told: the lines wait for the next event, or for `flush`.
    """

    def __init__(self, folder: RunFolder, host: str, sink: Callable[[Event], None]) -> None:
        self._path = folder.path / "events" / LOCAL_EVENTS
        self._run = folder.run_id
        self._host = host
        self._sink = sink
        self._lock = threading.Lock()
        self._waiting = b""
        self._told_unwritten = False
        # A later attach continues the sequence; the file has one writer at a time (see RunFolder.watching).
        self._seq = self._path.read_bytes().count(b"\n") if self._path.is_file() else 0

    def __call__(self, event_type: str, /, **fields: object) -> None:
        failed: OSError | None = None
        with self._lock:
            event = self._event(event_type, fields)
            first = not self._waiting
            self._waiting += event.to_json().encode() + b"\n"
            try:
                self._write()
            except OSError as error:
                failed = error if first else None
        self._sink(event)
        if self._told_unwritten and not self._waiting:
            self._told_unwritten = False
            self("notice", level="info", code="events-written", text=f"{self._path} is written again")
        if failed is not None:
            self._told_unwritten = True
            self(
                "notice",
                level="warn",
                code="events-unwritten",
                text=f"{self._path} cannot be written for now: {failed.strerror}",
            )

    def flush(self) -> None:
        """Write what waits. Raises OSError."""
        with self._lock:
            self._write()

    def _event(self, event_type: str, fields: dict[str, object]) -> Event:
        event = Event(
            type=event_type,
            run=self._run,
            host=self._host,
            writer="controller",
            seq=self._seq,
            t=time.time(),
            data=fields,
        )
        self._seq += 1
        return event

    def _write(self) -> None:
        if not self._waiting:
            return
        with open(self._path, "ab", buffering=0, opener=private) as stream:
            size = stream.tell()
            try:
                if stream.write(self._waiting) < len(self._waiting):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                stream.truncate(size)  # half a line would be the beginning of the next one
                raise
        self._waiting = b""


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """Return the runs of a folder, oldest first; other entries are ignored."""
    if not runs_dir.is_dir():
        return []
    return [RunFolder(path) for path in sorted(runs_dir.iterdir()) if RUN_ID.fullmatch(path.name) and path.is_dir()]


def matching(part: str, run_ids: Iterable[str]) -> list[str]:
    """Return the ids that hold `part` anywhere. Raises UsageError for an empty one, which every id holds."""
    if not part:
        raise UsageError(
            "the run id is empty", why="an unset variable of a script?", fix="name a run, or say `--last`"
        )
    return [run_id for run_id in run_ids if part in run_id]


def last_run(runs_dir: Path, kind: str | None = None) -> RunFolder | None:
    """Return the run of this folder that was launched last, of any kind of job or of `kind`; None without one.

    One whose kind is not known, because its copy was cut off before the plan came, counts as of `kind`: an earlier
    run in its place would be another than is meant.
    """
    launched = (run for run in reversed(list_runs(runs_dir)) if run.launched)
    return next((run for run in launched if kind is None or run.kind in (kind, None)), None)


def going_on(runs_dir: Path) -> list[RunFolder]:
    """Return the runs of a folder that were launched and whose end was not seen here, oldest first."""
    return [run for run in list_runs(runs_dir) if run.launched and not run.is_over]


def find_run(runs_dir: Path, run_id: str | None, *, kind: str | None = None) -> RunFolder:
    """Return a run by its id or a part that only it has; None means the last one that was launched, of `kind`.

    What is not in `runs_dir` is looked up in the history of this workstation. Raises UsageError naming the nearest
    ids.
    """
    runs = list_runs(runs_dir)
    remembered = [RunFolder(Path(entry.folder)) for entry in entries() if Path(entry.folder).is_dir()]
    if run_id is None:
        last = last_run(runs_dir, kind)
        if last is not None:
            return last
        # A run of another project is never meant by "the last": it has to be named.
        elsewhere = [f"{run.run_id} ({run.path})" for run in remembered[-3:]]
        word = "run" if kind is None else kind_word(kind)
        raise UsageError(
            f"there is no {word} of this folder yet",
            why=f"no launched {word} in {runs_dir}" + (f"; elsewhere: {', '.join(elsewhere)}" if elsewhere else ""),
            fix="name a run by its id" if elsewhere else "start one with `ctl extract`",
        )
    known = {run.run_id: run for run in (*remembered, *runs)}
    matches = matching(run_id, known)
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        raise UsageError(
            f"{run_id!r} is ambiguous", why=", ".join(matches[:5]), fix="write more of the id", code="run-ambiguous"
        )
    close = like(run_id, known)
    raise UsageError(
        f"no run of this workstation has the id `{run_id}`",
        why=f"like it: {', '.join(close)}"
        if close
        else f"neither {runs_dir} nor the history of this workstation does",
        fix="list a host's runs with `ctl ps --host HOST`; `ctl attach RUN --host HOST` brings one here",
        code=RUN_UNKNOWN,
        data={"like": close} if close else None,
    )


def known_ids(runs_dir: Path) -> set[str]:
    """Return the ids of all runs that `find_run` knows."""
    return {run.run_id for run in list_runs(runs_dir)} | {entry.run_id for entry in entries()}


def like(wanted: str, run_ids: Iterable[str]) -> list[str]:
    """Return the newest ids that are like `wanted`, or begin or end so: people write a day, or the last figures."""

    def likeness(run_id: str) -> float:
        parts = (run_id[: len(wanted)], run_id[-len(wanted) :])
        return max(difflib.SequenceMatcher(None, wanted, part).ratio() for part in parts)

    return [run_id for run_id in sorted(run_ids, reverse=True) if likeness(run_id) >= ALIKE][:CLOSE_IDS]

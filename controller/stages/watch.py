"""watch: copy the run folder's streams until the run has ended, through any number of broken connections.

The host sends at least one frame a second. Silence for longer than `SILENCE_S` therefore means a dead link, not a
quiet job; the connection is dropped, made anew, and the stream goes on at the byte where the local copy ends.
A broken connection is reported as contact, never as a word about the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn

from controller.core.errors import AuthenticationError, ConnectionFailed, ConnectionLost, HostKeyError
from controller.core.events import Event, parse_event
from controller.core.loglines import Place, TimeIndex
from controller.core.state import in_order
from controller.stages.base import CALL_TIMEOUT_S, Context, host_error
from controller.stages.mirror import COPY_DAMAGED, DAMAGED, Mirror, MirrorError
from controller.stages.telling import Piece, told
from controller.transport.base import Process
from remote_payload.host.errors import ProtocolError
from remote_payload.host.framing import FrameReader, pack_frame
from remote_payload.host.layout import LOG_GAPS, LOG_TIMES
from remote_payload.host.protocol import RunState

SILENCE_S = 20.0
"""Twenty missed heartbeats: more than any hiccup of a loaded host, less than a person's patience."""

BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses between attempts to connect again; the last one repeats."""

POLL_S = 0.25
"""How often the host looks for new bytes."""

CANCEL_CHECK_S = 0.5
"""A detach is heard within this time."""

HELD_BYTES = 4 << 20
"""Of the log that waits for the events of its time; where there is more, it comes before them."""

_UNFRAMED_BYTES = 64 << 10
"""Kept of output that is no frame: an error message of the payload is far smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOutcome:
    """`ended` is False when patience ended or the user detached: the run goes on without us."""

    ended: bool
    state: str
    end_reason: str | None
    reconnects: int


def run(
    ctx: Context,
    run_id: str,
    mirror: Mirror,
    *,
    on_event: Callable[[Event], None],
    on_log: Callable[[bytes, float], None],
    patience_s: float,
    follow: bool = True,
) -> WatchOutcome:
    """Mirror a run until it ends, `ctx.cancel` is set, or the host was unreachable for `patience_s` seconds.

    `on_event` gets each event of the host and `on_log` each byte of the job's output exactly once, by time as far as
    it is known, those that an earlier controller has copied first. `on_log` gets the time too, right to a second, in
    seconds since the epoch by the host's clock; -inf where it is not known. Without `follow` it ends with all that
    there is at the moment. Raises RemoteFailed if the host cannot read the run, MirrorError if the copy is not equal
    to the original at the end, and without `follow` ConnectionLost or ConnectionFailed where patience ended.
    """
    watcher = _Watcher(ctx, run_id, mirror, on_event, on_log, follow)
    lost_since: float | None = None
    attempt = 0
    while not ctx.cancel.is_set():
        before = watcher.frames
        try:
            if watcher.stream():
                return watcher.outcome(ended=watcher.state in ("finished", "lost"))
        except (HostKeyError, AuthenticationError):
            raise  # waiting does not mend these
        except (ConnectionLost, ConnectionFailed) as error:
            now = time.monotonic()
            if watcher.frames > before:
                attempt, lost_since = 0, None
            lost_since = now if lost_since is None else lost_since
            watcher.reconnects += 1
            if now - lost_since > patience_s:
                ctx.emit("contact", status="lost", text=f"no contact for {now - lost_since:.0f} s: {error.what}")
                if not follow:
                    raise  # what is there was wanted, and is not all here
                break
            ctx.emit("contact", status="reconnecting", text=error.what)
            ctx.cancel.wait(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            attempt += 1
    return watcher.outcome(ended=False)


class _Renewed(Exception):
    """Files of the copy were put aside: the stream begins again, and sends them from their first byte."""


class _Watcher:
    """The state that outlives a connection."""

    def __init__(
        self,
        ctx: Context,
        run_id: str,
        mirror: Mirror,
        on_event: Callable[[Event], None],
        on_log: Callable[[bytes, float], None],
        follow: bool,
    ) -> None:
        self._ctx = ctx
        self._run_id = run_id
        self._mirror = mirror
        self._on_event = on_event
        self._on_log = on_log
        self._follow = follow
        self._events: list[Event] = []
        self._log: list[Piece] = []
        self._log_bytes = 0
        # What an earlier controller copied is shown first; the stream then goes on in mid-line if need be.
        self._partial_lines = mirror.unfinished()
        self._times = mirror.times()
        self._tell(mirror.held_events(), mirror.held_log())
        self._gaps = mirror.gaps()
        self._told = set(self._gaps)  # the replay above has shown these
        self._renewed: frozenset[str] = frozenset()
        self.state = "unknown"
        self.end_reason: str | None = None
        self.frames = 0
        self.reconnects = 0

    def outcome(self, *, ended: bool) -> WatchOutcome:
        return WatchOutcome(ended=ended, state=self.state, end_reason=self.end_reason, reconnects=self.reconnects)

    def stream(self) -> bool:
        """Follow over one connection; True once the host has sent its end frame."""
        request = {
            "workdir": self._ctx.host["workdir"],
            "run_id": self._run_id,
            "cursor": self._mirror.cursor(),
            "documents": self._mirror.documents(),
            "follow": self._follow,
            "times": True,
            "interval_s": POLL_S,
        }
        process = self._ctx.transport.start(self._ctx.argv("tail"))
        try:
            process.write(pack_frame(request), timeout=CALL_TIMEOUT_S)
            process.close_stdin()
            self._ctx.emit("contact", status="connected", text="")
            reader, unframed = FrameReader(), b""
            while (data := self._read(process)) is not None:
                if not data:
                    code = process.wait(timeout=CALL_TIMEOUT_S)
                    raise host_error("tail", code, unframed, process.stderr)
                unframed = (unframed + data)[:_UNFRAMED_BYTES]
                try:
                    for header, body in reader.feed(data):
                        self.frames += 1
                        unframed = b""
                        if self._take(header, body):
                            return True
                except ProtocolError as error:
                    self._explain(process, unframed, error)
            return False
        except _Renewed:
            return False
        finally:
            process.close()
            self._let_go()

    def _read(self, process: Process) -> bytes | None:
        """Wait for bytes in short steps, so that a cancel is heard at once; None after a cancel."""
        deadline = time.monotonic() + SILENCE_S
        while not self._ctx.cancel.is_set():
            try:
                return process.read(timeout=CANCEL_CHECK_S)
            except TimeoutError:
                if time.monotonic() > deadline:
                    self._ctx.transport.close()
                    raise ConnectionLost(
                        f"no sign of life from the host for {SILENCE_S:.0f} s",
                        why="the host sends a heartbeat every second while it can be reached",
                    ) from None
        return None

    def _explain(self, process: Process, unframed: bytes, error: ProtocolError) -> NoReturn:
        """Bytes that are no frame are either an error that the payload printed, or a damaged stream."""
        code = process.wait(timeout=CALL_TIMEOUT_S)
        if code != 0:
            raise host_error("tail", code, unframed, process.stderr) from error
        raise ConnectionLost("the stream from the host is garbled", why=str(error)) from error

    def _take(self, header: dict[str, Any], body: bytes) -> bool:
        kind = header.get("type")
        if kind != "append" or self._log_bytes > HELD_BYTES:
            self._let_go()
        if kind == "append":
            self._append(str(header["path"]), int(header["offset"]), body)
        elif kind == "document":
            self._mirror.replace(str(header["path"]), body)
        elif kind in ("status", "end"):
            self._tell_orphaned(str(header.get("state")))
            self.state = str(header.get("state"))
            self.end_reason = header.get("end_reason", self.end_reason)
            if kind == "end":
                self._renew(header["files"])
                differences = self._mirror.differences(header["files"])
                if differences:
                    raise MirrorError(
                        "the local copy of the run differs from the host's",
                        why="; ".join(differences[:5]),
                        fix="move the local run folder away and run `ctl attach` again: it copies everything anew",
                    )
                return True
        return False  # other kinds come from a newer payload and are not for this version

    def _renew(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Have what is not as on the host sent anew, once. Raises _Renewed if there is any.

        The files are read by whoever asks later; what a view was shown of them it is not shown again.
        """
        differing = {} if self._renewed else self._mirror.renew(files)
        for name, how in differing.items():
            folder = self._mirror.folder
            text = f"{folder / name} is damaged ({how}): it is fetched anew, and what it was is in {folder / DAMAGED}"
            self._ctx.emit("notice", level="warn", code=COPY_DAMAGED, text=text)
            self._partial_lines.pop(name, None)
        if differing:
            self._renewed = frozenset(differing)
            self._gaps = self._mirror.gaps()
            raise _Renewed

    def _tell_orphaned(self, state: str) -> None:
        """Say once that a run goes on without its supervisor: nobody else will, and its limits hold no more."""
        if state == RunState.ORPHANED.value != self.state:
            self._ctx.emit(
                "notice", level="warn", code="orphaned",
                text="the supervisor is dead and the job goes on: nobody holds it to its limits or ends what it "
                f"leaves; `ctl stop {self._run_id}` does",
            )  # fmt: skip

    def _append(self, name: str, offset: int, body: bytes) -> None:
        self._mirror.append(name, offset, body)
        if name == f"log/{LOG_GAPS}":
            self._gaps = self._mirror.gaps()
        elif name in self._renewed:
            return
        elif name.startswith("log/") and name != f"log/{LOG_TIMES}":
            self._tell_gaps(name)
            self._hold((int(PurePosixPath(name).stem), offset), body)
        elif name.startswith("events/") or name == f"log/{LOG_TIMES}":
            *lines, rest = (self._partial_lines.pop(name, b"") + body).split(b"\n")
            self._partial_lines[name] = rest
            if name.startswith("log/"):
                self._times += lines
            else:
                self._events += filter(None, map(parse_event, lines))

    def _tell_gaps(self, name: str) -> None:
        """Before the log goes on in segment `name`, say in its place what the host gave up of earlier ones.

        The host sends the record of a gap before what follows it.
        """
        for number in sorted(self._gaps.keys() - self._told):
            if f"log/{number:06d}.log" < name:
                self._told.add(number)
                if line := self._mirror.gap_line(self._gaps[number]):
                    self._hold(None, line)

    def _hold(self, place: Place | None, data: bytes) -> None:
        self._log.append((place, data))
        self._log_bytes += len(data)

    def _let_go(self) -> None:
        """Tell, in the order of their times, what one look of the host has brought, which sends file after file."""
        events, log = self._events, self._log
        self._events, self._log, self._log_bytes = [], [], 0
        self._tell(in_order(events), log)

    def _tell(self, events: Iterable[tuple[float, Event]], log: Iterable[Piece]) -> None:
        times, self._times = self._times, self._times[-1:]
        for t, what in told(events, log, TimeIndex(times)):
            if isinstance(what, Event):
                self._on_event(what)
            else:
                self._on_log(what, t)

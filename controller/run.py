"""The handle of a run: watch it, read it, stop it, from a terminal, a script or a notebook."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from controller import gone
from controller.afterwards import HOOK_FAILED, Afterwards, run_hook
from controller.core.endings import end_error
from controller.core.errors import CtlError, UsageError
from controller.core.events import Event
from controller.core.usage import usage
from controller.diagnosis import lost_summary, view_of, with_triage, written_samples
from controller.documents import Ledger, Summary
from controller.localdisk import copying
from controller.recorded import events as recorded_events
from controller.recorded import ledger_records
from controller.runfolder import ALREADY_WATCHED, LOCAL, UNKNOWN, Recorder, RunFolder
from controller.sinks import Sink, give_log
from controller.stages import stop as stop_stage
from controller.stages import watch as watch_stage
from controller.stages.base import Context
from controller.stages.mirror import COPY_DAMAGED, read_part
from controller.transport.base import Transport
from controller.ui.formats import last_words, state_word
from controller.waiting import Detached, no_summary, wait_timeout
from remote_payload.host.pause import paused_by
from remote_payload.host.protocol import HostRecord, Plan, RunState

if TYPE_CHECKING:
    import pandas

PATIENCE_S = 600.0
"""How long a watch tries to reach a host again before it detaches; the run itself is not affected."""

REFRESH_PATIENCE_S = 20.0
"""The same for one look at what is new: somebody waits for it."""

HANDOVER_POLL_S = 0.1

FRESH_S = 1.0
"""What was copied this recently is not asked for again: a loop over `logs()` does not hammer the host."""


class Run:
    """A run on a host. Made by `controller.extract`, `controller.attach` and the command line.

    Closing it, losing the connection or ending this process does not touch the run: the host works alone.
    """

    def __init__(
        self,
        folder: RunFolder,
        transport: Transport,
        host: HostRecord,
        payload: str,
        sinks: Sequence[Sink] = (),
        *,
        afterwards: Afterwards | None = None,
    ) -> None:
        self._folder = folder
        self._afterwards = afterwards or Afterwards()
        self._sinks = list(sinks)
        self._recorder = Recorder(folder, host["name"], self._event)
        self._cancel = threading.Event()
        self._context = Context(
            transport=transport, host=host, payload=payload, emit=self._recorder, cancel=self._cancel
        )
        self._outcome: watch_stage.WatchOutcome | None = None
        self._confirmed = UNKNOWN
        self._copied: float | None = None
        self._summary: Summary | None = None
        self._screen: Callable[[Run], AbstractContextManager[Sink] | None] = lambda _: None

    @property
    def id(self) -> str:
        return self._folder.run_id

    @property
    def host(self) -> str:
        return self._context.host["name"]

    @property
    def folder(self) -> RunFolder:
        return self._folder

    @property
    def context(self) -> Context:
        """For the pipeline's stages."""
        return self._context

    def confirmed(self, run: Mapping[str, Any] | None) -> None:
        """Remember what the host said of the run when it confirmed its launch, until more is known of it."""
        self._confirmed = str(run["state"]) if run else RunState.LAUNCHING.value

    def flush(self) -> None:
        """Have all that was seen from here on disk. Raises OSError."""
        self._recorder.flush()

    def add_sink(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Give it no more. Raises ValueError if it was never added."""
        self._sinks.remove(sink)

    def show_with(self, screen: Callable[[Run], AbstractContextManager[Sink] | None]) -> None:
        """Have `wait` show the run on what `screen` returns, which may be None for nothing."""
        self._screen = screen

    # ------------------------------------------------------------------------------------ what is known

    @property
    def state(self) -> str:
        """The last known word about the run (a RunState), or "unknown" before the first contact."""
        known = self._folder.state
        if known == RunState.FINISHED.value:
            return known
        if self._outcome is not None:
            return self._outcome.state
        return self._confirmed if known == UNKNOWN else known

    @property
    def paused(self) -> str | None:
        """Why a run that goes on waits, as far as was copied here: `disk-low` or `disk-full`, else None."""
        return paused_by(str(self._folder.path / "events")) if self.state == RunState.RUNNING.value else None

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "lost")

    @property
    def summary(self) -> Summary | None:
        """The run's summary.json once it has ended, else None; of a lost run what its copy here says.

        `triage` (see `diagnosis`), `gpu_hours` and `cost` (see `core.usage`) are added here.
        """
        # Of a lost run the document here is ours, and older than what a later look copied.
        lost = self.state == RunState.LOST.value
        document = lost_summary(self._folder) if lost else self._folder.read("summary.json")
        if document is not None and self._summary is None:
            used = usage(
                self._folder.read("plan.json"),
                self._folder.read("result.json"),
                self._afterwards.price_per_gpu_hour,
            )
            self._summary = Summary({**with_triage(document, self._folder), **used})
        return self._summary if document is not None else None

    def to_pandas(self) -> pandas.DataFrame:
        """Return `summary.to_pandas()`. Raises UsageError (`no-summary`) while there is none, and without pandas."""
        if self.summary is None:
            raise no_summary(self.id, state_word(self.state, self.paused), "wait for its end with `run.wait()`")
        return self.summary.to_pandas()

    @property
    def problem(self) -> Mapping[str, Any] | None:
        """The first problem of an unsuccessful run: {code, what, why, fix, traceback?, rank?}."""
        problems = (self.summary or Summary()).get("problems") or []
        return problems[0] if problems else None

    def logs(self) -> Iterator[bytes]:
        """Yield the raw bytes of the job's output, with a line of ours for each declared gap.

        Of a run that has not ended, what is new on the host is copied here first.
        """
        self._refresh_if_stale()
        for part in self._folder.mirror.log_parts():
            yield from read_part(part)

    def events(self) -> list[Event]:
        """Return everything that was reported of the run, of all writers by time; refreshed as `logs` is."""
        self._refresh_if_stale()
        return recorded_events(self._folder)

    @property
    def ledger(self) -> Ledger:
        """What became of each sample so far: one record for each line of the ledgers; refreshed as `logs` is."""
        self._refresh_if_stale()
        return Ledger({"rank": rank, **record} for record, rank in ledger_records(self._folder))

    def refresh(self, *, handover_s: float = 0.0) -> None:
        """Bring the local copy up to date, unless another process of this workstation does so all the time.

        That one is waited for, for at most `handover_s` seconds: it may be about to end. Raises ConnectionFailed and
        ConnectionLost, after REFRESH_PATIENCE_S without contact, CopyFailed, UsageError (`run-gone`).
        """
        self._context.transport.connect()  # a watch would go on trying, which nobody asked for
        deadline = time.monotonic() + handover_s
        while True:
            try:
                self.watch(follow=False, patience_s=REFRESH_PATIENCE_S)
                return
            except UsageError as error:
                if error.code != ALREADY_WATCHED:
                    raise
            if time.monotonic() >= deadline:
                return
            time.sleep(HANDOVER_POLL_S)

    def _refresh_if_stale(self) -> None:
        known = self._copied is not None and time.monotonic() - self._copied < FRESH_S
        if not self.ended and not known:
            self.refresh()

    # --------------------------------------------------------------------------------------- what to do

    def watch(
        self, *, patience_s: float = PATIENCE_S, follow: bool = True, timeout_s: float | None = None
    ) -> watch_stage.WatchOutcome:
        """Copy the run's streams here until it ends, `detach()` is called, or patience or `timeout_s` ends."""
        with ExitStack() as stack:
            stack.enter_context(copying(self._folder.path))
            stack.enter_context(self._folder.watching())
            self._cancel.clear()  # a `detach` was meant for an earlier watch: there is one at a time
            if timeout_s is not None:  # from here on, or it would be forgotten with that
                timer = threading.Timer(timeout_s, self.detach)
                timer.daemon = True
                timer.start()
                stack.callback(timer.cancel)
            self._recorder("stage", name="watch", status="started")
            for name, why in self._folder.damaged().items():
                text = f"{self._folder.path / name} is damaged ({why}): it is written anew by what {self.host} has"
                self._recorder("notice", level="warn", code=COPY_DAMAGED, text=text)
            self._outcome = self._follow(patience_s, follow=follow)
            if self._folder.read(LOCAL) is None:  # it is of this side alone; the host has just answered for the run
                self._folder.write_local(host=self._context.host, status="launched")
            status = "done" if self._outcome.ended else "skipped"
            self._recorder("stage", name="watch", status=status, text=self._outcome.state)
            if self._outcome.ended and self.summary is not None:
                self._folder.write_summary(self.summary)
        self._copied = time.monotonic()
        if self._outcome.ended:
            self._finish()
        return self._outcome

    def _follow(self, patience_s: float, *, follow: bool) -> watch_stage.WatchOutcome:
        try:
            with gone.noticed():
                return watch_stage.run(
                    self._context,
                    self.id,
                    self._folder.mirror,
                    on_event=self._event,
                    on_log=self._log,
                    patience_s=patience_s,
                    follow=follow,
                )
        except gone.RunPruned:
            word = gone.last_word(self._folder, self.host)
            self._recorder("notice", level="info", code="run-pruned", text=f"{self.host} {gone.PRUNED}")
            return watch_stage.WatchOutcome(ended=True, state=word.state, end_reason=word.end_reason, reconnects=0)

    def wait(self, timeout: float | None = None) -> Run:
        """Watch until the run has ended, and return self; it is shown meanwhile, see `display` of `extract`.

        `timeout` is in seconds. Raises WaitTimeout, a CtlError and a TimeoutError, when it has passed or when the
        host was out of reach for longer than `PATIENCE_S`; the run goes on and may be waited for again. An interrupt
        (Ctrl-C, the stop button of a notebook) raises Detached: it ends the waiting, not the run.
        """
        try:
            return self._wait(timeout)
        except KeyboardInterrupt:
            raise Detached(self.id, self.host) from None

    def _wait(self, timeout: float | None) -> Run:
        if self.ended:
            return self
        with ExitStack() as stack:
            screen = self._screen(self)
            if screen is not None:
                self._sinks.append(sink := stack.enter_context(screen))
                stack.callback(self._sinks.remove, sink)
            started = time.monotonic()
            outcome = self.watch(timeout_s=timeout)
        if not outcome.ended:
            raise wait_timeout(
                self.id, state_word(self.state, self.paused), waited_s=time.monotonic() - started, timeout=timeout,
                patience_s=PATIENCE_S,
            )  # fmt: skip
        return self

    def result(self, timeout: float | None = None) -> Summary:
        """Wait, and return the summary. Raises JobFailed, JobStopped or RefusedError if it is no success."""
        self.wait(timeout)
        error = self.error()
        if error is not None:
            raise error
        return self.summary or Summary()

    def detach(self) -> None:
        """End a `watch` or `wait` that another thread is in; the run goes on."""
        self._cancel.set()

    def stop(
        self, *, grace_s: float = stop_stage.DEFAULT_GRACE_S, telling: stop_stage.Telling | None = None
    ) -> stop_stage.StopOutcome:
        """Stop the run on the host: TERM, grace, KILL, proof; one that is over is left as it is, and says so.

        `telling` is told how far it is. Raises RemoteFailed, ConnectionLost, UsageError (`run-gone`), LaunchUnknown.
        """
        try:
            with gone.noticed():
                return stop_stage.run(self._context, self.id, grace_s=grace_s, telling=telling)
        except gone.RunPruned:
            return gone.stopped(self._folder, self.host)

    def error(self) -> CtlError | None:
        """Return what an unsuccessful end means as an error, None for a success or while it runs."""
        cause = (self.summary or Summary()).get("triage") or {}
        problem = cause if cause.get("known") else self.problem
        last = last_words(view_of(self._folder)) if self.state == RunState.LOST.value else ""
        result = self._folder.read("result.json")
        return end_error(self.id, self.state, result, problem, last=last, written=written_samples(self.summary))

    def close(self) -> None:
        """Close the connection; the run goes on."""
        self._context.transport.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {self.id} on {self.host}: {state_word(self.state, self.paused)}>"

    def __rich__(self) -> object:
        from controller.ui.notebook import run_renderable

        return run_renderable(self._described())

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        from controller.ui.notebook import run_bundle

        return run_bundle(self._described())

    def _described(self) -> dict[str, Any]:
        """What is known here, for a person; asks nobody."""
        result = self._folder.read("result.json")
        plan = self._folder.read("plan.json") or {}
        return {
            "run_id": self.id,
            "host": self.host,
            "state": "launched" if self.state == "unknown" else state_word(self.state, self.paused),
            "end_reason": (result or {}).get("end_reason"),
            "name": (plan.get("job") or {}).get("name"),
            "folder": str(self._folder.path),
            "summary": self.summary,
            "problem": self.problem,
        }

    def _finish(self) -> None:
        """Run the host's hook for an ended run; what goes wrong with it is a warning, and nothing of the run's."""
        if self._afterwards.on_finish is None:
            return
        document = self.summary or {
            "schema_version": 1, "run_id": self.id, "state": self.state, "end_reason": None, "hosts": [self.host],
        }  # fmt: skip
        try:
            problem = run_hook(self._folder, self._afterwards.on_finish, document)
        except OSError as error:
            problem = f"it could not be begun: {error}"
        if problem is not None:
            self._recorder("notice", level="warn", code=HOOK_FAILED, text=f"on_finish: {problem}")

    def _event(self, event: Event) -> None:
        for sink in self._sinks:
            sink.event(event)

    def _log(self, data: bytes, t: float) -> None:
        for sink in self._sinks:
            give_log(sink, data, t)


def load_plan(folder: RunFolder) -> Plan | None:
    """Return the plan of a local run folder, None if it was never copied here, or is damaged."""
    document: Any = folder.read("plan.json")
    plan: Plan | None = document
    return plan

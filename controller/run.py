"""The handle of a run: watch it, read it, stop it, from a terminal, a script or a notebook."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from controller.afterwards import Afterwards, run_hook
from controller.core.errors import CtlError, ExitCode, JobFailed, JobStopped, RefusedError
from controller.core.events import Event
from controller.core.usage import usage
from controller.diagnosis import with_triage
from controller.localdisk import copying
from controller.runfolder import Recorder, RunFolder
from controller.stages import stop as stop_stage
from controller.stages import watch as watch_stage
from controller.stages.base import Context
from controller.stages.mirror import read_part
from controller.transport.base import Transport
from remote_payload.host.protocol import REFUSED, EndReason, HostRecord, Plan

PATIENCE_S = 600.0
"""How long a watch tries to reach a host again before it detaches; the run itself is not affected."""


class Sink(Protocol):
    """Consumes a run as it happens; every view is one."""

    def event(self, event: Event) -> None: ...

    def log(self, data: bytes) -> None: ...


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
        self._triaged: dict[str, Any] | None = None

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

    def flush(self) -> None:
        """Have all that was seen from here on disk. Raises OSError."""
        self._recorder.flush()

    def add_sink(self, sink: Sink) -> None:
        self._sinks.append(sink)

    # ------------------------------------------------------------------------------------ what is known

    @property
    def state(self) -> str:
        """The last known word about the run (a RunState), or "unknown" before the first contact."""
        if self._folder.read("result.json") is not None:
            return "finished"
        if self._outcome is not None:
            return self._outcome.state
        record = self._folder.read("run.json")
        return str(record["state"]) if record else "unknown"

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "lost")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The run's summary.json once it has ended, else None.

        `triage` (see `diagnosis`), `gpu_hours` and `cost` (see `core.usage`) are added here.
        """
        document = self._folder.read("summary.json")
        if document is not None and self._triaged is None:
            used = usage(
                self._folder.read("plan.json"),
                self._folder.read("result.json"),
                self._afterwards.price_per_gpu_hour,
            )
            self._triaged = {**with_triage(document, self._folder), **used}
        return self._triaged if document is not None else None

    @property
    def problem(self) -> Mapping[str, Any] | None:
        """The first problem of an unsuccessful run: {code, what, why, fix, traceback?, rank?}."""
        problems = (self.summary or {}).get("problems") or []
        return problems[0] if problems else None

    def logs(self) -> Iterator[bytes]:
        """Yield the raw bytes of the job's output that are held here, with a line of ours for each declared gap."""
        for part in self._folder.mirror.log_parts():
            yield from read_part(part)

    # --------------------------------------------------------------------------------------- what to do

    def watch(self, *, patience_s: float = PATIENCE_S, follow: bool = True) -> watch_stage.WatchOutcome:
        """Copy the run's streams here until it ends, `detach()` is called, or patience ends."""
        with copying(self._folder.path), self._folder.watching():
            self._recorder("stage", name="watch", status="started")
            self._outcome = watch_stage.run(
                self._context,
                self.id,
                self._folder.mirror,
                on_event=self._event,
                on_log=self._log,
                patience_s=patience_s,
                follow=follow,
            )
            status = "done" if self._outcome.ended else "skipped"
            self._recorder("stage", name="watch", status=status, text=self._outcome.state)
        if self._outcome.ended:
            self._finish()
        return self._outcome

    def wait(self, timeout: float | None = None) -> Run:
        """Watch until the run has ended, and return self.

        `timeout` is in seconds. Raises TimeoutError when it has passed or when the host was out of reach for
        longer than `PATIENCE_S`; the run goes on and may be waited for again.
        """
        with ExitStack() as stack:
            if timeout is not None:
                timer = threading.Timer(timeout, self.detach)
                timer.daemon = True
                timer.start()
                stack.callback(timer.cancel)
            self._cancel.clear()
            started = time.monotonic()
            outcome = self.watch()
        if not outcome.ended:
            raise TimeoutError(f"run {self.id} is {self.state} after {time.monotonic() - started:.0f} s")
        return self

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait, and return the summary. Raises JobFailed, JobStopped or RefusedError if it is no success."""
        self.wait(timeout)
        error = self.error()
        if error is not None:
            raise error
        return self.summary or {}

    def detach(self) -> None:
        """End a `watch` or `wait` that another thread is in; the run goes on."""
        self._cancel.set()

    def stop(self, *, grace_s: float = stop_stage.DEFAULT_GRACE_S) -> stop_stage.StopOutcome:
        """Stop the run on the host: TERM, grace, KILL, proof."""
        return stop_stage.run(self._context, self.id, grace_s=grace_s)

    def error(self) -> CtlError | None:
        """Return what an unsuccessful end means as an error, None for a success or while it runs."""
        cause = (self.summary or {}).get("triage") or {}
        problem = cause if cause.get("known") else self.problem
        return end_error(self.id, self.state, self._folder.read("result.json"), problem)

    def close(self) -> None:
        """Close the connection; the run goes on."""
        self._context.transport.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {self.id} on {self.host}: {self.state}>"

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
            self._recorder("notice", level="warn", code="on-finish", text=f"on_finish: {problem}")

    def _event(self, event: Event) -> None:
        for sink in self._sinks:
            sink.event(event)

    def _log(self, data: bytes) -> None:
        for sink in self._sinks:
            sink.log(data)


def end_error(
    run_id: str, state: str, result: Mapping[str, Any] | None, problem: Mapping[str, Any] | None
) -> CtlError | None:
    """Map how a run ended to the error (and so the exit code) that belongs to it; None for success."""
    if state == "lost":
        return JobFailed(
            f"run {run_id} is lost",
            why="neither its supervisor nor its job is alive, and it left no result (a reboot, or both were killed)",
            fix=f"read what it wrote with `ctl logs {run_id}`, then start again",
            code="lost",
        )
    if result is None:
        return None
    reason = result["end_reason"]
    if reason == EndReason.SUCCEEDED.value:
        return None
    why = str(problem["what"]) if problem else ""
    fix = str(problem.get("fix") or "") if problem else ""
    fix = fix or f"read the whole log with `ctl logs {run_id}`"
    if reason in (EndReason.STOPPED.value, EndReason.CANCELLED.value):
        return JobStopped(f"run {run_id} was stopped", why=str(result["message"]), code=reason)
    kind = RefusedError if reason in {word.value for word in REFUSED} else JobFailed
    return kind(f"run {run_id} ended: {result['message']}", why=why, fix=fix, code=reason)


def exit_code(error: CtlError | None) -> ExitCode:
    return ExitCode.OK if error is None else ExitCode(error.exit_code)


def load_plan(folder: RunFolder) -> Plan | None:
    """Return the plan of a local run folder, None if it was never copied here."""
    text = folder.path / "plan.json"
    if not text.is_file():
        return None
    plan: Plan = json.loads(text.read_bytes())
    return plan

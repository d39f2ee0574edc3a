"""The rehearsal: the whole extraction on a model cut from the real one, before a load that takes long.

Run as a module by the supervisor, or for `ctl rehearse`. The cut, a run folder and the samples lie below the real run
folder and are removed afterwards. Exit code 0: it went well, is remembered, or is not worth its minute; 1: it failed,
and the events say why.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from remote_payload.extract.cut import BadCheckpointError, CannotCutError, cut_checkpoint, dummy_checkpoint
from remote_payload.extract.rehearsal_cache import rehearsal_key, remember, remembered
from remote_payload.extract.settings import (
    CANARY,
    REHEARSAL,
    ConfigError,
    Job,
    load_job,
    read_model_facts,
    resolve_boundaries,
)
from remote_payload.host.files import fsync_folder, read_json, read_lines, write_json
from remote_payload.host.journal import EventWriter
from remote_payload.host.layout import RunPaths

AUTO_BYTES = 20_000_000_000
"""Weights from which on "auto" rehearses: less loads in about the minute that a rehearsal takes itself."""

SAMPLES = 8
TIMEOUT_S = 3600.0
"""Seconds for one of its processes: a first start may compile kernels for many minutes."""

NEVER_PROVEN = ["memory at full depth", "the tensors of the other layers"]
DUMMY_UNPROVEN = ["loader", "values", "boundary identity"]
PROVEN = ["engine arguments", "capture", "shapes", "sample format", "output folder"]


class RehearsalFailedError(Exception):
    """The extraction would not work. `fix` says what to do."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.why, self.fix = why, fix


class Rehearsal:
    """One rehearsal of a job."""

    def __init__(self, job: Job, plan: Mapping[str, Any], events: EventWriter) -> None:
        self._job, self._plan, self._events = job, plan, events
        self._scratch = os.path.join(job.paths.folder, "rehearsal")
        self._inner = RunPaths(os.path.join(self._scratch, "run"))

    def run(self) -> None:
        """Raises RehearsalFailedError, ConfigError, BadCheckpointError, OSError."""
        spec = self._job.spec
        mode = spec.get("rehearse", "auto")
        try:
            model = model_folder(spec["model"], spec["revision"])
        except RehearsalFailedError as error:
            if mode != "auto":
                raise
            self._notice("warn", "rehearsal-skipped", f"no rehearsal: {error} yet")
            return
        size = weight_bytes(model)
        if mode == "auto" and size < AUTO_BYTES:
            text = f"{size / 1e9:.1f} GB of weights load quickly: no rehearsal (from {AUTO_BYTES / 1e9:.0f} GB on)"
            self._notice("info", "rehearsal-skipped", text)
            return
        key = rehearsal_key(self._plan, model)
        known = None if mode == "fresh" else remembered(self._plan["host"]["workdir"], key)
        if known is not None:
            self._notice("info", "rehearsal-remembered", f"rehearsed in run {known['run_id']}: {_told(known)}")
            self._finish({**known, "remembered": True})
            return
        prove_writable(spec["output"])
        os.makedirs(self._inner.folder)
        started = time.monotonic()
        try:
            result = self._rehearse(model)
        finally:
            shutil.rmtree(self._scratch)
        result.update(run_id=self._job.run_id, seconds=round(time.monotonic() - started, 3), remembered=False)
        remember(self._plan["host"]["workdir"], key, result)
        self._notice("info", "rehearsed", _told(result))
        self._finish(result)

    def _rehearse(self, model: str) -> dict[str, Any]:
        small = os.path.join(self._scratch, "model")
        result: dict[str, Any] = {"weights": "cut", "not_proven": list(NEVER_PROVEN), "proven": list(PROVEN)}
        try:
            cut = cut_checkpoint(model, small)
            result.update(layers=cut.layers, copied_bytes=cut.copied, linked_bytes=cut.linked)
            result["proven"] += DUMMY_UNPROVEN
        except CannotCutError as error:
            shutil.rmtree(small, ignore_errors=True)
            result["not_proven"] += DUMMY_UNPROVEN
            try:
                result.update(weights="dummy", layers=dummy_checkpoint(model, small))
            except CannotCutError as worse:
                raise RehearsalFailedError(
                    f"no small model can be made of {model}", why=str(worse), fix='rehearse = "never"'
                ) from error
            text = f"{error}: rehearsed with dummy weights; {', '.join(DUMMY_UNPROVEN)} not proven"
            self._notice("warn", "rehearsal-dummy", text)
        write_json(self._inner.plan, self._inner_plan(small, dummy=result["weights"] == "dummy"))
        for module in ("engine", "summarize"):
            code = self._execute(module)
            if code != 0:
                raise self._failure(module, code)
        phases = self._phases()
        summary = read_json(self._inner.verify) or {}
        canary = read_json(os.path.join(self._inner.folder, CANARY)) or {}
        return {
            **result,
            "boundaries": summary.get("boundaries"),
            "capture_path": summary.get("capture_path"),
            "canary": canary.get("start"),
            "load_s": phases.get("load"),
            # The first steps compile kernels: minutes on a new GPU, which the real load then need not spend.
            "first_steps_s": phases.get("probe"),
        }

    def _inner_plan(self, model: str, *, dummy: bool) -> dict[str, Any]:
        """Return the same plan for the cut: few samples, boundaries that the cut has, a folder of its own."""
        spec, output = self._job.spec, os.path.join(self._scratch, "out")
        full = read_model_facts(spec)
        wanted = resolve_boundaries(spec["boundaries"], full.layers)
        small = read_model_facts({**spec, "model": model, "revision": None})
        few = min(spec["max_samples"] or SAMPLES, SAMPLES)
        engine = {**spec["engine"], **({"load_format": "dummy"} if dummy else {})}
        extract = {
            **spec, "model": model, "revision": None, "output": output, "engine": engine, "max_samples": few,
            "shard": [1, 1], "boundaries": cut_boundaries(wanted, full.layers, small.layers), "canary": True,
        }  # fmt: skip
        owned = {"path": output, "root": self._scratch, "stale": "fail", "adopt": False}
        return {**self._plan, "extract": extract, "job": {**self._plan["job"], "outputs": [owned]}}

    def _execute(self, module: str) -> int:
        """Run a module of the job on the scratch run folder; its output goes into the run's log."""
        print(f"ctl: rehearsal: {module}", flush=True)
        environment = {**os.environ, "CTL_RUN_DIR": self._inner.folder}
        argv = [sys.executable, "-m", f"remote_payload.extract.{module}"]
        return subprocess.run(argv, env=environment, timeout=TIMEOUT_S, check=False).returncode

    def _failure(self, module: str, code: int) -> RehearsalFailedError:
        """Pass on what the rehearsal's own processes reported, and return the error."""
        found = ""
        for event in self._inner_events():
            if event["type"] == "exception":
                where = f"rehearsal: {event['where']}"
                fields = {key: event[key] for key in ("rank", "exc_type", "message", "traceback")}
                self._events.emit("exception", **fields, where=where)
                found = found or f"{event['exc_type']}: {event['message']}"
            elif event["type"] == "problem":
                self._events.emit("problem", **{key: event[key] for key in ("code", "what", "why", "fix")})
                found = found or str(event["what"])
        for problem in (read_json(self._inner.verify) or {}).get("problems", []):
            self._events.emit("problem", **{key: problem.get(key, "") for key in ("code", "what", "why", "fix")})
            found = found or str(problem["what"])
        return RehearsalFailedError(
            f"the rehearsal's {module} ended with code {code}",
            why=found,
            fix="what failed on the cut model would have failed after the load of the real one",
        )

    def _inner_events(self) -> list[dict[str, Any]]:
        folder = self._inner.events
        names = os.listdir(folder) if os.path.isdir(folder) else []
        events = [event for name in names for event in read_lines(os.path.join(folder, name))]
        return sorted(events, key=lambda event: float(event.get("t") or 0.0))

    def _phases(self) -> dict[str, float]:
        done = (e for e in self._inner_events() if e["type"] == "phase" and e.get("status") == "done")
        return {event["name"]: event["seconds"] for event in done}

    def _finish(self, result: Mapping[str, Any]) -> None:
        write_json(os.path.join(self._job.paths.folder, REHEARSAL), result)
        if self._plan["job"]["kind"] == "rehearse":  # no verify step follows
            write_json(self._job.paths.verify, {"rehearsal": result})

    def _notice(self, level: str, code: str, text: str) -> None:
        self._events.emit("notice", level=level, code=code, text=text)
        print(f"ctl: {text}", flush=True)


def cut_boundaries(wanted: tuple[int, ...], layers: int, small: int) -> list[int]:
    """Return boundaries of a model of `small` layers that stand for the wanted ones: first, last and between."""
    ends = [0] if 0 in wanted else []
    between = list(range(1, small)) if any(0 < boundary < layers for boundary in wanted) else []
    return ends + between + ([small] if layers in wanted else [])


def prove_writable(output: str) -> None:
    """Write, rename and delete a file where the output folder is or will be. Raises RehearsalFailedError."""
    folder = output
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    path = os.path.join(folder, f".ctl-rehearsal-{os.getpid()}")
    try:
        with open(path, "xb") as file:
            file.write(b"\0" * 4096)
            os.fsync(file.fileno())
        os.rename(path, f"{path}.done")
        os.unlink(f"{path}.done")
        fsync_folder(folder)
    except OSError as error:
        for left in (path, f"{path}.done"):
            if os.path.exists(left):
                os.unlink(left)
        raise RehearsalFailedError(
            f"the output folder {output} cannot be written", why=str(error), fix=f"make {folder} writable"
        ) from error


def model_folder(model: str, revision: str | None) -> str:
    """Return where the model's files are; a name of the hub must be in its cache. Raises RehearsalFailedError."""
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise RehearsalFailedError(
            f"the model {model} is not on this host", why=str(error), fix="download it before the run"
        ) from error


def weight_bytes(model: str) -> int:
    names = os.listdir(model)
    return sum(os.path.getsize(os.path.join(model, n)) for n in names if n.endswith((".safetensors", ".bin", ".pt")))


def _told(result: Mapping[str, Any]) -> str:
    return (
        f"layers {list(result['layers'])} with {result['weights']} weights in {result['seconds']:.0f} s "
        f"(first steps {result['first_steps_s'] or 0:.0f} s); not proven: {', '.join(result['not_proven'])}"
    )


def main() -> int:
    """Rehearse the job named by CTL_RUN_DIR; return the exit code."""
    job = load_job(os.environ)
    plan = read_json(job.paths.plan)
    assert plan is not None
    events = EventWriter(job.paths.events, "rehearse", job.run_id, job.host)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the scratch folder goes
    try:
        Rehearsal(job, plan, events).run()
    except (RehearsalFailedError, ConfigError, BadCheckpointError, subprocess.TimeoutExpired) as error:
        why, fix = getattr(error, "why", ""), getattr(error, "fix", "")
        events.emit("problem", code="rehearsal-failed", what=str(error), why=why, fix=fix)
        print(f"ctl: rehearsal: {error}" + (f": {why}" if why else ""), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

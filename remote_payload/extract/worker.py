"""The vLLM worker that captures. vLLM gets it by qualified name, so it must import in spawned processes.

How a state is captured, decided once, before the first sample:

- At load, a class without native states gets hooks and plain calls at once, also for vLLM's memory measurement.
- Otherwise it is asked for native states, compiled if the engine compiles, and the driver runs probe prompts twice:
  native, and eager with hooks. `ctl_use` then names the boundaries that every rank proved.
- What is not proved comes from hooks. Hooks need eager execution: an eager engine mixes both, a compiled one is
  switched to plain calls as a whole (`Eager`), which costs no reload.

The state after the final norm is what the runner itself holds, on either path.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

from remote_payload.extract import expert_map, identity, rotary, versions
from remote_payload.extract.canary_rank import REFERENCE, Answers, CanaryRank, Head, final_norm
from remote_payload.extract.collect import Collector, Request, Step, row_offsets
from remote_payload.extract.dataset import writing_rank
from remote_payload.extract.errors import CaptureError, ExceptionReporter
from remote_payload.extract.formats import RECORD_ID, format_named
from remote_payload.extract.hooks import Eager, LayerHooks, decoder_layers
from remote_payload.extract.native import NativeStates, Probe, prove
from remote_payload.extract.output import output_ledger
from remote_payload.extract.pool import DEFAULT_BUFFER_BYTES
from remote_payload.extract.settings import CONFIG_KEY, CaptureSettings, load_job
from remote_payload.extract.store import Buffer, SampleStore
from remote_payload.host.journal import EventWriter, Journal
from remote_payload.host.layers import layer_ids
from remote_payload.host.titles import TITLE, TITLE_ENV

Base: Any = versions.worker_class(current_platform.is_cpu())

TORCH_NAMES = {"fp8": "float8_e4m3fn"}

CONVENTION = (
    "boundary b = decoder layers completed: 0 = embeddings, num_layers = after the last, before the final norm"
)


class CaptureWorker(Base):
    """One tensor-parallel rank. It writes the samples that `writing_rank` gives it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        named = inspect.signature(Base.__init__).bind(self, *args, **kwargs).arguments
        self._job = load_job(os.environ)
        number, count = self._job.spec["shard"]
        self._shard = number, count
        rank = int(named["rank"])
        self._events = EventWriter(self._job.paths.events, f"rank-{rank}", self._job.run_id, self._job.host)
        self._reporter = ExceptionReporter(self._events, rank)
        try:
            versions.require(Base, versions.WORKER_METHODS, f"the worker class {Base.__name__}")
            super().__init__(*args, **kwargs)
            versions.require_worker(self)
            self._settings = CaptureSettings.from_dict(self.vllm_config.additional_config[CONFIG_KEY])
        except Exception as error:
            self._reporter.report(error, "__init__")
            raise
        self._collector = Collector()
        self._native: NativeStates | None = None
        self._native_places: dict[int, int] = {}
        self._probing: str | None = None
        self._restarted = 0
        self._probe = Probe()
        self._identity: dict[str, str] = {}
        self._canary = CanaryRank(self._settings)
        self._repairs: list[str] = []
        self._step_checked = self._output_checked = False

    def init_device(self) -> None:
        super().init_device()
        versions.require(self, versions.WORKER_DEVICE, f"the worker class {Base.__name__}")
        if not current_platform.is_cpu():
            return
        if rotary.repair():
            self._repaired("cpu-rotary", "this vLLM's CPU rotary kernel rotates MLA queries wrongly")
        if self.parallel_config.enable_expert_parallel and expert_map.repair():
            self._repaired("cpu-expert-map", "this vLLM's CPU kernel does not know which experts a rank holds")

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # The title is set by now; with the run in it vLLM would find nothing that an earlier run compiled.
        os.environ[TITLE_ENV] = TITLE
        super().load_model(*args, **kwargs)
        versions.require(self.model_runner, versions.RUNNER, f"the runner {type(self.model_runner).__name__}")
        settings, self._model = self._settings, self.model_runner.get_model()
        versions.require_loaded(self, self._model)
        self._eager = Eager(self._model)
        hidden = self.model_config.get_hidden_size()
        self._layers = layers = decoder_layers(self._model, settings.layers)
        hooked = set(settings.boundaries) - ({settings.layers} if settings.final_norm else set())
        self._hooks = LayerHooks(layers, sorted(hooked), hidden)
        near = {b + d for b in hooked for d in (-1, 0, 1) if 0 < b + d <= settings.layers} | hooked
        near.add(settings.layers)  # for the final norm: what it was given
        self._probe_hooks = LayerHooks(layers, sorted(near), hidden)
        wanted = hooked - {0}
        if settings.capture != "hooks" and wanted and NativeStates.supported(self.model_runner, self._model):
            self._native = NativeStates(self.model_runner, self._model, layers, wanted)
            self._native.enable()
        elif settings.capture == "native":
            raise CaptureError(f"{type(self._model).__name__} of vLLM {vllm.__version__} has no native hidden states")
        else:
            self._use_hooks()
        self._store = self._make_store(hidden)

    def determine_available_memory(self) -> int:
        with self._hooks.rehearsing():
            return int(super().determine_available_memory())

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._store.check()
        if not self._step_checked:
            versions.require_step(scheduler_output)
            self._step_checked = bool(scheduler_output.scheduled_new_reqs)
        try:
            step = self._collector.begin(scheduler_output)
        except CaptureError as error:
            if not self._canary.recording:
                raise
            self._canary.fail(error)
            step = Step()
        self._restarted += len(step.restarted)
        for request in step.restarted:
            self._canary.restart(request.index)
            if request.sink is not None:
                self._store.discard(request.sink)
                request.sink = None
        if not step.segments:
            return super().execute_model(scheduler_output, *args, **kwargs)
        reference = self._canary.recording == REFERENCE
        hooks = self._probe_hooks if reference or self._probing == "hooks" else self._hooks
        with hooks.recording() as recorded:
            output = super().execute_model(scheduler_output, *args, **kwargs)
        rows = scheduler_output.total_num_scheduled_tokens
        if not self._output_checked:
            versions.require_executed(self.model_runner)
            self._output_checked = True
        offsets = row_offsets(versions.batch_of(self.model_runner).req_ids, scheduler_output.num_scheduled_tokens)
        if reference:
            self._canary.keep_reference(step, offsets, recorded)
        elif self._canary.recording:
            self._canary.keep(step, offsets, lambda: self._states(recorded, rows))
        elif self._probing:
            self._keep_probes(step, offsets, self._probe_states(recorded))
        else:
            self._keep_samples(step, offsets, self._states(recorded, rows))
        return output

    # ------------------------------------------------------------- called by the driver, by name

    def ctl_facts(self) -> dict[str, Any]:
        self._identity = identity.resolved(self.vllm_config, self.model_runner, self._model)
        return {
            "rank": self.rank, "pid": os.getpid(), "native": self._native is not None,
            "compiled": not self._eager.always, "identity": self._identity, "repairs": self._repairs,
            "row_bytes": self._store.row_bytes,
        }  # fmt: skip

    def ctl_probe(self, kind: str) -> None:
        """Treat the next requests as probe prompts, `kind` "native" or "hooks"."""
        self._probing = kind
        self._eager.set(kind == "hooks" or self._native is None)
        if kind == "hooks":
            self._hooks.remove()
            self._probe_hooks.install()

    def ctl_proof(self) -> dict[str, Any]:
        """End the probe and return what it showed; norms let the driver compare ranks.

        Raises CaptureError if the hooks did not see a boundary.
        """
        self._probe_hooks.remove()
        self._probing = None
        hooked, native = self._probe.states("hooks"), self._probe.states("native")
        self._probe = Probe()
        missing = [b for b in self._probe_hooks.boundaries if b not in hooked]
        if missing:
            raise CaptureError(
                f"the hooks saw no state at boundaries {missing}: the layers are not called as modules"
            )
        answer: dict[str, Any] = {"rank": self.rank, "proved": [], "errors": [], "returned": len(native)}
        answer["norms"] = [[b, float(hooked[b].float().norm())] for b in self._hooks.boundaries]
        if self._native is not None:
            states = [native[place] for place in sorted(native)]
            self._proof = prove(states, {b: s for b, s in hooked.items() if b}, self._native.boundaries)
            answer["proved"] = sorted(self._proof.positions)
            answer["errors"] = sorted(self._proof.errors.items())
        return answer

    def ctl_use(self, native: Sequence[int]) -> str:
        """Take these boundaries natively, the others from hooks; return "native", "hooks" or "native+hooks"."""
        self._native_places = {b: self._proof.positions[b] for b in native} if native else {}
        from_hooks = [b for b in self._hooks.boundaries if b not in self._native_places]
        if not self._native_places or (from_hooks and not self._eager.always):
            self._use_hooks()
        elif from_hooks:
            self._hooks.install()
            self._path = "native+hooks"
        else:
            self._eager.set(False)
            self._path = "native"
        return self._path

    def ctl_canary_begin(self, name: str) -> None:
        """Treat the next requests as canary prompts of pass `name`; the reference pass runs eagerly with hooks."""
        if name == REFERENCE:
            self._hooks.remove()
            self._eager.set(True)
            self._probe_hooks.install()
        self._canary.begin(name)

    def ctl_canary_end(self) -> list[int]:
        """End the pass and return the prompts that took several steps."""
        if self._canary.recording == REFERENCE:
            self._probe_hooks.remove()
            self._eager.set(self._path != "native")
            if self._path != "native":
                self._hooks.install()
        return self._canary.cut()

    def ctl_canary_judge(
        self, prompts: Sequence[Sequence[int]], reference_prompts: int, values: bool
    ) -> dict[str, Any]:
        cause = rotary.CAUSE if current_platform.is_cpu() and rotary.broken() else ""
        report = self._canary.judge(
            prompts, reference_prompts=reference_prompts, values=values, batch_cause=cause, device=self.device
        )
        return report.to_dict()

    @torch.inference_mode()
    def ctl_canary_tokens(self, prompts: Sequence[Sequence[int]], answers: dict[str, Answers]) -> dict[str, Any]:
        """Lead the final state to tokens; a collective operation."""
        head = Head(self._model, final_norm(self._layers, self._model))
        return self._canary.lead_to_tokens(prompts, answers, head, self.device).to_dict()

    def ctl_canary_forget(self) -> None:
        self._canary.forget()

    def ctl_status(self) -> dict[str, Any]:
        """Return `SampleStore.status`, and the rank. Raises the error of a failed write; never waits."""
        return {"rank": self.rank, **self._store.status()}

    def ctl_drain(self) -> dict[str, Any]:
        """Return when every sample is on disk and in the ledger. Raises the error of a failed write.

        "restarted": how often a preempted prompt was captured anew; "buffer_peak": bytes.
        """
        self._store.drain()
        return {"rank": self.rank, "restarted": self._restarted, "buffer_peak": self._store.pool.peak}

    # ---------------------------------------------------------------------------------- inside

    def _use_hooks(self) -> None:
        if self._native is not None:
            self._native.disable()
            self._native, self._native_places = None, {}
        self._eager.set(True)
        self._hooks.install()
        self._path = "hooks"

    def _repaired(self, code: str, what: str) -> None:
        self._repairs.append(code)
        if self.rank == 0:
            self._events.emit("notice", level="warn", code=code, text=f"{what}; a corrected call is in its place")

    def _states(self, recorded: dict[int, torch.Tensor], rows: int) -> list[torch.Tensor]:
        states = dict(recorded)
        if self._native is not None:
            given = self._native.take()
            states.update((b, given[place]) for b, place in self._native_places.items() if place < len(given))
        if self._settings.final_norm:
            states[self._settings.layers] = self.model_runner.execute_model_state.hidden_states
        missing = [b for b in self._settings.boundaries if b not in states]
        if missing:
            raise CaptureError(f"the engine gave no state at boundaries {missing} in this step")
        ordered = [states[b] for b in self._settings.boundaries]
        short = [b for b, state in zip(self._settings.boundaries, ordered, strict=True) if state.shape[0] < rows]
        if short:
            raise CaptureError(f"the states at boundaries {short} have fewer rows than the step's {rows:,} tokens")
        return ordered

    def _probe_states(self, recorded: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self._probing == "native" and self._native is not None:
            return dict(enumerate(self._native.take()))
        return recorded

    def _keep_probes(self, step: Step, offsets: dict[str, int], states: dict[int, torch.Tensor]) -> None:
        assert self._probing is not None
        for part in step.segments:
            row = offsets[part.request.request_id]
            for key, state in states.items():
                self._probe.add(self._probing, key, part.request.index, part.start, state[row : row + part.count])

    def _keep_samples(self, step: Step, offsets: dict[str, int], states: list[torch.Tensor]) -> None:
        mine = [part for part in step.segments if self._is_mine(part.request) and not part.request.dropped]
        for part in mine:
            request = part.request
            if request.sink is None:
                request.sink = self._store.open(
                    request.index, request.token_ids, request.loss_spans, request.record_id
                )
                request.dropped = request.sink is None
        mine = [part for part in mine if part.request.sink is not None]
        if not mine:
            return
        spans = [(offsets[part.request.request_id], part.count) for part in mine]
        block = self._store.block(states, spans)
        deferred = self._store.copy(block, [(part.request.sink, part.start, part.count) for part in mine])
        for part in mine:
            part.request.dropped = part.request.sink in deferred
            if part.request.complete and not part.request.dropped:
                self._store.finish(part.request.sink)
            if part.request.complete or part.request.dropped:
                part.request.sink = None

    def _is_mine(self, request: Request) -> bool:
        return not request.probe and self.rank == writing_rank(
            request.index, self._shard, self.parallel_config.tensor_parallel_size
        )

    def _make_store(self, hidden: int) -> SampleStore:
        spec, name = self._job.spec, self._settings.store_dtype
        self._form = format_named(spec["format"])
        self._layer_ids = layer_ids(self._settings.boundaries, self._form.convention)
        return SampleStore(
            output=spec["output"],
            form=self._form,
            boundaries=self._settings.boundaries,
            hidden=hidden,
            dtype=self.model_config.dtype if name == "auto" else getattr(torch, TORCH_NAMES.get(name, name)),
            device=self.device,
            # The output's own ledger first: a line in the run's ledger promises that a later run finds the file.
            ledgers=[
                Journal(output_ledger(spec["output"], self._job.run_id, self.rank)),
                Journal(os.path.join(self._job.paths.ledger, f"rank-{self.rank}.jsonl")),
            ],
            metadata=self._metadata,
            buffer_bytes=spec.get("buffer_bytes") or DEFAULT_BUFFER_BYTES,
        )

    def _metadata(self, buffer: Buffer, states: list[dict[str, Any]], digest: str) -> dict[str, str]:
        spec, settings = self._job.spec, self._settings
        described = {
            "format": spec["format"], "index": str(buffer.index), "boundaries": json.dumps(settings.boundaries),
            "boundary_convention": CONVENTION, "num_layers": str(settings.layers),
            "final_norm": json.dumps(settings.final_norm), "model": spec["model"],
            "revision": spec["revision"] or "", "vllm_version": vllm.__version__, "run_id": self._job.run_id,
            "token_sha256": digest, "capture_path": self._path, "states": json.dumps(states),
            "layer_ids": json.dumps(self._layer_ids), "layer_convention": self._form.convention,
            "engine_key": identity.engine_key(spec), **self._identity,
        }  # fmt: skip
        if buffer.loss_spans is not None:
            described["loss_spans"] = json.dumps(buffer.loss_spans)
        if buffer.record_id is not None:
            described[RECORD_ID] = buffer.record_id
        return described


def _reporting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: CaptureWorker, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._reporter.report(error, name)
            raise

    return wrapper


# Every public method, whatever this version of vLLM calls them: an error in any of them must reach the events.
for _name in dir(CaptureWorker):
    _method = inspect.getattr_static(CaptureWorker, _name)
    if not _name.startswith("_") and inspect.isfunction(_method):
        setattr(CaptureWorker, _name, _reporting(_name, _method))

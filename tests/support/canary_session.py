"""One engine, many canaries: each with a fault put into the worker between the engine and the captured rows.

Run as a program with the run folder in CTL_RUN_DIR. Engine and worker live in this process, so that a fault can be
put in and taken out again. Writes RUN/session.json: name of the fault -> the problems that the canary found.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from remote_payload.extract.canary_rank import final_norm
from remote_payload.extract.canary_run import Canary, CanaryError, choose_prompts
from remote_payload.extract.engine import Extraction
from remote_payload.extract.hooks import LayerHooks
from remote_payload.extract.progress import PatientEvents
from remote_payload.extract.settings import capture_settings, engine_arguments, load_job, read_model_facts
from remote_payload.host.journal import EventWriter

QUICK = 12
"""Prompts with a fault: enough for every check, and a third of the time."""


class Engine:
    """A loaded engine with its prefix cache on; requests bypass the cache unless `bypass` is off."""

    def __init__(self) -> None:
        job = load_job(os.environ)
        facts = read_model_facts(job.spec)
        settings = capture_settings(job.spec, facts)
        events = PatientEvents(EventWriter(job.paths.events, "driver", job.run_id, job.host))
        extraction = Extraction(job, events)
        samples = extraction._read(facts).samples
        arguments = {**engine_arguments(job, settings, facts), "enable_prefix_caching": True}
        self.llm = extraction._load({**arguments, "distributed_executor_backend": "uni"})
        extraction._choose_path(self.llm, settings, samples)
        self.bypass, self.folder = True, job.paths.folder
        self.worker: Any = None
        self.llm.collective_rpc(self._catch)
        longest = job.spec["max_seq_len"]
        prompts = choose_prompts(samples, longest=longest, vocabulary=facts.vocabulary)
        budget = job.spec["engine"]["max_num_batched_tokens"]
        self.whole, self.quick = (
            Canary(self.llm, self._generate, chosen, budget=budget, longest=longest)
            for chosen in (prompts, prompts[-QUICK:])
        )

    def _catch(self, wrapper: Any) -> None:
        self.worker = getattr(wrapper, "worker", wrapper)

    def _generate(self, prompts: list[list[int]], extra: list[dict[str, Any]]) -> list[tuple[int, float]]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, extra_args=keys, logprobs=1,
                skip_reading_prefix_cache=self.bypass,
            )
            for keys in extra
        ]  # fmt: skip
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return [(out.token_ids[0], out.logprobs[0][out.token_ids[0]].logprob) for out in answers]

    def norm(self, state: Any) -> Any:
        worker = self.worker
        return final_norm(worker._layers, worker._model)(state.clone())

    @contextmanager
    def states(self, change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
        """Change what the worker takes for the rows of a step."""
        original = self.worker._states
        self.worker._states = lambda recorded, rows: change(original(recorded, rows))
        try:
            yield
        finally:
            del self.worker._states

    @contextmanager
    def final_norm(self) -> Iterator[None]:
        """Ask for the final state behind the norm, as `final_norm = true` does."""
        worker, settings = self.worker, self.worker._settings
        worker._settings = worker._canary._settings = dataclasses.replace(settings, final_norm=True)
        try:
            yield
        finally:
            worker._settings = worker._canary._settings = settings


# ------------------------------------------------------------------------------------------ faults


@contextmanager
def healthy(engine: Engine) -> Iterator[None]:
    yield


@contextmanager
def healthy_final_norm(engine: Engine) -> Iterator[None]:
    with engine.final_norm():
        yield


@contextmanager
def shifted_boundary(engine: Engine) -> Iterator[None]:
    """Every state is its predecessor's, as where ids of layer outputs are taken for boundaries."""
    worker = engine.worker
    original, hooks = worker._states, worker._hooks
    hooks.remove()
    worker._hooks = LayerHooks(worker._layers, [b - 1 for b in hooks.boundaries], hooks.hidden)
    worker._hooks.install()
    worker._states = lambda recorded, rows: original({b + 1: state for b, state in recorded.items()}, rows)
    try:
        yield
    finally:
        worker._hooks.remove()
        worker._hooks = hooks
        hooks.install()
        del worker._states


@contextmanager
def doubled_norm(engine: Engine) -> Iterator[None]:
    with engine.final_norm(), engine.states(lambda states: [*states[:-1], engine.norm(states[-1])]):
        yield


@contextmanager
def norm_where_none_belongs(engine: Engine) -> Iterator[None]:
    with engine.states(lambda states: [*states[:-1], engine.norm(states[-1])]):
        yield


@contextmanager
def missing_norm(engine: Engine) -> Iterator[None]:
    worker = engine.worker
    worker._states = lambda recorded, rows: [recorded[b] for b in worker._settings.boundaries]
    try:
        with engine.final_norm():
            yield
    finally:
        del worker._states


@contextmanager
def dropped_final_state(engine: Engine) -> Iterator[None]:
    with engine.states(lambda states: states[:-1]):
        yield


@contextmanager
def swapped_states(engine: Engine) -> Iterator[None]:
    with engine.states(lambda states: [states[1], states[0], *states[2:]]):
        yield


@contextmanager
def rows_of_another_request(engine: Engine) -> Iterator[None]:
    """As request ids sorted as text: _10 before _2."""
    from remote_payload.extract import worker

    original = worker.row_offsets
    worker.row_offsets = lambda ids, counts: original(sorted(ids)[::-1], counts)
    try:
        yield
    finally:
        worker.row_offsets = original


@contextmanager
def chunks_out_of_order(engine: Engine) -> Iterator[None]:
    """What came first in a cut prompt is stored last."""
    collector = engine.worker._collector
    original = collector.begin

    def begin(scheduled: Any) -> Any:
        step = original(scheduled)
        step.segments = [
            dataclasses.replace(part, start=len(part.request.token_ids) - part.start - part.count)
            for part in step.segments
        ]
        return step

    collector.begin = begin
    try:
        yield
    finally:
        del collector.begin


@contextmanager
def zero_states(engine: Engine) -> Iterator[None]:
    with engine.states(lambda states: [*states[:2], states[2] * 0, *states[3:]]):
        yield


@contextmanager
def nan_in_one_row(engine: Engine) -> Iterator[None]:
    def spoil(states: list[Any]) -> list[Any]:
        spoiled = states[1].clone()
        spoiled[0, 5] = float("nan")
        return [states[0], spoiled, *states[2:]]

    with engine.states(spoil):
        yield


@contextmanager
def prefix_cache_left_on(engine: Engine) -> Iterator[None]:
    engine.bypass = False
    try:
        yield
    finally:
        engine.bypass = True


SEEDED = (
    healthy, healthy_final_norm, shifted_boundary, doubled_norm, norm_where_none_belongs, missing_norm,
    dropped_final_state, swapped_states, rows_of_another_request, chunks_out_of_order, zero_states, nan_in_one_row,
    prefix_cache_left_on,
)  # fmt: skip


def main() -> int:
    engine = Engine()
    found: dict[str, Any] = {}
    for fault in SEEDED:
        with fault(engine):
            try:
                canary = engine.whole if fault in (healthy, healthy_final_norm) else engine.quick
                found[fault.__name__] = {"figures": canary.run("start", values=True), "problems": []}
            except CanaryError as error:
                found[fault.__name__] = {"problems": error.problems()}
    with open(os.path.join(engine.folder, "session.json"), "w", encoding="utf-8") as file:
        json.dump(found, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A stand-in for vLLM in one process: scheduler, worker and model, seeded by CTL_STUB (JSON).

It schedules in chunks, interleaves prompts, preempts and resumes them at random, so that the real capture worker,
store and driver run as they do under vLLM, in milliseconds. States depend on token and position alone.
CTL_STUB: {"seed", "budget" (tokens a step), "chunk" (tokens a request and step), "seqs", "preempt" (probability a
step), "load_s" and "step_s" (seconds that the load and each step take), "kv_cache_dtype" and "quantization" (what the
engine says of itself)}.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams

__version__ = "0.0.stub"
__all__ = ["LLM", "SamplingParams"]

STEP_LIMIT_S = 20.0
"""The stub's own time-out: a worker that blocks longer in a step is an error, as in vLLM."""


class LLM:
    def __init__(self, **arguments: Any) -> None:
        import torch

        from remote_payload.extract.worker import CaptureWorker
        from vllm.v1.worker.cpu_worker import HIDDEN

        plan = {
            "seed": 0, "budget": 64, "chunk": 64, "seqs": 8, "preempt": 0.0, "load_s": 0.0, "step_s": 0.0,
            "kv_cache_dtype": "auto", "quantization": None,
        }  # fmt: skip
        self._options = SimpleNamespace(**{**plan, **json.loads(os.environ.get("CTL_STUB", "{}"))})
        config = SimpleNamespace(
            arguments=arguments,
            additional_config=arguments["additional_config"],
            model_config=SimpleNamespace(
                get_hidden_size=lambda: HIDDEN,
                dtype=torch.float32,
                enforce_eager=True,
                quantization=self._options.quantization,
            ),
            cache_config=SimpleNamespace(cache_dtype=self._options.kv_cache_dtype),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, enable_expert_parallel=False),
        )
        self._worker = CaptureWorker(
            vllm_config=config, local_rank=0, rank=0, distributed_init_method="", is_driver_worker=True
        )
        self._worker.init_device()
        time.sleep(self._options.load_s)
        self._worker.load_model()
        self.llm_engine = Engine(self._worker, self._options)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self._worker, method)(*args)]

    def generate(self, prompts: list[Any], parameters: list[Any], use_tqdm: bool = True) -> list[Any]:
        """Return no output: the canary, which alone needs one, is off wherever this stands in for vLLM."""
        for number, (prompt, extra) in enumerate(zip(prompts, parameters, strict=True)):
            self.llm_engine.add_request(f"g{number}", prompt, extra)
        while self.llm_engine.has_unfinished_requests():
            self.llm_engine.step()
        return []


class Request:
    def __init__(self, request_id: str, prompt: list[int], parameters: Any) -> None:
        self.req_id, self.prompt_token_ids, self.sampling_params = request_id, prompt, parameters
        self.num_computed_tokens = 0
        self.announced = False


class Engine:
    def __init__(self, worker: Any, options: Any) -> None:
        self._worker, self._options = worker, options
        self._random = random.Random(options.seed)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._finished: list[str] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], parameters: Any) -> None:
        self._waiting.append(Request(request_id, list(prompt["prompt_token_ids"]), parameters))

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> None:
        if not self.has_unfinished_requests():
            return
        preempted = set()
        if len(self._running) > 1 and self._random.random() < self._options.preempt:
            victim = self._running.pop(self._random.randrange(1, len(self._running)))
            victim.num_computed_tokens = 0
            self._waiting.appendleft(victim)
            preempted.add(victim.req_id)
        while self._waiting and len(self._running) < self._options.seqs:
            if preempted and self._waiting[0].req_id in preempted:
                break
            self._running.append(self._waiting.popleft())
        counts, new, cached, left = {}, [], [], self._options.budget
        for request in self._running:
            rest = len(request.prompt_token_ids) - request.num_computed_tokens
            count = min(rest, left, self._random.randint(1, self._options.chunk))
            if count <= 0:
                continue
            counts[request.req_id] = count
            left -= count
            (cached if request.announced else new).append(request)
            request.announced = True
        output = SimpleNamespace(
            finished_req_ids=set(self._finished),
            preempted_req_ids=preempted,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r.req_id, prompt_token_ids=r.prompt_token_ids, sampling_params=r.sampling_params,
                    num_computed_tokens=r.num_computed_tokens,
                )
                for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.req_id for r in cached], num_computed_tokens=[r.num_computed_tokens for r in cached]
            ),
        )  # fmt: skip
        self._finished = []
        # The runner's batch has its own order, which is not that of arrival.
        order = self._random.sample(list(counts), len(counts))
        known = {r.req_id: r for r in self._running}
        self._worker.model_runner.input_batch = SimpleNamespace(req_ids=order)
        self._worker.rows = [
            (known[name].prompt_token_ids[position], position)
            for name in order
            for position in range(known[name].num_computed_tokens, known[name].num_computed_tokens + counts[name])
        ]
        started = time.monotonic()
        self._worker.execute_model(output)
        if time.monotonic() - started > STEP_LIMIT_S:
            raise TimeoutError("RPC call to execute_model timed out")
        if self._options.step_s:
            time.sleep(self._options.step_s)
        for name, count in counts.items():
            request = known[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens == len(request.prompt_token_ids):
                self._running.remove(request)
                self._finished.append(name)

"""Samples as vLLM's requests, one token generated each: the engine that `admission` feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remote_payload.extract import versions
from remote_payload.extract.collect import INDEX_KEY, RECORD_KEY, SPANS_KEY
from remote_payload.extract.dataset import Sample


class VllmEngine:
    """`admission.Engine` over a vllm.LLM. Raises CaptureError if this vLLM lacks what is needed of it."""

    def __init__(self, llm: Any) -> None:
        versions.require_llm(llm)
        self._llm, self._engine = llm, llm.llm_engine

    def add(self, request_id: str, sample: Sample) -> None:
        """Queue the prefill of a sample. `request_id` must not have been used before."""
        spans = sample.loss_spans()
        told = {INDEX_KEY: sample.index, SPANS_KEY: spans, RECORD_KEY: sample.record_id}
        extra = {key: value for key, value in told.items() if value is not None}
        self._engine.add_request(request_id, {"prompt_token_ids": sample.token_ids}, one_token(extra))

    def step(self) -> None:
        """Let the engine work until it reports something; at once if it has nothing to do."""
        self._engine.step()

    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def status(self) -> Sequence[dict[str, Any]]:
        """Return each rank's `ctl_status`. Raises what a writer raised."""
        return list(self._llm.collective_rpc("ctl_status"))


def one_token(extra: dict[str, Any], logprobs: int | None = None) -> Any:
    """Return sampling parameters for a prompt whose states alone matter; `extra` reaches the worker."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, extra_args=extra,
        logprobs=logprobs,
    )  # fmt: skip


def shut_down(llm: Any) -> None:
    """End the engine's processes, so that no writer is left at work; does nothing where vLLM offers no way."""
    core = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    end = getattr(core, "shutdown", None)
    if callable(end):
        end()


def generate(
    llm: Any, prompts: list[list[int]], extra: list[dict[str, Any]], logprobs: int | None = None
) -> list[Any]:
    """Return vLLM's outputs of prompts of token ids, `extra` the keys of each; one token is asked of each.

    `logprobs`: of how many tokens the log probability is asked.
    """
    parameters = [one_token(keys, logprobs) for keys in extra]
    return list(llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False))

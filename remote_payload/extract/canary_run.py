"""The canary as the driver runs it: a few prompts of the real data, several times through the loaded engine.

The passes use the very path that captures the samples, so they cost a load nothing and prove what will be written.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from remote_payload.extract.canary import Finding, folded
from remote_payload.extract.canary_rank import BATCH, CHUNKED, REFERENCE, SINGLE
from remote_payload.extract.collect import PROBE_KEY
from remote_payload.extract.dataset import Sample
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.progress import PatientEvents
from remote_payload.extract.settings import CANARY, Job, ModelFacts
from remote_payload.host.files import write_json

PROMPTS = 32
"""Enough for "31 of 32" to mean something, few enough to take seconds."""

TOKENS = 48
"""Of a short prompt: whole in one step even where steps are small."""

LONG_TOKENS = 288
"""Of one prompt: longer than two cache blocks of any backend, so that a prefix cache that is on shows itself."""

REFERENCE_PROMPTS = 8
"""Prompts that are also run with hooks at all neighbouring boundaries: their rows are three times as many."""

SEED = 0

Generate = Callable[[list[list[int]], list[dict[str, Any]]], list[tuple[int, float]]]
"""Runs prompts with their extra arguments through the engine; returns each one's greedy token and log probability."""


class CanaryError(CaptureError):
    """The canary failed: what would be written is not what it says. `findings` holds at least one entry."""

    def __init__(self, findings: Sequence[Finding], when: str) -> None:
        first = findings[0]
        cause = f" Known cause that fits: {first.cause}." if first.cause else ""
        super().__init__(f"the canary at the {when} failed: {first.what}.{cause}")
        self.findings = list(findings)

    def problems(self) -> list[dict[str, str]]:
        return [finding.problem() for finding in self.findings]


def choose_prompts(samples: Iterable[Sample], *, longest: int, vocabulary: int | None) -> list[list[int]]:
    """Return PROMPTS different prompts from the beginning of the data; the last one is long.

    `longest` bounds their tokens. Where the data is too small, its own tokens are shuffled (seeded) into more.
    """
    short = max(1, min(TOKENS, longest))
    taken = [sample.token_ids for sample, _ in zip(samples, range(PROMPTS), strict=False)]
    pool = [token for ids in taken for token in ids] or list(range(min(vocabulary or TOKENS, TOKENS)))
    generator = random.Random(SEED)  # noqa: S311 - not a secret
    prompts: list[list[int]] = []
    for ids in taken:
        if len(ids) >= short // 2 and ids[:short] not in prompts:
            prompts.append(ids[:short])
    prompts = prompts[: PROMPTS - 1]
    while len(prompts) < PROMPTS - 1:
        prompts.append([generator.choice(pool) for _ in range(short - len(prompts) % max(1, short // 4))])
    length = min(LONG_TOKENS, longest)
    prompts.append([generator.choice(pool) for _ in range(length)])
    return prompts


class Canary:
    """Runs the passes and asks every rank for its judgement. `run` may be called again, at the end."""

    def __init__(self, llm: Any, generate: Generate, prompts: list[list[int]], *, budget: int, longest: int) -> None:
        """`budget`: tokens of a step (max_num_batched_tokens); `longest`: tokens of the longest prompt allowed."""
        self._llm, self._generate, self._prompts = llm, generate, prompts
        self._budget, self._longest = budget, longest

    def run(self, when: str, *, values: bool) -> dict[str, Any]:
        """Return the figures for the summary, `when` "start" or "end". Raises CanaryError.

        `values` False (dummy weights) counts states, looks for NaN and zeros, and compares the passes' rows.
        """
        started, answers = time.monotonic(), {}
        numbers = range(len(self._prompts))
        self._begin(SINGLE)
        answers[SINGLE] = [self._ask([number])[0] for number in numbers]
        self._end()
        self._begin(BATCH)
        answers[BATCH] = self._ask(numbers)
        cut = self._end()
        notes = [] if cut or self._cut_prompts() else ["no prompt could be cut: chunked prefill is not exercised"]
        if values:
            self._begin(REFERENCE)
            self._ask(numbers[:REFERENCE_PROMPTS])
            self._end()
        reports = self._llm.collective_rpc("ctl_canary_judge", args=(self._prompts, REFERENCE_PROMPTS, values))
        if all(report["sound"] for report in reports):
            packed = {name: list(map(list, zip(*pairs, strict=True))) for name, pairs in answers.items()}
            led = self._llm.collective_rpc("ctl_canary_tokens", args=(self._prompts, packed))
            for report, more in zip(reports, led, strict=True):
                for key in ("findings", "notes"):
                    report[key] += more[key]
                report["figures"].update(more["figures"])
        self._llm.collective_rpc("ctl_canary_forget")
        findings = [Finding(**finding) for report in reports for finding in report["findings"]]
        if findings:
            raise CanaryError(folded(list(dict.fromkeys(findings))), when)
        return {
            "prompts": len(self._prompts),
            "tokens": sum(map(len, self._prompts)),
            "seconds": round(time.monotonic() - started, 3),
            "figures": reports[0]["figures"],
            "notes": sorted({note for report in reports for note in report["notes"]} | set(notes)),
        }

    def _cut_prompts(self) -> bool:
        """Run the batch behind so much else that a step ends within it; return whether one did.

        Full steps end in the middle of the batch whatever is scheduled first; where a step is short of requests
        rather than of tokens, long fillers that nearly fill it leave room for half a prompt.
        """
        half = sum(map(len, self._prompts)) // 2
        for fill in ((self._budget - half) % self._budget, self._budget - TOKENS // 2):
            lengths = [self._longest] * (fill // self._longest) + [fill % self._longest]
            fillers = [[self._prompts[-1][0]] * length for length in lengths if length > 0]
            self._begin(CHUNKED)
            extra: list[dict[str, Any]] = [{} for _ in fillers]
            numbered = [{PROBE_KEY: number} for number in range(len(self._prompts))]
            self._generate(fillers + self._prompts, extra + numbered)
            if self._end():
                return True
        return False

    def _ask(self, numbers: Sequence[int]) -> list[tuple[int, float]]:
        return self._generate([self._prompts[n] for n in numbers], [{PROBE_KEY: n} for n in numbers])

    def _begin(self, name: str) -> None:
        self._llm.collective_rpc("ctl_canary_begin", args=(name,))

    def _end(self) -> list[int]:
        """Return the short prompts that were cut; the long one may have to be, in every pass alike."""
        cut: list[int] = self._llm.collective_rpc("ctl_canary_end")[0]
        return [number for number in cut if number < len(self._prompts) - 1]


class CanaryGuard:
    """Runs the canary at the start and at the end of a job, and writes RUN/canary.json for the summary."""

    def __init__(
        self,
        llm: Any,
        generate: Generate,
        job: Job,
        facts: ModelFacts,
        samples: Iterable[Sample],
        events: PatientEvents,
    ) -> None:
        """Raises CaptureError if this vLLM does not tell the size of its steps."""
        self._path, self._events = os.path.join(job.paths.folder, CANARY), events
        self._values = job.spec["engine"].get("load_format") != "dummy"
        self._record: dict[str, Any] = {"enabled": bool(job.spec.get("canary", True))}
        if not self._record["enabled"]:
            text = "the canary is switched off: nothing proves that the states are those of the model"
            events.emit("notice", level="warn", code="canary-off", text=text)
            write_json(self._path, self._record)
            return
        longest = min(job.spec["max_seq_len"], limit_of(llm, "model_config", "max_model_len") - 1)
        prompts = choose_prompts(samples, longest=longest, vocabulary=facts.vocabulary)
        budget = limit_of(llm, "scheduler_config", "max_num_batched_tokens")
        self._canary = Canary(llm, generate, prompts, budget=budget, longest=longest)

    def check(self, when: str) -> None:
        """Run the canary unless it is switched off. Raises CanaryError, after a `problem` event for each finding."""
        if not self._record["enabled"]:
            return
        try:
            self._record[when] = self._canary.run(when, values=self._values)
        except CanaryError as error:
            self._record[when] = {"problems": error.problems()}
            for problem in error.problems():
                self._events.emit("problem", **problem)
            raise
        finally:
            write_json(self._path, self._record)
        for note in self._record[when]["notes"]:
            self._events.emit("notice", level="warn", code="canary-note", text=note)


def limit_of(llm: Any, section: str, name: str) -> int:
    """Return a number of the engine's configuration. Raises CaptureError if this vLLM keeps it elsewhere."""
    import vllm

    value = llm
    for step in ("llm_engine", "vllm_config", section, name):
        value = getattr(value, step, None)
    if not isinstance(value, int):
        raise CaptureError(f"vLLM {vllm.__version__} has no llm_engine.vllm_config.{section}.{name}")
    return value

"""The canary inside a worker: keeps the rows of a few prompts, pass by pass, and judges them there.

Every rank judges its own states: they are too large to be sent to the driver, and the ranks must all be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remote_payload.extract.canary import (
    CHUNK_CAUSE,
    HALF_REFERENCE_ERROR,
    NEIGHBOUR_SHARE,
    PREFIX_CAUSE,
    Finding,
    Pass,
    Report,
    check_boundaries,
    check_identity,
    check_logits,
    check_norm,
    check_rows,
    check_same,
    distances_apart,
    logit_noise,
    unshared,
)
from remote_payload.extract.collect import Step
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.settings import CaptureSettings

Answers = tuple[list[int], list[float]]
"""The engine's greedy token after each prompt, and its log probability."""

SINGLE, BATCH, CHUNKED, REFERENCE = "single", "batch", "chunked", "reference"

DUMMY_APART = HALF_REFERENCE_ERROR / NEIGHBOUR_SHARE
"""In place of the distance of neighbouring boundaries, which is nothing under dummy weights: so that half precision
may differ by HALF_REFERENCE_ERROR between passes. Rows of another prompt differ by more than their own size."""

BATCH_CAUSE = "rows depend on what else is in the batch: a broken kernel, or another request's rows"


class CanaryRank:
    """One rank's captured passes. `recording` names the pass under way, None between passes."""

    def __init__(self, settings: CaptureSettings) -> None:
        self.recording: str | None = None
        self._settings = settings
        self._passes: dict[str, Pass] = {}
        self._hooked: dict[int, Pass] = {}  # boundary -> rows of the reference pass
        self._broken: list[Finding] = []

    def begin(self, name: str) -> None:
        self.recording = name
        self._passes[name] = Pass()
        if name == REFERENCE:
            self._hooked.clear()

    def cut(self) -> list[int]:
        """End the pass under way and return the prompts that were computed in several steps."""
        name, self.recording = self.recording, None
        return self._passes[name].cut() if name else []

    def keep(self, step: Step, offsets: dict[str, int], states: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Keep the rows of the step's canary prompts, as the samples' rows are kept."""
        assert self.recording is not None
        try:
            rows = list(states())
        except CaptureError as error:
            self._broken.append(Finding(check="states", what=str(error)))
            return
        for part in step.segments:
            row = offsets[part.request.request_id]
            block = torch.stack([state[row : row + part.count] for state in rows], dim=1)
            self._passes[self.recording].add(part.request.index, part.start, block.cpu())

    def restart(self, prompt: int) -> None:
        """Forget the rows of a prompt that the engine preempted, as far as the pass under way has them."""
        if self.recording is not None:
            for under_way in (self._passes[self.recording], *self._hooked.values()):
                under_way.pieces.pop(prompt, None)

    def fail(self, error: CaptureError) -> None:
        """Note rows that a step left out; the run ends with the judgement."""
        self._broken.append(Finding(check="positions", what=str(error), cause=PREFIX_CAUSE))

    def keep_reference(self, step: Step, offsets: dict[str, int], recorded: dict[int, torch.Tensor]) -> None:
        """Keep hooked rows, neighbours of the stored boundaries among them."""
        for part in step.segments:
            row = offsets[part.request.request_id]
            for boundary, state in recorded.items():
                block = state[row : row + part.count].unsqueeze(1).cpu()
                self._hooked.setdefault(boundary, Pass()).add(part.request.index, part.start, block)

    def judge(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        reference_prompts: int,
        values: bool,
        batch_cause: str,
        device: torch.device,
    ) -> Report:
        """Check the passes; `values` False (dummy weights) leaves the hard checks and that passes give the same rows.

        `batch_cause`: what is known to make rows depend on the batch on this machine, "" if nothing is.

        Where the hard checks hold on every rank, `lead_to_tokens` is to follow; the rows are kept for it.
        """
        report = Report(findings=self._broken[:1])
        states, numbers = len(self._settings.boundaries), range(len(prompts))
        captured = {name: p for name, p in self._passes.items() if name != REFERENCE}
        if not report.findings:
            for name, given in captured.items():
                report.findings += check_rows(given, prompts, states, name)
        if not values:
            report.notes.append("the weights are dummies: values, order and identity of the states are not proven")
        if report.findings:
            return report
        rows = {name: p.rows(numbers).to(device) for name, p in captured.items()}
        if not values:
            self._compare(report, rows, prompts, batch_cause or BATCH_CAUSE, [DUMMY_APART] * states)
        else:
            report.sound = True
            found, report.figures["identity"] = check_identity(rows[BATCH], rows[SINGLE], prompts)
            report.findings += found
            if not any(unshared(prompts)):
                report.notes.append("all prompts are alike: nothing tells one's rows from another's")
            apart = report.figures["apart"] = distances_apart(rows[SINGLE])
            self._compare(report, rows, prompts, batch_cause or BATCH_CAUSE, apart)
            first = range(reference_prompts)
            # Hooks see the last state before the norm; `lead_to_tokens` has the norm itself.
            normed = self._settings.layers if self._settings.final_norm else None
            neighbours = {b: p.rows(first)[:, 0].to(device) for b, p in self._hooked.items() if b != normed}
            count = sum(len(prompts[number]) for number in first)
            found, errors = check_boundaries(rows[BATCH][:count], neighbours, self._settings.boundaries)
            report.findings += found
            report.figures["boundary"] = errors
        return report

    def lead_to_tokens(
        self, prompts: Sequence[Sequence[int]], answers: Mapping[str, Answers], head: Head, device: torch.device
    ) -> Report:
        """Hold the final state against its layer's output and the engine's own `answers`.

        Collective: all ranks must call it.
        """
        report = Report()
        if self._settings.layers not in self._settings.boundaries:
            report.notes.append("the last boundary is not captured: it is not held against the engine's own tokens")
            return report
        place = self._settings.boundaries.index(self._settings.layers)
        hooked = self._hooked[self._settings.layers]
        first = range(len(hooked.pieces))
        before, stored = hooked.rows(first)[:, 0].to(device), self._passes[BATCH].rows(first)[:, place].to(device)
        report.findings += check_norm(stored, head.norms(before, normed=self._settings.final_norm))
        ends = torch.tensor([len(ids) for ids in prompts]).cumsum(0) - 1
        final = self._passes[BATCH].rows(range(len(prompts)))[ends, place].contiguous().to(device)
        logits = head.logits(final, normed=self._settings.final_norm)
        if logits is None:
            return report  # vLLM gathers logits on the first rank only
        tokens, logprobs = answers[BATCH]
        noise = logit_noise(final.dtype, logprobs, answers[SINGLE][1])
        found, share = check_logits(logits, tokens, logprobs, noise)
        report.findings += found
        report.figures.update(logits=share, logit_noise=noise)
        return report

    def forget(self) -> None:
        self._passes, self._hooked, self._broken = {}, {}, []

    def _compare(
        self, report: Report, rows: dict[str, torch.Tensor], prompts: Sequence[Sequence[int]], cause: str,
        apart: Sequence[float],
    ) -> None:  # fmt: skip
        single = rows[SINGLE]
        # A batch may cut prompts by itself; only those that it left whole compare batch and single alone.
        uncut = self._whole(BATCH, prompts).to(single.device)
        chunked = rows.get(CHUNKED, rows[BATCH])
        cut = (~self._whole(CHUNKED if CHUNKED in rows else BATCH, prompts)).to(single.device)
        for name, other, mask, why in (
            ("batch against single", rows[BATCH], uncut, cause),
            ("chunked against whole", chunked, cut, CHUNK_CAUSE),
        ):
            differences, errors = check_same(other[mask], single[mask], name=name, cause=why, apart=apart)
            report.findings += differences
            report.figures[name] = errors

    def _whole(self, name: str, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return, for every row, whether its prompt was computed in one step of the pass."""
        cut = set(self._passes[name].cut())
        return torch.tensor([number not in cut for number, ids in enumerate(prompts) for _ in ids])


class Head:
    """The way from the final state to logits, by the model's own modules."""

    def __init__(self, model: nn.Module, norm: nn.Module) -> None:
        self._model, self._norm = model, norm

    def norms(self, before: torch.Tensor, *, normed: bool) -> dict[str, torch.Tensor]:
        """Return what could be stored of a state [rows, hidden] before the norm, by how often that was applied."""
        once = self._norm(before.clone())
        if normed:
            return {"expected": once, "without": before, "again": self._norm(once.clone())}
        return {"expected": before, "again": once}

    def logits(self, states: torch.Tensor, *, normed: bool) -> dict[str, torch.Tensor] | None:
        """Return [prompts, vocabulary] by how the states [prompts, hidden] were taken, None on ranks without logits.

        Collective: every rank must call it.
        """
        once = self._norm(states.clone())
        # What would fit if the state were not where it is said to be names the cause.
        ways = {"expected": states, "without": once} if normed else {"expected": once, "again": states}
        compute: Any = self._model.compute_logits
        found = {name: compute(way.contiguous()) for name, way in ways.items()}
        return None if any(logits is None for logits in found.values()) else found


def final_norm(layers: nn.ModuleList, model: nn.Module) -> nn.Module:
    """Return the norm beside the decoder layers. Raises CaptureError if there is none under a known name."""
    for parent in model.modules():
        if any(child is layers for child in parent.children()):
            for name in FINAL_NORMS:
                norm = getattr(parent, name, None)
                if isinstance(norm, nn.Module):
                    return norm
    raise CaptureError(f"no final norm beside the decoder layers of {type(model).__name__} (as {FINAL_NORMS})")


FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")
"""What vLLM's models call it."""

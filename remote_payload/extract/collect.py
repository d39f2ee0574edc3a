"""Which rows of a step belong to which sample: by request id and absolute position, never by order of arrival.

Reads vLLM's scheduler output (duck-typed: every version since 0.12 has these fields) and needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from remote_payload.extract.errors import CaptureError

INDEX_KEY = "ctl_index"
"""The sample's index in `SamplingParams.extra_args`."""

PROBE_KEY = "ctl_probe"
"""The number of a probe request, which every rank keeps in memory and none writes."""

SPANS_KEY = "ctl_loss_spans"
RECORD_KEY = "ctl_record_id"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt under way on the engine."""

    request_id: str
    index: int
    probe: bool
    token_ids: list[int]
    loss_spans: list[list[int]] | None
    record_id: str | None = None
    done: int = 0  # rows [0, done) are collected
    sink: Any = None  # where its rows go; the collector's user sets it
    dropped: bool = False  # there was no room for its rows: the rest is computed, and not kept

    @property
    def complete(self) -> bool:
        return self.done == len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`count` rows of `request` computed in this step, from the absolute position `start` on."""

    request: Request
    start: int
    count: int


@dataclass(slots=True, kw_only=True)
class Step:
    """What one step computes for us. `restarted`: requests whose rows so far are void (preemption)."""

    segments: list[Segment] = field(default_factory=list)
    restarted: list[Request] = field(default_factory=list)


class Collector:
    """Follows the scheduler. Requests without our key (warm-up, other users) are not seen."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def begin(self, scheduled: Any) -> Step:
        """Return the rows that this step computes for known requests, less decode rows.

        Raises CaptureError if a request ended incomplete, or leaves rows out (a cached prefix).
        """
        step = Step()
        for request_id in scheduled.finished_req_ids:
            self._finish(request_id)
        for request_id in getattr(scheduled, "preempted_req_ids", None) or ():
            self._restart(request_id, step)
        counts = scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            request = self._admit(new, step)
            if request is not None:
                self._schedule(request, new.num_computed_tokens, counts.get(new.req_id, 0), step)
        cached = scheduled.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            request = self._requests.get(request_id)
            if request is not None:
                self._schedule(request, computed, counts.get(request_id, 0), step)
        return step

    def _admit(self, new: Any, step: Step) -> Request | None:
        extra = getattr(new.sampling_params, "extra_args", None) or {}
        known = self._requests.get(new.req_id)
        if known is not None:  # some runners announce a resumed request as a new one
            return known
        if INDEX_KEY not in extra and PROBE_KEY not in extra:
            return None
        request = Request(
            request_id=new.req_id,
            index=int(extra[PROBE_KEY] if PROBE_KEY in extra else extra[INDEX_KEY]),
            probe=PROBE_KEY in extra,
            token_ids=list(new.prompt_token_ids),
            loss_spans=extra.get(SPANS_KEY),
            record_id=extra.get(RECORD_KEY),
        )
        self._requests[new.req_id] = request
        return request

    def _schedule(self, request: Request, start: int, scheduled: int, step: Step) -> None:
        count = min(scheduled, len(request.token_ids) - start)
        if count <= 0 or request.complete:
            return  # a decode row
        if start == 0 and request.done:
            self._restart(request.request_id, step)
        if start != request.done:
            raise CaptureError(
                f"sample {request.index}: rows {request.done} to {start} were never computed "
                "(a cached prefix?), so they cannot be captured"
            )
        request.done += count
        step.segments.append(Segment(request=request, start=start, count=count))

    def _restart(self, request_id: str, step: Step) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.done and not request.complete:
            request.done = 0
            step.restarted.append(request)

    def _finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and not request.complete:
            raise CaptureError(
                f"sample {request.index} ended after {request.done:,} of its {len(request.token_ids):,} tokens"
            )


def row_offsets(request_ids: Sequence[str], counts: dict[str, int]) -> dict[str, int]:
    """Return each request's first row in the step's tensors, from the runner's own order of the batch."""
    offsets, row = {}, 0
    for request_id in request_ids:
        count = counts.get(request_id, 0)
        if count:
            offsets[request_id] = row
            row += count
    return offsets

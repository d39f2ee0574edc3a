"""Rows find their sample by request and position, whatever the scheduler does."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from remote_payload.extract.collect import INDEX_KEY, PROBE_KEY, SPANS_KEY, Collector, Step, row_offsets
from remote_payload.extract.errors import CaptureError


@dataclass
class Scheduled:
    """The fields of vLLM's SchedulerOutput that the collector reads, filled by hand."""

    new: dict[str, tuple[int, int, dict[str, Any]]] = field(default_factory=dict)  # id -> (length, computed, extra)
    cached: dict[str, int] = field(default_factory=dict)  # id -> computed
    counts: dict[str, int] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    preempted: tuple[str, ...] | None = None

    def output(self) -> Any:
        return SimpleNamespace(
            finished_req_ids=set(self.finished),
            preempted_req_ids=self.preempted and set(self.preempted),
            num_scheduled_tokens=self.counts,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name,
                    prompt_token_ids=list(range(length)),
                    num_computed_tokens=computed,
                    sampling_params=SimpleNamespace(extra_args=extra),
                )
                for name, (length, computed, extra) in self.new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(self.cached), num_computed_tokens=list(self.cached.values())
            ),
        )


def rows(step: Step) -> list[tuple[int, int, int]]:
    return [(part.request.index, part.start, part.count) for part in step.segments]


def test_a_prompt_in_chunks_is_followed_to_its_end() -> None:
    collector = Collector()
    first = collector.begin(Scheduled(new={"a": (10, 0, {INDEX_KEY: 7})}, counts={"a": 4}).output())
    assert rows(first) == [(7, 0, 4)]
    assert not first.segments[0].request.complete
    last = collector.begin(Scheduled(cached={"a": 4}, counts={"a": 6}).output())
    assert rows(last) == [(7, 4, 6)]
    assert last.segments[0].request.complete
    assert rows(collector.begin(Scheduled(cached={"a": 10}, counts={"a": 1}).output())) == []  # a decode row
    assert rows(collector.begin(Scheduled(finished=("a",)).output())) == []


@pytest.mark.parametrize("announced", ["preempted", "resumed as cached", "resumed as new"])
def test_a_preempted_prompt_starts_again(announced: str) -> None:
    collector = Collector()
    collector.begin(Scheduled(new={"a": (10, 0, {INDEX_KEY: 3})}, counts={"a": 6}).output())
    restarted = []
    if announced == "preempted":
        restarted += collector.begin(Scheduled(preempted=("a",)).output()).restarted
    again = (
        Scheduled(new={"a": (10, 0, {INDEX_KEY: 3})}, counts={"a": 10})
        if announced == "resumed as new"
        else Scheduled(cached={"a": 0}, counts={"a": 10})
    )
    step = collector.begin(again.output())
    restarted += step.restarted
    assert [request.index for request in restarted] == [3]
    assert rows(step) == [(3, 0, 10)]
    assert step.segments[0].request.complete


def test_requests_of_others_are_not_seen() -> None:
    collector = Collector()
    new = {"_warmup_0_": (5, 0, {}), "b": (5, 0, {INDEX_KEY: 1})}
    assert rows(collector.begin(Scheduled(new=new, counts={"_warmup_0_": 5, "b": 5}).output())) == [(1, 0, 5)]


def test_probe_requests_and_loss_spans_are_told_apart() -> None:
    collector = Collector()
    new = {"p": (5, 0, {PROBE_KEY: 2}), "s": (5, 0, {INDEX_KEY: 0, SPANS_KEY: [[1, 3]]})}
    step = collector.begin(Scheduled(new=new, counts={"p": 5, "s": 5}).output())
    probe, sample = (part.request for part in step.segments)
    assert (probe.probe, probe.index) == (True, 2)
    assert (sample.probe, sample.index, sample.loss_spans) == (False, 0, [[1, 3]])


def test_a_cached_prefix_is_an_error() -> None:
    with pytest.raises(CaptureError, match="rows 0 to 16 were never computed"):
        Collector().begin(Scheduled(new={"a": (20, 16, {INDEX_KEY: 0})}, counts={"a": 4}).output())


def test_a_prompt_that_ends_early_is_an_error() -> None:
    collector = Collector()
    collector.begin(Scheduled(new={"a": (10, 0, {INDEX_KEY: 5})}, counts={"a": 4}).output())
    with pytest.raises(CaptureError, match="sample 5 ended after 4 of its 10 tokens"):
        collector.begin(Scheduled(finished=("a",)).output())


def test_offsets_follow_the_batch_and_not_the_arrival() -> None:
    assert row_offsets(["c", "a", "x", "b"], {"a": 3, "b": 2, "c": 4}) == {"c": 0, "a": 4, "b": 7}

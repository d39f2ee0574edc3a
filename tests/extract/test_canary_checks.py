"""The canary's checks on rows made by hand; the seeded faults on a real engine are in test_canary."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from remote_payload.extract.canary import (
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
    folded,
    logit_noise,
    relative,
    unshared,
)
from remote_payload.extract.canary_rank import BATCH, CHUNKED, SINGLE, CanaryRank
from remote_payload.extract.canary_run import LONG_TOKENS, PROMPTS, TOKENS, Canary, CanaryError, choose_prompts
from remote_payload.extract.collect import Request, Segment, Step
from remote_payload.extract.dataset import Sample
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.settings import CaptureSettings

IDS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13, 14]]
ROWS = sum(map(len, IDS))
STATES = 3


def rows(dtype: torch.dtype = torch.float32, *, noise: float = 0.0) -> torch.Tensor:
    """[rows, states, hidden]; each state is the one before plus something of its size."""
    made = torch.randn(ROWS, STATES, 64, generator=torch.Generator().manual_seed(0)).cumsum(1)
    return (made + noise * torch.randn(made.shape, generator=torch.Generator().manual_seed(1))).to(dtype)


def split(block: torch.Tensor) -> Pass:
    """The rows as a pass in which the second prompt took two steps."""
    made = Pass()
    made.add(1, 3, block[9:])
    made.add(0, 0, block[:6])
    made.add(1, 0, block[6:9])
    return made


def test_pieces_are_put_together_by_position() -> None:
    assert split(rows()).rows([0, 1]).equal(rows())
    assert split(rows()).cut() == [1]
    assert check_rows(split(rows()), IDS, STATES, "single") == []


def test_a_hole_and_a_doubled_position_are_found() -> None:
    made = split(rows())
    made.pieces[1] = made.pieces[1][:1]
    (found,) = check_rows(made, IDS, STATES, "single")
    assert (found.check, "missing [0, 1, 2]" in found.what) == ("positions", True)
    assert "prefix caching" in found.cause
    twice = split(rows())
    twice.add(0, 0, rows()[:1])
    assert [found.check for found in check_rows(twice, IDS, STATES, "single")] == ["positions"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_of_the_precision_passes_and_more_does_not(dtype: torch.dtype) -> None:
    apart = distances_apart(rows(dtype))
    assert len(apart) == STATES
    small, large = (1e-7, 1e-2) if dtype is torch.float32 else (1e-2, 1.0)
    found, errors = check_same(rows(dtype, noise=small), rows(dtype), name="a against b", cause="why", apart=apart)
    assert (found, len(errors)) == ([], STATES)
    found, _ = check_same(rows(dtype, noise=large), rows(dtype), name="a against b", cause="why", apart=apart)
    assert {(each.check, each.cause) for each in found} == {("a-against-b", "why")}


def test_a_boundary_that_is_the_same_is_no_yardstick() -> None:
    """Between the first and the second, layers compute nothing."""
    made = rows(torch.bfloat16)
    made[:, 1] = made[:, 0]
    step = float(relative(made[:, 2], made[:, 1]).median())
    assert distances_apart(made) == [step] * STATES
    assert distances_apart(made[:, :2]) == [1.0, 1.0]
    assert distances_apart(made[:, :1]) == [1.0]


def test_fp32_may_differ_by_1e5_and_half_precision_by_a_fifth_of_a_boundary() -> None:
    exact = rows()
    apart = distances_apart(exact)
    for share, expected in ((0.99e-5, 0), (1.01e-5, STATES)):
        found, errors = check_same(exact * (1 + share), exact, name="x", cause="", apart=apart)
        assert len(found) == expected
        assert max(errors) == pytest.approx(share, rel=0.02)
    half = rows(torch.bfloat16)
    for share, expected in ((0.19, 0), (0.21, 1)):
        # The error of each row is `share` of the yardstick's distance, in one direction that bf16 holds.
        found, (error,) = check_same(half[:, :1] * (1 + share), half[:, :1], name="x", cause="", apart=[1.0])
        assert len(found) == expected
        assert error == pytest.approx(share, rel=0.05)


def test_in_half_precision_one_flipped_row_is_no_fault_and_in_fp32_it_is() -> None:
    for dtype, expected in ((torch.bfloat16, 0), (torch.float32, STATES)):
        flipped = rows(dtype)
        flipped[4] = -flipped[4]
        found, _ = check_same(flipped, rows(dtype), name="x", cause="", apart=distances_apart(rows(dtype)))
        assert len(found) == expected


def test_identity_tells_what_a_row_was_taken_for() -> None:
    assert check_identity(rows(noise=1e-3), rows(), IDS) == ([], 1.0)
    cases: dict[str, torch.Tensor] = {
        "a neighbouring boundary": rows()[:, [1, 0, 2]],
        "another prompt": torch.cat([rows()[6:], rows()[:6]]),
        "another position of the prompt": torch.cat([rows()[:6].flip(0), rows()[6:].flip(0)]),
    }
    for kind, wrong in cases.items():
        found, share = check_identity(wrong, rows(), IDS)
        assert kind in found[0].what
        assert found[0].cause
        assert share < 0.5


def test_rows_of_a_shared_prefix_are_left_out() -> None:
    shared = [[1, 2, 3, 4], [1, 2, 9, 9]]
    assert unshared(shared) == [False, False, True, True, False, False, True, True]
    same = rows()[:8].clone()
    same[4:6] = same[:2]
    assert check_identity(same, same, shared) == ([], 1.0)


def test_rows_of_a_shared_prefix_do_not_hide_wrong_ones() -> None:
    prefix = list(range(100, 300))
    prompts = [[*prefix, n] for n in range(4)]  # 4 rows of 804 can be told apart
    assert sum(unshared(prompts)) == 4
    made = torch.randn(sum(map(len, prompts)), STATES, 64, generator=torch.Generator().manual_seed(0)).cumsum(1)
    wrong = made.clone()
    last, other = len(prompts[0]) - 1, 2 * len(prompts[0]) - 1
    wrong[[last, other]] = wrong[[other, last]]
    found, share = check_identity(wrong, made, prompts)
    assert share == 0.5
    assert "another prompt" in found[0].what


def test_prompts_that_are_all_alike_are_said_to_prove_no_identity() -> None:
    alike = [[5, 6, 7]] * 2
    assert check_identity(rows()[:6], rows()[:6], alike) == ([], 1.0)
    rank = CanaryRank(SETTINGS)
    for name in (SINGLE, BATCH):
        rank.begin(name)
        for number, ids in enumerate(alike):
            request = Request(request_id="r", index=number, probe=True, token_ids=ids, loss_spans=None)
            states = list(rows()[:3].unbind(1))
            rank.keep(
                Step(segments=[Segment(request=request, start=0, count=3)]), {"r": 0}, lambda states=states: states
            )
        rank.cut()
    report = rank.judge(alike, reference_prompts=1, values=True, batch_cause="", device=torch.device("cpu"))
    assert report.findings == []
    assert report.notes == ["all prompts are alike: nothing tells one's rows from another's"]


def test_a_stored_boundary_must_be_its_own_layers_output() -> None:
    made = rows()
    reference = {b: made[:, b] for b in range(STATES)}
    assert check_boundaries(made, reference, [0, 1, 2])[0] == []
    (shifted,) = check_boundaries(made[:, [0]], reference, [1])[0]
    assert "stored as boundary 1 is boundary 0" in shifted.what
    assert "convention" in shifted.cause
    (scaled,) = check_boundaries(made[:, [1]] * 1.2, reference, [1])[0]
    assert scaled.check == "boundary"
    assert check_boundaries(made, {}, [0, 1, 2])[0] == []


def test_a_state_far_off_its_layer_is_told_where_a_neighbour_is_as_near() -> None:
    """Behind a layer that computes nothing both boundaries are the same rows."""
    made = rows()
    reference = {0: made[:, 1], 1: made[:, 1], 2: made[:, 2]}
    assert check_boundaries(made[:, [1]], reference, [1])[0] == []
    for wrong in (made[:, [1]] * 1.5, torch.full_like(made[:, [1]], torch.nan)):
        (found,) = check_boundaries(wrong, reference, [1])[0]
        assert "boundary 1 differs from its layer's output" in found.what


def test_the_final_state_must_lead_to_the_engines_tokens() -> None:
    logits = torch.randn(32, 50, generator=torch.Generator().manual_seed(0)) * 4
    table = logits.log_softmax(-1)
    tokens = table.argmax(-1).tolist()
    logprobs = table.max(-1).values.tolist()
    assert check_logits({"expected": logits}, tokens, logprobs, 1e-3) == ([], 1.0)
    one = logits.clone()
    one[0] = one[1]
    assert check_logits({"expected": one}, tokens, logprobs, 1e-3)[0] == []
    one[2] = one[3]
    assert check_logits({"expected": one}, tokens, logprobs, 1e-3)[0] != []
    # The same greedy token everywhere, yet not the same distribution: a doubled norm does this.
    (scaled,) = check_logits({"expected": logits * 1.3, "again": logits}, tokens, logprobs, 1e-3)[0]
    assert "already behind the final norm" in scaled.cause


def test_noise_is_measured_and_has_a_floor() -> None:
    assert logit_noise(torch.float32, [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]) == pytest.approx(1e-3)
    assert logit_noise(torch.bfloat16, [-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5]) == pytest.approx(2.0)


def test_findings_of_one_kind_are_told_once() -> None:
    findings = [Finding(check="a", what="first"), Finding(check="b", what="other"), Finding(check="a", what="second")]
    assert [each.what for each in folded(findings)] == ["first (and 1 more like this)", "other"]
    error = CanaryError(findings[:1], "start")
    assert error.problems()[0]["code"] == "canary-a"
    assert "first" in str(error)


def _samples(*lengths: int) -> list[Sample]:
    return [
        Sample(index=n, token_ids=[(n * 37 + k) % 91 for k in range(length)], loss_mask=None)
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("lengths", [(500,) * 60, (1, 2, 3), (30,) * 5])
def test_prompts_come_from_the_data_and_fit(lengths: tuple[int, ...]) -> None:
    samples = _samples(*lengths)
    prompts = choose_prompts(samples, longest=300, vocabulary=91)
    assert len(prompts) == PROMPTS
    assert all(0 < len(ids) <= TOKENS for ids in prompts[:-1])
    assert len(prompts[-1]) == LONG_TOKENS
    assert {token for ids in prompts for token in ids} <= {token for each in samples for token in each.token_ids}
    assert prompts == choose_prompts(samples, longest=300, vocabulary=91)
    assert max(map(len, choose_prompts(samples, longest=20, vocabulary=91))) == 20


SETTINGS = CaptureSettings(
    boundaries=(0, 1, 2), layers=2, capture="hooks", final_norm=False, store_dtype="auto"
)  # fmt: skip


class Ranks:
    """An engine of two ranks, as the driver's canary sees it. `found`: what a rank's pass finds, by method."""

    def __init__(self, found: dict[str, list[list[Finding]]] | None = None) -> None:
        self.found, self.calls = found or {}, Counter[str]()

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls[method] += 1
        if method == "ctl_canary_end":
            return [[0], [0]]  # a prompt was cut
        if method not in ("ctl_canary_judge", "ctl_canary_tokens"):
            return [None, None]
        reports = [Report(sound=True, findings=found) for found in self.found.get(method, [[], []])]
        return [report.to_dict() for report in reports]

    def generate(self, prompts: list[list[int]], extra: list[dict[str, Any]]) -> list[tuple[int, float]]:
        return [(1, -0.5) for _ in prompts]

    def canary(self) -> Canary:
        return Canary(self, self.generate, [[1, 2, 3], [4, 5, 6, 7]], budget=64, longest=32)


def test_all_ranks_judge_and_lead_to_tokens_and_one_of_them_stops_the_run() -> None:
    sound = Ranks()
    sound.canary().run("start", values=True)
    # Logits are gathered from all ranks: a call to one alone would wait for ever.
    assert (sound.calls["ctl_canary_judge"], sound.calls["ctl_canary_tokens"]) == (1, 1)
    for method in ("ctl_canary_judge", "ctl_canary_tokens"):
        second = Ranks({method: [[], [Finding(check="finite", what="rank 1 holds NaN")]]})
        with pytest.raises(CanaryError, match="rank 1 holds NaN"):
            second.canary().run("start", values=True)


def _rank(*, chunk: int = 0) -> CanaryRank:
    """A rank that has seen its passes, each state a row after the other; `chunk` cuts the chunked pass."""
    rank = CanaryRank(SETTINGS)
    for name in (SINGLE, BATCH, CHUNKED):
        rank.begin(name)
        for number, ids in enumerate(IDS):
            cut = chunk if name == CHUNKED and chunk else len(ids)
            for start in range(0, len(ids), cut):
                count = min(cut, len(ids) - start)
                request = Request(request_id=f"r{number}", index=number, probe=True, token_ids=ids, loss_spans=None)
                step = Step(segments=[Segment(request=request, start=start, count=count)])
                first = number * len(IDS[0]) + start
                states = list(rows()[first : first + count].unbind(1))
                rank.keep(step, {request.request_id: 0}, lambda states=states: states)
        rank.cut()
    return rank


def _judge(rank: CanaryRank, **given: Any) -> Any:
    return rank.judge(
        IDS, **{"reference_prompts": 1, "values": True, "batch_cause": "", "device": torch.device("cpu"), **given}
    )


def test_a_rank_with_equal_passes_is_sound() -> None:
    report = _judge(_rank(chunk=4))
    assert (report.findings, report.sound) == ([], True)
    assert report.figures["identity"] == 1.0
    assert report.figures["chunked against whole"] == [0.0] * STATES


def test_dummy_weights_are_said_to_prove_nothing_about_values() -> None:
    report = _judge(_rank(), values=False)
    assert (report.findings, report.sound) == ([], False)
    assert "not proven" in report.notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_dummy_weights_passes_must_still_agree(dtype: torch.dtype) -> None:
    rank = _rank()
    for name, shift in ((SINGLE, 0), (BATCH, 1), (CHUNKED, 0)):
        rank.begin(name)
        for number, ids in enumerate(IDS):
            request = Request(request_id="r", index=number, probe=True, token_ids=ids, loss_spans=None)
            step = Step(segments=[Segment(request=request, start=0, count=len(ids))])
            first = number * len(IDS[0])
            states = list(rows(dtype).roll(shift, 0)[first : first + len(ids)].unbind(1))
            rank.keep(step, {"r": 0}, lambda states=states: states)
        rank.cut()
    report = _judge(rank, values=False)
    assert {finding.check for finding in report.findings} == {"batch-against-single"}
    assert report.sound is False


def test_rows_from_before_a_preemption_are_forgotten() -> None:
    rank = _rank()
    rank.restart(0)  # between passes nothing is under way
    rank.begin(BATCH)
    for _ in range(2):
        for number, ids in enumerate(IDS):
            rank.restart(number)
            request = Request(request_id="r", index=number, probe=True, token_ids=ids, loss_spans=None)
            step = Step(segments=[Segment(request=request, start=0, count=len(ids))])
            first = number * len(IDS[0])
            states = list(rows()[first : first + len(ids)].unbind(1))
            rank.keep(step, {"r": 0}, lambda states=states: states)
    rank.cut()
    assert _judge(rank).findings == []


def test_a_cached_prefix_is_a_finding_and_not_a_crash() -> None:
    rank = _rank()
    rank.fail(CaptureError("sample 3: rows 0 to 16 were never computed"))
    (found,) = _judge(rank).findings
    assert "prefix caching is on" in found.cause


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("given", "cause"), [("without", "missing"), ("again", "twice"), ("expected", None)])
def test_the_rows_tell_one_norm_from_two_where_tokens_cannot(
    dtype: torch.dtype, given: str, cause: str | None
) -> None:
    """Weights near 1, as a young model's: two norms change a row by a tenth, and hardly a greedy token."""
    before = 3 * rows().reshape(-1, 64)
    weight = 1 + 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(2))

    def norm(states: torch.Tensor) -> torch.Tensor:
        return states * states.square().mean(-1, keepdim=True).rsqrt() * weight

    ways = {"expected": norm(before), "without": before, "again": norm(norm(before))}
    ways = {name: way.to(dtype) for name, way in ways.items()}
    found = check_norm(ways[given] * (1 + torch.finfo(dtype).eps), ways)
    assert [finding.check for finding in found] == ([] if cause is None else ["norm"])
    assert all(cause and cause in finding.cause for finding in found)


def test_a_final_state_that_is_none_of_these_fails() -> None:
    before = rows().reshape(-1, 64)
    ways = {"expected": before, "again": before * 1.5}
    for stored in (torch.randn(before.shape), before * float("nan")):
        (found,) = check_norm(stored, ways)
        assert "allowed" in found.what or "one norm more" in found.what

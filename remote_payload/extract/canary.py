"""The canary's checks: are these rows the states of these prompts? Pure functions over captured rows.

A pass is the same prompts run once in some way: each alone, all in a batch, cut over several steps, or eagerly with
hooks at the boundaries and their neighbours. Wrong states look like right ones; what gives them away is that two
passes disagree, that a row's nearest twin is somebody else's, or that the last state does not lead to the token that
the engine itself chose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

IDENTITY = 0.99
"""Share of rows that must be nearest to their own twin; the rest is room for flipped expert choices."""

FP32_ERROR = 1e-5
"""Largest relative L2 error of a row between two passes in fp32; kernels that sum in another order give 1e-6."""

NEIGHBOUR_SHARE = 0.2
"""In other precisions: the median error's largest share of the distance between neighbouring boundaries."""

REFERENCE_ERROR = {torch.float32: 1e-3}
HALF_REFERENCE_ERROR = 0.1
"""Largest median error of a stored state to the eager, hooked one; compiled kernels round differently."""

AGREEING = 31 / 32
"""Share of prompts on which the stored final state must lead to the engine's own greedy token."""

LOGIT_NOISE = {torch.float32: 1e-3}
HALF_LOGIT_NOISE = 0.25
"""Smallest noise assumed, in nats: half precision resolves logits of about 20 to 0.125."""

NOISE_FACTOR = 4.0
"""The noise measured between two passes of the engine itself is a median; single prompts differ by more."""

NORM_CAUSES = {
    "again": "the state is already behind the final norm (norm applied twice), or final_norm is set wrongly",
    "without": "the final norm is missing from the state, or final_norm is set wrongly",
}
DROPPED_CAUSE = "some vLLM versions drop the last boundary without a word (DeepSeek, Kimi and GLM before 0.28)"
ORDER_CAUSE = "states are stored in another order than asked for"
CHUNK_CAUSE = "chunks of a prompt are put together in the wrong order, or a chunk does not see the earlier ones"
IDENTITY_CAUSES = {
    "a neighbouring boundary": ORDER_CAUSE,
    "another position of the prompt": CHUNK_CAUSE,
    "another prompt": "rows go to the wrong request (sliced by order of arrival instead of by request id)",
}
PREFIX_CAUSE = "prefix caching is on: cached rows are never computed again, so they cannot be captured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What differed, by how much, and the known cause that fits ("" where none does)."""

    check: str
    what: str
    cause: str = ""

    def problem(self) -> dict[str, str]:
        """Return the entry for the summary's `problems`."""
        return {
            "code": f"canary-{self.check}",
            "what": self.what,
            "why": self.cause or "no known cause fits",
            "fix": 'try capture = "hooks"; --no-canary runs without this check, and the summary then says so',
        }


@dataclass(slots=True, kw_only=True)
class Report:
    """The outcome of one canary. `figures`: what was measured, by check; `notes`: what could not be checked."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sound: bool = False  # the hard checks hold, so the rows can be compared

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Pass:
    """Rows of one pass by prompt: pieces (first position, [rows, states, hidden]) in the order of arrival."""

    pieces: dict[int, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)

    def add(self, prompt: int, start: int, block: torch.Tensor) -> None:
        self.pieces.setdefault(prompt, []).append((start, block))

    def cut(self) -> list[int]:
        """Return the prompts that were computed in more than one step."""
        return [prompt for prompt, parts in self.pieces.items() if len(parts) > 1]

    def rows(self, prompts: Sequence[int]) -> torch.Tensor:
        """Return [rows, states, hidden] of the prompts, one after another, by position."""
        parts = [part for prompt in prompts for part in sorted(self.pieces[prompt], key=lambda part: part[0])]
        return torch.cat([block for _, block in parts])


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Return one finding of each check, the first, saying how many there were (a fault shows in many states)."""
    counts = Counter(finding.check for finding in findings)
    first = {finding.check: finding for finding in reversed(findings)}
    return [
        replace(first[check], what=f"{first[check].what} (and {count - 1} more like this)")
        if count > 1
        else first[check]
        for check, count in counts.items()
    ]


def check_rows(given: Pass, prompts: Sequence[Sequence[int]], states: int, name: str) -> list[Finding]:
    """The hard checks: number of states, every position once, finite, nonzero. Others need these to hold."""
    for number, ids in enumerate(prompts):
        parts = given.pieces.get(number, [])
        found = {int(block.shape[1]) for _, block in parts}
        if found - {states}:
            what = f"{name}: {min(found)} states came instead of {states}"
            return [Finding(check="states", what=what, cause=DROPPED_CAUSE if min(found) < states else "")]
        covered = sorted(p for start, block in parts for p in range(start, start + block.shape[0]))
        if covered != list(range(len(ids))):
            lost = sorted(set(range(len(ids))) - set(covered))
            what = f"{name}: prompt {number} has {len(covered)} rows for {len(ids)} positions, missing {lost[:8]}"
            return [Finding(check="positions", what=what, cause=PREFIX_CAUSE if lost[:1] == [0] else "")]
    rows = given.rows(range(len(prompts)))
    findings = []
    for place in range(states):
        state = rows[:, place]
        broken = int((~state.isfinite()).any(-1).sum())
        zero = int((~state.any(-1)).sum())
        if broken:
            what = f"{name}: {broken} of {len(state)} rows of state {place} hold NaN or Inf"
            findings.append(Finding(check="finite", what=what, cause="float16 overflow, or a kernel broken here"))
        if zero:
            what = f"{name}: {zero} of {len(state)} rows of state {place} are zero"
            cause = "the buffer was never filled: hybrid models with a wrong block size do this"
            findings.append(Finding(check="zero", what=what, cause=cause))
    return findings


def check_identity(
    first: torch.Tensor, second: torch.Tensor, prompts: Sequence[Sequence[int]]
) -> tuple[list[Finding], float]:
    """Each mean-centred row [rows, states, hidden] must be nearest to its twin in the other pass.

    Rivals are all rows of the same boundary and of the stored neighbours. Rows of a prefix that prompts share are
    left out, of the count too: they are rightly equal. Return findings and the smallest share over the boundaries.
    """
    findings, least = [], 1.0
    count, states, _ = first.shape
    own = torch.tensor(unshared(prompts), device=first.device)
    if not bool(own.any()):
        return [], 1.0  # the caller says that nothing is proven
    owner = torch.tensor([n for n, ids in enumerate(prompts) for _ in ids], device=first.device)
    centred = (second - second.mean(0, keepdim=True)).float()
    twins = torch.arange(count, device=first.device)
    for place in range(states):
        queries = (first[:, place] - first[:, place].mean(0)).float()
        near = [place, *(p for p in (place - 1, place + 1) if 0 <= p < states)]
        distances = torch.cat([torch.cdist(queries, centred[:, p]) for p in near], dim=1)
        nearest = distances.argmin(1)
        # Equal distances (boundaries that are alike) are no proof of a swap.
        right = (distances[twins, twins] <= distances[twins, nearest]) | ~own
        share = float(right[own].float().mean())
        least = min(least, share)
        if share < IDENTITY:
            wrong = nearest[~right]
            kinds = {
                "a neighbouring boundary": wrong >= count,
                "another position of the prompt": (wrong < count) & (owner[wrong % count] == owner[twins[~right]]),
                "another prompt": (wrong < count) & (owner[wrong % count] != owner[twins[~right]]),
            }
            kind = max(kinds, key=lambda name: int(kinds[name].sum()))
            what = f"{100 * (1 - share):.1f}% of the rows of state {place} are nearest to {kind}, not to their twin"
            findings.append(Finding(check="identity", what=what, cause=IDENTITY_CAUSES[kind]))
    return findings, least


def check_same(
    first: torch.Tensor, second: torch.Tensor, *, name: str, cause: str, apart: Sequence[float]
) -> tuple[list[Finding], list[float]]:
    """Two passes must give the same rows [rows, states, hidden] within the precision.

    `apart`: relative distance of each boundary to its nearest stored neighbour, the yardstick where the precision is
    not fp32. Return findings and each state's error (fp32: the largest, otherwise the median).
    """
    findings, errors = [], []
    exact = first.dtype is torch.float32
    if not len(first):
        return [], []
    for place, limit in enumerate(apart):
        each = relative(first[:, place], second[:, place])
        error = float(each.max() if exact else each.median())
        allowed = FP32_ERROR if exact else NEIGHBOUR_SHARE * limit
        errors.append(error)
        if not error <= allowed:  # NaN must fail
            kind = "largest" if exact else "median"
            what = f"{name}: state {place} differs by {error:.1e} ({kind} relative error; allowed {allowed:.1e})"
            findings.append(Finding(check=name.replace(" ", "-"), what=what, cause=cause))
    return findings, errors


def check_boundaries(
    stored: torch.Tensor, reference: Mapping[int, torch.Tensor], boundaries: Sequence[int]
) -> tuple[list[Finding], dict[int, float]]:
    """Each stored state must be the hooked one of its own boundary rather than of a neighbour.

    `reference`: boundary -> [rows, hidden], neighbours included. A boundary that it lacks is not checked. Return
    findings and the median error of each boundary to its own.
    """
    findings, errors = [], {}
    for place, boundary in enumerate(boundaries):
        if boundary not in reference:
            continue
        distances = {b: float(relative(stored[:, place], rows).median()) for b, rows in reference.items()}
        errors[boundary] = distances[boundary]
        nearest = min(distances, key=lambda b: distances[b])
        tolerance = REFERENCE_ERROR.get(stored.dtype, HALF_REFERENCE_ERROR)
        if distances[nearest] < 0.5 * distances[boundary]:
            what = (
                f"what is stored as boundary {boundary} is boundary {nearest}: "
                f"{distances[boundary]:.1e} from its own layer's output, {distances[nearest]:.1e} from that one's"
            )
            shift = nearest - boundary
            cause = (
                "layer ids counted by another convention: ids of layer outputs are one less than boundaries"
                if abs(shift) == 1
                else ORDER_CAUSE
            )
            findings.append(Finding(check="boundary", what=what, cause=cause))
        elif not distances[boundary] <= tolerance:  # NaN must fail; a neighbour may be as near, behind an empty layer
            what = f"boundary {boundary} differs from its layer's output by {errors[boundary]:.1e} (median)"
            findings.append(Finding(check="boundary", what=f"{what}; allowed {tolerance:.0e}"))
    return findings, errors


def check_norm(stored: torch.Tensor, ways: Mapping[str, torch.Tensor]) -> list[Finding]:
    """The stored final state must be what its layer's output becomes, rather than that with a norm less or more.

    `stored` and each of `ways` [rows, hidden]: "expected", and "again" and "without" the norm. A token proves little
    where the norm's weights are nearly equal; the rows themselves still tell one norm from two.
    """
    distances = {way: float(relative(stored, rows).median()) for way, rows in ways.items()}
    nearest = min(distances, key=lambda way: distances[way])
    expected, least = distances["expected"], distances[nearest]
    if least < 0.5 * expected:
        what = (
            f"the final state is {expected:.1e} from what its layer's output should become, "
            f"{least:.1e} from that with {'one norm more' if nearest == 'again' else 'no norm'} (median)"
        )
        return [Finding(check="norm", what=what, cause=NORM_CAUSES[nearest])]
    tolerance = REFERENCE_ERROR.get(stored.dtype, HALF_REFERENCE_ERROR)
    if not expected <= tolerance:  # NaN must fail
        what = f"the final state differs from what its layer's output becomes by {expected:.1e} (median)"
        return [Finding(check="norm", what=f"{what}; allowed {tolerance:.0e}")]
    return []


def check_logits(
    logits: Mapping[str, torch.Tensor], tokens: Sequence[int], logprobs: Sequence[float], noise: float
) -> tuple[list[Finding], float]:
    """The stored final state must lead to the engine's own greedy token, with its log probability.

    `logits`: [prompts, vocabulary] by how they were made of the state: "expected", and "again" and "without" the
    norm, which are only looked at to name a cause. `noise` in nats. Return findings and the share that agrees.
    """
    share = _agreement(logits["expected"], tokens, logprobs, noise)
    if share >= AGREEING:
        return [], share
    cause = ""
    for variant, text in NORM_CAUSES.items():
        if variant in logits and _agreement(logits[variant], tokens, logprobs, noise) >= AGREEING:
            cause = text
    what = (
        f"the final state leads to the engine's own next token on {share * len(tokens):.0f} of {len(tokens)} prompts "
        f"(noise allowed: {noise:.2g} nats)"
    )
    return [Finding(check="logits", what=what, cause=cause)], share


def logit_noise(dtype: torch.dtype, one: Sequence[float], other: Sequence[float]) -> float:
    """Return the noise of log probabilities in nats, measured between two passes of the engine, with a floor."""
    measured = float((torch.tensor(one) - torch.tensor(other)).abs().median())
    return max(NOISE_FACTOR * measured, LOGIT_NOISE.get(dtype, HALF_LOGIT_NOISE))


def _agreement(logits: torch.Tensor, tokens: Sequence[int], logprobs: Sequence[float], noise: float) -> float:
    chosen = torch.tensor(list(tokens), device=logits.device).unsqueeze(1)
    table = logits.float().log_softmax(-1)
    ours = table.gather(1, chosen).squeeze(1)
    near = (ours - torch.tensor(list(logprobs), device=logits.device)).abs() <= noise
    greedy = ours >= table.max(-1).values - noise
    return float((near & greedy).float().mean())


def unshared(prompts: Sequence[Sequence[int]]) -> list[bool]:
    """Return, for all rows of all prompts, whether no other prompt begins with the same tokens up to there."""
    seen: dict[tuple[int, ...], int] = {}
    prefixes = [tuple(ids[: end + 1]) for ids in prompts for end in range(len(ids))]
    for prefix in prefixes:
        seen[prefix] = seen.get(prefix, 0) + 1
    return [seen[prefix] == 1 for prefix in prefixes]


def distances_apart(rows: torch.Tensor) -> list[float]:
    """Return each state's median relative distance to its nearest stored neighbour; rows [rows, states, hidden].

    A neighbour that is the same (the layers between compute nothing) is no yardstick; where there is no other, the
    nearest two of all stand in, and 1 where none differ.
    """
    steps = [float(relative(rows[:, b], rows[:, a]).median()) for a, b in pairwise(range(rows.shape[1]))]
    near = (steps[max(place - 1, 0) : place + 1] for place in range(rows.shape[1]))
    least = min((step for step in steps if step > 0), default=1.0)
    return [min((step for step in each if step > 0), default=least) for each in near]


def relative(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the relative L2 error of each row."""
    reference = reference.float()
    scale = reference.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (rows.float() - reference).norm(dim=-1) / scale

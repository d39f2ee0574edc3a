"""What is different between two runs: their plans, versions, ends and figures. Pure: from records to records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.core.redaction import MASK, is_secret

NOT_INTENDED = frozenset({"run_id", "created", "payload", "wire", "job.outputs", "job.steps"})
"""Keys of a plan that tell no two intentions apart: ids and dates, what a folder happened to hold, and steps, which
repeat the rest with the run's own paths."""

FIGURES = (
    "samples", "tokens", "bytes", "tokens_per_s", "bytes_per_s", "gpu_hours", "cost", "timings", "shape", "kept",
)  # fmt: skip
"""Fields of a summary that are measured."""

OUTCOME = ("state", "end_reason", "gpus_clean", "boundaries", "format", "model", "num_layers")


def compare(
    plans: Sequence[Mapping[str, Any] | None], summaries: Sequence[Mapping[str, Any] | None]
) -> dict[str, list[dict[str, Any]]]:
    """Return what changed from the first run to the second, by section: plan, versions, outcome, figures.

    A change is {"key" (dotted), "before", "after"}, for numbers also "ratio" (after / before, where that is one);
    None stands for what one of the two has not. Values of secrets are `***`.
    """
    first, second = (_flat(_without_id(plan or {}, str((plan or {}).get("run_id")))) for plan in plans)
    versions = [
        {**((summary or {}).get("versions") or {}), "payload": (plan or {}).get("payload")}
        for plan, summary in zip(plans, summaries, strict=True)
    ]
    outcome = [_picked(summary, OUTCOME) | {"problems": _codes(summary)} for summary in summaries]
    figures = [_picked(summary, FIGURES) | _norms(summary) for summary in summaries]
    return {
        "plan": list(_changes(_plan_only(first), _plan_only(second))),
        "versions": list(_changes(_flat(versions[0]), _flat(versions[1]))),
        "outcome": list(_changes(_flat(outcome[0]), _flat(outcome[1]))),
        "figures": list(_changes(_flat(figures[0]), _flat(figures[1]))),
    }


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in [*first, *(key for key in second if key not in first)]:
        before, after = first.get(key), second.get(key)
        if before == after:
            continue
        name = key.removeprefix("job.env.")
        if name != key and any(is_secret(name, str(value)) for value in (before, after)):
            before, after = (MASK if value is not None else None for value in (before, after))
        change: dict[str, Any] = {"key": key, "before": before, "after": after}
        if _is_number(before) and _is_number(after) and before:
            change["ratio"] = round(after / before, 4)
        yield change


def _without_id(value: Any, run_id: str) -> Any:
    """Return a plan with `{run}` where paths hold the run's own id, which tells no two intentions apart."""
    if isinstance(value, Mapping):
        return {key: inner if key == "run_id" else _without_id(inner, run_id) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_id(inner, run_id) for inner in value]
    return value.replace(f"/{run_id}", "/{run}") if isinstance(value, str) else value


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value}; a list is a value."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            found.update(_flat(inner, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = inner
    return found


def _plan_only(plan: Mapping[str, Any]) -> dict[str, Any]:
    intended = {key: value for key, value in plan.items() if key not in NOT_INTENDED}
    return {key: value for key, value in intended.items() if not key.startswith("timings.")} | {
        "command": _argv(plan)
    }


def _argv(plan: Mapping[str, Any]) -> list[str] | None:
    if plan.get("job.kind") != "command":
        return None
    return next((step["argv"] for step in plan.get("job.steps") or () if step.get("argv")), None)


def _picked(summary: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, Any]:
    return {name: (summary or {}).get(name) for name in names if (summary or {}).get(name) is not None}


def _norms(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    states = (summary or {}).get("states") or ()
    return {f"boundary {each.get('boundary')}": {k: v for k, v in each.items() if k != "boundary"} for each in states}


def _codes(summary: Mapping[str, Any] | None) -> list[str]:
    return [str(problem.get("code")) for problem in (summary or {}).get("problems") or ()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""What a run used of a host: GPU-hours, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECONDS_PER_HOUR = 3600.0


def usage(
    plan: Mapping[str, Any] | None, result: Mapping[str, Any] | None, price_per_gpu_hour: float | None
) -> dict[str, Any]:
    """Return the fields that a summary gains: `gpu_hours` and `cost`, null where they are not known.

    All GPUs of the host count from the moment that the run held them (not while it queued) to its end, whether they
    worked or not: nobody else could use them. `cost` is {"price_per_gpu_hour", "total"} in the price's currency. A
    host without GPUs has no GPU-hours.
    """
    gpus = int(((plan or {}).get("host") or {}).get("gpus") or 0)
    seconds = (result or {}).get("duration_s")
    if not gpus or not isinstance(seconds, int | float):
        return {"gpu_hours": None, "cost": None}
    hours = gpus * float(seconds) / SECONDS_PER_HOUR
    cost = None
    if price_per_gpu_hour is not None:
        cost = {"price_per_gpu_hour": price_per_gpu_hour, "total": round(hours * price_per_gpu_hour, 2)}
    return {"gpu_hours": round(hours, 4), "cost": cost}

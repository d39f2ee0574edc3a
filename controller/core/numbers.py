"""Numbers in records that came from elsewhere."""

from __future__ import annotations

import math


def finite(value: object) -> float | None:
    """Return a finite number as it is, None for anything else; a bool is no number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None

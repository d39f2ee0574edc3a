"""Names and versions of Python packages, compared as pip compares them."""

from __future__ import annotations

import re


def normalised(name: str) -> str:
    """Return a distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def same_version(have: str, wanted: str) -> bool:
    """Whether `==WANTED` accepts a version: a local part (+cu128) counts only where it is asked for (PEP 440)."""
    return have == wanted or ("+" not in wanted and have.partition("+")[0] == wanted)

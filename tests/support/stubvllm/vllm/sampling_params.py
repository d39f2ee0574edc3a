from __future__ import annotations

import enum
from typing import Any


class RequestOutputKind(enum.Enum):
    FINAL_ONLY = 2


class SamplingParams:
    def __init__(self, *, extra_args: dict[str, Any] | None = None, **_: Any) -> None:
        self.extra_args = extra_args

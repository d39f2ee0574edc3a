"""The notebook API: `from controller import extract`.

    run = extract(host="gpu1", playbook="eagle3-kimi-k2.5")
    run.wait()
    run.to_pandas()

Names are loaded on first use, so that `ctl --help` imports none of the libraries behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from controller.api import attach, extract, plan, preflight
    from controller.core.errors import CtlError
    from controller.documents import Findings, Ledger, Plan, Summary
    from controller.run import Run
    from controller.waiting import Detached, WaitTimeout

__all__ = [
    "CtlError", "Detached", "Findings", "Ledger", "Plan", "Run", "Summary", "WaitTimeout", "attach", "extract",
    "plan", "preflight",
]  # fmt: skip

_HOMES = {
    "CtlError": "controller.core.errors",
    "Detached": "controller.waiting",
    "Findings": "controller.documents",
    "Ledger": "controller.documents",
    "Plan": "controller.documents",
    "Run": "controller.run",
    "Summary": "controller.documents",
    "WaitTimeout": "controller.waiting",
    "attach": "controller.api",
    "extract": "controller.api",
    "plan": "controller.api",
    "preflight": "controller.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

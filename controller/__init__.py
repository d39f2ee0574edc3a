"""The notebook API: `from controller import extract`.

    run = extract(host="gpu1", playbook="eagle3-kimi-k2.5")
    run.wait()
    run.summary["samples"]

Names are loaded on first use, so that `ctl --help` imports none of the libraries behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from controller.api import attach, extract, plan
    from controller.core.errors import CtlError
    from controller.run import Run

__all__ = ["CtlError", "Run", "attach", "extract", "plan"]

_HOMES = {
    "CtlError": "controller.core.errors",
    "Run": "controller.run",
    "attach": "controller.api",
    "extract": "controller.api",
    "plan": "controller.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

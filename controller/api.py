"""What scripts and notebooks call; the same pipeline as the command line, without a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller import pipeline
from controller.core.errors import RefusedError
from controller.core.intention import describe
from controller.core.model import Overrides
from controller.run import Run, Sink
from controller.workspace import load_workspace
from remote_payload.host.protocol import OwnedOutput


def extract(
    *,
    host: str | None = None,
    playbook: str | None = None,
    stale: str | None = None,
    adopt: bool = False,
    max_samples: int | None = None,
    output: str | None = None,
    capture: str | None = None,
    canary: bool = True,
    rehearse: str | None = None,
    yes: bool = False,
    sinks: Sequence[Sink] = (),
) -> Run:
    """Check the host, launch an extraction, and return its handle once the host has confirmed that it holds it.

    Configuration is found as the command line finds it, from the current folder. `yes` stands for the confirmation
    of what `stale="clear"` or "quarantine" will delete or move. The connection stays open in the handle: close it,
    or use it as a context manager.

    Raises ConfigError, ConnectionFailed, RefusedError (with the findings in `data`), RemoteFailed, LaunchUnknown.
    """
    intention = _intend(host, playbook, stale, adopt, max_samples, output, capture, canary, rehearse)

    def confirm(outputs: Sequence[OwnedOutput], listings: Mapping[str, Mapping[str, Any]]) -> bool:
        if not yes:
            raise RefusedError(
                "the output folder holds files of an earlier run",
                why=", ".join(f"{each['path']}: {each['entries']} entries" for each in outputs),
                fix="pass `yes=True` to delete or move exactly these",
                code="confirmation-needed",
            )
        return True

    return pipeline.launch(intention, sinks=sinks, confirm=confirm)


def plan(
    *,
    host: str | None = None,
    playbook: str | None = None,
    stale: str | None = None,
    adopt: bool = False,
    max_samples: int | None = None,
    output: str | None = None,
    capture: str | None = None,
    canary: bool = True,
    rehearse: str | None = None,
) -> dict[str, Any]:
    """Return what `extract` would do, without connecting; the document of `ctl plan --json`."""
    intention = _intend(host, playbook, stale, adopt, max_samples, output, capture, canary, rehearse)
    return describe(intention.plan, intention.extraction)


def attach(run_id: str | None = None, *, host: str | None = None, sinks: Sequence[Sink] = ()) -> Run:
    """Return the handle of an existing run; None is the last one launched from here.

    `host` is needed for a run that was launched from elsewhere. Raises UsageError, ConfigError.
    """
    return pipeline.open_run(load_workspace(), run_id, host, sinks=sinks)


def _intend(
    host: str | None,
    playbook: str | None,
    stale: str | None,
    adopt: bool,
    max_samples: int | None,
    output: str | None,
    capture: str | None,
    canary: bool,
    rehearse: str | None,
) -> pipeline.Intention:
    overrides = Overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture,
        canary=None if canary else False, rehearse=rehearse,
    )  # fmt: skip
    return pipeline.plan_extract(load_workspace(), host, playbook, overrides)

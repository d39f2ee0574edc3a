"""What scripts and notebooks call: the pipeline of the command line, with the same arguments, typed.

Nothing here needs or starts an event loop, so it works inside a running one; calls block, and threads may make
several at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from controller import contact, lookup, pipeline
from controller.core.errors import RefusedError
from controller.core.intention import describe
from controller.core.model import Overrides
from controller.documents import Findings, Plan
from controller.known import known_of
from controller.payload import load_payload
from controller.run import Run, load_plan
from controller.runfolder import RunFolder
from controller.sinks import Sink
from controller.stages import data as data_stage
from controller.workspace import load_workspace
from remote_payload.host.protocol import OwnedOutput
from remote_payload.host.protocol import Plan as HostPlan

Stale = Literal["fail", "clear", "quarantine", "resume"]
Kind = Literal["auto", "tokens", "chat"]
Format = Literal["speculators", "speculators-0.3", "specforge", "modelopt"]
StoreDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8"]
Capture = Literal["auto", "hooks", "native"]
Rehearse = Literal["auto", "always", "never"]
Boundaries = Literal["eagle3"] | Sequence[int]
Display = Literal["auto", "none"]


def extract(
    *,
    host: str | None = None,
    playbook: str | None = None,
    stale: Stale | None = None,
    adopt: bool = False,
    max_samples: int | None = None,
    output: str | None = None,
    capture: Capture | None = None,
    data: str | None = None,
    data_kind: Kind | None = None,
    format: Format | None = None,  # noqa: A002 - the option's name
    store_dtype: StoreDtype | None = None,
    boundaries: Boundaries | None = None,
    layer_convention: str | None = None,
    shard: tuple[int, int] | None = None,
    canary: bool = True,
    rehearse: Rehearse | None = None,
    allow: Sequence[str] = (),
    yes: bool = False,
    wait: bool = False,
    display: Display = "auto",
    sinks: Sequence[Sink] = (),
) -> Run:
    """Check the host, launch an extraction, and return its handle as soon as the host has confirmed that it holds it.

    That takes seconds, not the hours of the run: `Run.wait` follows it. Both are shown, in a notebook `Run.wait` as a
    live display, elsewhere as plain lines on stderr, those of `ctl extract --progress plain`; `display` "none" shows
    nothing. Whatever may refuse a run refuses it here. The arguments are those of `ctl extract`; None leaves the
    playbook's own value, and configuration is found from the current folder, as the command line does.

    `yes` stands for the confirmation of what `stale="clear"` or "quarantine" will delete or move. `shard` is (number
    from 1, of how many). `allow` are codes of findings to start in spite of. With `wait` the run queues on the host
    while another holds it. `sinks` get every event and byte of log while somebody waits. The connection stays open
    in the handle: close it, or use it as a context manager.

    Raises ConfigError, UsageError, ConnectionFailed, RefusedError (with the findings in `data`), RemoteFailed,
    LaunchUnknown.
    """
    overrides = _overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, format=format, store_dtype=store_dtype, boundaries=boundaries,
        layer_convention=layer_convention, shard=shard, canary=canary, rehearse=rehearse,
    )  # fmt: skip
    intention = pipeline.plan_extract(load_workspace(), host, playbook, overrides, allow=_codes(allow), wait=wait)

    def confirm(outputs: Sequence[OwnedOutput], listings: Mapping[str, Mapping[str, Any]]) -> bool:
        if not yes:
            raise RefusedError(
                "the output folder holds files of an earlier run",
                why=", ".join(f"{each['path']}: {each['entries']:,} entries" for each in outputs),
                fix="pass `yes=True` to delete or move exactly these",
                code="confirmation-needed",
            )
        return True

    with ExitStack() as stack:
        shown: list[Sink] = []
        if display == "auto" and _has_lines():
            folder = RunFolder(intention.runs_dir / intention.plan["run_id"])
            shown.append(stack.enter_context(_lines(folder, intention.host.name, intention.plan, error_follows=True)))
        run = pipeline.launch(intention, sinks=[*sinks, *shown], confirm=confirm)
        for sink in shown:
            run.remove_sink(sink)
    return _shown(run, display)


def plan(
    *,
    host: str | None = None,
    playbook: str | None = None,
    stale: Stale | None = None,
    adopt: bool = False,
    max_samples: int | None = None,
    output: str | None = None,
    capture: Capture | None = None,
    data: str | None = None,
    data_kind: Kind | None = None,
    format: Format | None = None,  # noqa: A002 - the option's name
    store_dtype: StoreDtype | None = None,
    boundaries: Boundaries | None = None,
    layer_convention: str | None = None,
    shard: tuple[int, int] | None = None,
    canary: bool = True,
    rehearse: Rehearse | None = None,
) -> Plan:
    """Return what `extract` would do, without connecting: the document of `ctl plan --json`.

    Raises ConfigError, UsageError.
    """
    overrides = _overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, format=format, store_dtype=store_dtype, boundaries=boundaries,
        layer_convention=layer_convention, shard=shard, canary=canary, rehearse=rehearse,
    )  # fmt: skip
    intention = pipeline.plan_extract(load_workspace(), host, playbook, overrides)
    payload = load_payload()
    return Plan(
        describe(
            intention.plan,
            intention.extraction,
            payload_files=len(payload.files),
            payload_bytes=payload.size,
            pushed=intention.data.describe() if intention.data else None,
        )
    )


def preflight(
    *,
    host: str | None = None,
    playbook: str | None = None,
    stale: Stale | None = None,
    adopt: bool = False,
    max_samples: int | None = None,
    output: str | None = None,
    capture: Capture | None = None,
    data: str | None = None,
    data_kind: Kind | None = None,
    format: Format | None = None,  # noqa: A002 - the option's name
    store_dtype: StoreDtype | None = None,
    boundaries: Boundaries | None = None,
    layer_convention: str | None = None,
    shard: tuple[int, int] | None = None,
    canary: bool = True,
    rehearse: Rehearse | None = None,
    allow: Sequence[str] = (),
) -> Findings:
    """Look at a host and say whether the extraction can run there; nothing is changed but what is pushed.

    A failed check is not raised: see `Findings.ok` and `Findings.check`. Raises ConfigError, UsageError,
    ConnectionFailed, RemoteFailed.
    """
    overrides = _overrides(
        stale=stale, adopt=adopt, max_samples=max_samples, output=output, capture=capture, data=data,
        data_kind=data_kind, format=format, store_dtype=store_dtype, boundaries=boundaries,
        layer_convention=layer_convention, shard=shard, canary=canary, rehearse=rehearse,
    )  # fmt: skip
    intention = pipeline.plan_extract(load_workspace(), host, playbook, overrides, allow=_codes(allow))
    with contact.host_context(intention.host, ask=None) as ctx:
        if intention.data is not None:
            data_stage.run(ctx, intention.data)
        return Findings(intention.host.name, pipeline.preflight(ctx, intention).findings)


def attach(
    run_id: str | None = None, *, host: str | None = None, display: Display = "auto", sinks: Sequence[Sink] = ()
) -> Run:
    """Return the handle of an existing run, by its id or a part of it; None is the last one launched from here.

    `host` is needed for a run that was launched from elsewhere. Raises UsageError, ConfigError.
    """
    return _shown(lookup.open_run(load_workspace(), run_id, host, sinks=sinks), display)


def _shown(run: Run, display: Display) -> Run:
    """Have the run show itself where it is waited for."""
    if display == "auto":
        run.show_with(_screen)
    return run


def _screen(run: Run) -> Any:
    from controller.ui.notebook_live import NotebookView, in_notebook

    if in_notebook():
        return NotebookView(run.id, run.host)
    return _lines(run.folder, run.host, load_plan(run.folder), error_follows=False) if _has_lines() else None


def _has_lines() -> bool:
    """Whether there is a stderr for plain lines, and no notebook, which shows a run where it is waited for."""
    from controller.ui.notebook_live import in_notebook

    return sys.stderr is not None and not in_notebook()


@contextmanager
def _lines(folder: RunFolder, host: str, plan: HostPlan | None, *, error_follows: bool) -> Iterator[Sink]:
    """Print a run as plain lines, each with its host: a script may wait for several in threads."""
    from controller.ui.stream import PlainView

    with PlainView(sys.stderr, label=host, error_follows=error_follows) as view:
        yield view.sink(run=folder.run_id, host=host, known=known_of(folder, plan))


def _codes(allow: Sequence[str]) -> Sequence[str]:
    """A single code may be given as it is: a string is a sequence of letters."""
    return [allow] if isinstance(allow, str) else allow


def _overrides(*, boundaries: Boundaries | None, canary: bool, **values: Any) -> Overrides:
    layers = boundaries if boundaries is None or isinstance(boundaries, str) else list(boundaries)
    return Overrides(boundaries=layers, canary=None if canary else False, **values)

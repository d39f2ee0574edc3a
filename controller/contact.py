"""Contact with a host: the transport that its configuration asks for, and a context for verbs of the payload."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from controller.core.errors import CtlError
from controller.core.model import Host
from controller.payload import load_payload
from controller.stages import push as push_stage
from controller.stages.base import Context, Emit
from controller.transport.base import Transport

Ask = Callable[[str], bool]
"""Asks a person a yes-or-no question; returns False where there is nobody to ask."""

Pause = Callable[[], AbstractContextManager[None]]
"""Keeps the terminal free for somebody else's questions while its block runs."""


@contextmanager
def host_context(
    host: Host, *, ask: Ask | None, pause: Pause = nullcontext, emit: Emit | None = None
) -> Iterator[Context]:
    """Connect to a host, push the payload, and yield a context for its verbs (ps, probe)."""
    with open_transport(host, ask=ask, pause=pause) as transport:
        yield pushed_context(host, transport, emit)


def pushed_context(host: Host, transport: Transport, emit: Emit | None = None) -> Context:
    """Connect, push the payload, and return a context over this transport, which its caller closes."""
    ctx = Context(transport=transport, host=host.record(), payload=load_payload().digest, emit=emit or discard)
    connect_and_push(ctx)
    return ctx


def list_runs(ctx: Context) -> dict[str, Any]:
    """Return {"runs": [...], "leases": [...]} of a host, judged there."""
    return ctx.call_json("ps", {"workdir": ctx.host["workdir"], "lease_dir": ctx.host["lease_dir"]})


def open_transport(host: Host, *, ask: Ask | None, pause: Pause = nullcontext) -> Transport:
    """Return the transport that the host's configuration asks for, not yet connected.

    `pause` is held while `ssh` itself asks a person something on the terminal.
    """
    # Imported here: fabric and paramiko take 250 ms.
    from controller.transport.auto import AutoTransport
    from controller.transport.openssh import OpensshTransport
    from controller.transport.ssh import SshTarget, SshTransport

    target = SshTarget(host=host.address, port=host.port, user=host.user, ssh_config=host.ssh_config)
    if host.transport == "paramiko":
        return SshTransport(target, ask=ask, connect_timeout_s=host.connect_timeout_s)
    kind = OpensshTransport if host.transport == "openssh" else AutoTransport
    return kind(target, ask=ask, pause=pause, connect_timeout_s=host.connect_timeout_s)


def discard(event_type: str, /, **fields: object) -> None:
    """An emit for contacts that belong to no run."""


def connect_and_push(ctx: Context) -> float:
    """Connect, push, and return the seconds that the push took."""
    started = time.monotonic()
    ctx.emit("stage", name="connect", status="started")
    try:
        ctx.transport.connect()
    except CtlError as error:
        ctx.emit("stage", name="connect", status="failed", text=error.what)
        raise
    ctx.emit("stage", name="connect", status="done", seconds=round(time.monotonic() - started, 3))
    if ctx.transport.note:
        ctx.emit("notice", level="info", code="transport", text=ctx.transport.note)
    pushed = push_stage.run(ctx.transport, ctx.host, emit=ctx.emit)
    return round(pushed.seconds, 3)

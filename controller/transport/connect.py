"""Opening one connection: every hop over its own verified host key, within one deadline.

`fabric.Connection` carries a hop and chains it through its gateway. Its three holes are closed here: it accepts any
host key (our policy replaces AutoAddPolicy on each hop, gateways too), it reads ssh and fabric configuration by
itself (it gets an empty one; `ssh -G` has resolved everything), and it sets no TCP_NODELAY (a command would cost
48 ms instead of 3.5; the first hop gets a socket of ours).

The only module that imports fabric. It is imported when a connection is opened: `ctl --help` must not wait for it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

import fabric
import paramiko

from controller.core.errors import ConnectionFailed, CtlError
from controller.transport.auth import Authenticator
from controller.transport.deadline import Deadline, guard
from controller.transport.heartbeat import Heartbeat
from controller.transport.hostkeys import Ask, HostKeyPolicy
from controller.transport.knownhosts import signature_algorithms
from controller.transport.link import WINDOW_BYTES, Link, close_hops, shut_down
from controller.transport.proxycommand import start_proxy_command
from controller.transport.retry import attempts
from controller.transport.sshconfig import SshSettings

# Paramiko logs a traceback for every failed connection; the user gets our error instead. Handlers that an
# application installs still receive it.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def open_link(
    chain: Sequence[SshSettings], *, ask: Ask | None, deadline: Deadline, keepalive_s: float, dead_after_s: float
) -> Link:
    """Connect through `chain`, the target last.

    Retries, with jitter, only what failed before a host key or authentication was judged. Raises ConnectionFailed,
    HostKeyError, AuthenticationError within the deadline; resolving a name may take the resolver's own time longer.
    """

    def open_once() -> Link:
        return _open(chain, ask, deadline, keepalive_s=keepalive_s, dead_after_s=dead_after_s)

    return attempts(deadline)(open_once)


def _open(
    chain: Sequence[SshSettings], ask: Ask | None, deadline: Deadline, *, keepalive_s: float, dead_after_s: float
) -> Link:
    hops: list[Any] = []
    hop = chain[0]
    try:
        sock = _dial(hop, deadline)
    except OSError as error:
        raise _explain(error, hop, deadline) from error
    try:
        # Paramiko has waits without a limit; they all end when the socket does.
        with guard(deadline, lambda: shut_down(sock)):
            for hop in chain:
                connection = _connection(hop, hops[-1] if hops else None, sock, ask, deadline)
                hops.append(connection)
                connection.open()
    except CtlError:
        close_hops(hops, sock)
        raise
    except (OSError, EOFError, paramiko.SSHException) as error:
        close_hops(hops, sock)
        raise _explain(error, hop, deadline) from error
    except BaseException:
        close_hops(hops, sock)
        raise
    heartbeat = Heartbeat(hops[-1].transport, interval_s=keepalive_s, dead_after_s=dead_after_s)
    heartbeat.start()
    return Link(hops, sock, heartbeat, host=hop.label)


def _dial(hop: SshSettings, deadline: Deadline) -> socket.socket:
    if hop.proxy_command is not None:
        return start_proxy_command(hop.proxy_command)
    sock = socket.create_connection((hop.address, hop.port), timeout=max(0.05, deadline.remaining()))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _connection(
    hop: SshSettings, gateway: Any, sock: socket.socket, ask: Ask | None, deadline: Deadline
) -> fabric.Connection:
    policy = HostKeyPolicy(hop, ask, deadline)
    left = max(0.05, deadline.remaining())
    connection = fabric.Connection(
        hop.address,
        user=hop.user,
        port=hop.port,
        gateway=gateway or False,  # False: no gateway, and none sought in a configuration
        forward_agent=False,
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        connect_kwargs={
            "timeout": left,
            "banner_timeout": left,
            "auth_timeout": left,
            "channel_timeout": left,
            "auth_strategy": Authenticator(hop, deadline),
            "transport_factory": _transport_factory(policy.known_types()),
            **({} if gateway else {"sock": sock}),
        },
    )
    connection.client.set_missing_host_key_policy(policy)
    return connection


def _transport_factory(known_types: Sequence[str]) -> Any:
    """Return a factory of transports that ask for a host key of a type on file first."""

    def make(sock: Any, **kwargs: Any) -> Any:
        transport = paramiko.Transport(sock, default_window_size=WINDOW_BYTES, **kwargs)
        options = transport.get_security_options()
        preferred = [name for kind in known_types for name in signature_algorithms(kind) if name in options.key_types]
        options.key_types = (*preferred, *(name for name in options.key_types if name not in preferred))
        return transport

    return make


def _explain(error: BaseException, hop: SshSettings, deadline: Deadline) -> ConnectionFailed:
    fix = f"check that `{hop.by_hand('true')}` works"
    if isinstance(error, socket.gaierror):
        temporary = error.errno == socket.EAI_AGAIN
        return ConnectionFailed(
            f"cannot resolve {hop.address}",
            why=error.strerror or str(error),
            fix=f"check the name in hosts.toml or {hop.config_name}, and the network",
            code=None if temporary else "connect-name",
        )
    if deadline.expired or isinstance(error, TimeoutError):
        why = f"no answer within {deadline.seconds:g} s"
    elif isinstance(error, paramiko.ChannelException):
        why = f"the jump host refused the way there: {error.text}"
    elif isinstance(error, EOFError):
        why = "it closed the connection before the handshake was over"
    else:
        why = str(error) or type(error).__name__
    code = "connect-incompatible" if isinstance(error, paramiko.ssh_exception.IncompatiblePeer) else None
    return ConnectionFailed(f"cannot connect to {hop.label}", why=why, fix=fix, code=code)

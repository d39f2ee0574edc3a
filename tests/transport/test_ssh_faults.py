"""What the network does to a connection, through a proxy that does it on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.proxy import TcpProxy

from controller.core.errors import ConnectionFailed, ConnectionLost
from controller.transport.ssh import SshTransport
from tools.sshd import SshServer

pytestmark = pytest.mark.sshd

Connect = Callable[..., SshTransport]


@pytest.fixture
def proxy(server: SshServer) -> Iterator[TcpProxy]:
    with TcpProxy(server.address, server.port) as relay:
        server.trust(server.known_hosts, port=relay.port)
        yield relay


def through(connect_to: Connect, server: SshServer, proxy: TcpProxy, **options: float) -> SshTransport:
    return connect_to(server.config_block(port=proxy.port), server.alias, **options)


def test_a_cut_connection_has_no_exit_code(server: SshServer, proxy: TcpProxy, connect_to: Connect) -> None:
    transport = through(connect_to, server, proxy)
    process = transport.start(["sh", "-c", "echo started; sleep 60"])
    assert process.read(timeout=30) == b"started\n"
    proxy.cut()
    with pytest.raises(ConnectionLost):
        process.wait(timeout=30)


def test_a_stream_cut_in_the_middle_delivers_a_prefix_and_no_exit_code(
    server: SshServer, proxy: TcpProxy, connect_to: Connect
) -> None:
    transport = through(connect_to, server, proxy)
    transport.connect()
    proxy.cut_after = 1_000_000
    process = transport.start(["sh", "-c", "yes 0123456789 | head -c 3000000"])
    received = bytearray()

    def follow() -> None:
        while piece := process.read(timeout=30):
            received.extend(piece)

    with pytest.raises(ConnectionLost):
        follow()
    assert 0 < len(received) < 1_000_000
    assert (b"0123456789\n" * 100_000).startswith(received)


def test_after_a_cut_the_next_command_connects_again(server: SshServer, proxy: TcpProxy, connect_to: Connect) -> None:
    transport = through(connect_to, server, proxy)
    assert transport.run(["echo", "one"], timeout=30).stdout == b"one\n"
    proxy.cut()
    try:
        done = transport.run(["echo", "two"], timeout=30)
    except ConnectionLost:  # the cut was noticed while the command was handed over; nothing is ever repeated
        done = transport.run(["echo", "two"], timeout=30)
    assert done.stdout == b"two\n"
    assert proxy.connections == 2


def test_a_frozen_path_is_noticed(server: SshServer, proxy: TcpProxy, connect_to: Connect) -> None:
    """The command is silent, so only the heartbeat can tell; paramiko alone would wait for hours."""
    transport = through(connect_to, server, proxy, keepalive_s=0.3, dead_after_s=2)
    process = transport.start(["sleep", "60"])
    proxy.freeze()
    started = time.monotonic()
    with pytest.raises(ConnectionLost) as failure:
        process.read(timeout=60)
    assert 1 < time.monotonic() - started < 30
    assert "no sign of life" in failure.value.why


def test_a_frozen_path_ends_a_write_and_a_start(server: SshServer, proxy: TcpProxy, connect_to: Connect) -> None:
    transport = through(connect_to, server, proxy, keepalive_s=0.3, dead_after_s=2, connect_timeout_s=3)
    process = transport.start(["cat"])
    proxy.freeze()
    failures: list[BaseException] = []

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except (ConnectionLost, ConnectionFailed) as error:
            failures.append(error)

    threads = [
        threading.Thread(target=attempt, args=(action,), daemon=True)
        for action in (lambda: process.write(b"x" * (32 << 20), timeout=60), lambda: transport.start(["true"]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(45)
    assert len(failures) == 2


def test_a_silent_command_on_a_living_path_is_left_alone(
    server: SshServer, proxy: TcpProxy, connect_to: Connect
) -> None:
    transport = through(connect_to, server, proxy, keepalive_s=0.2, dead_after_s=1.5)
    assert transport.run(["sh", "-c", "sleep 4; echo done"], timeout=60).stdout == b"done\n"
    assert proxy.connections == 1


def test_a_slow_path_is_no_dead_path(server: SshServer, proxy: TcpProxy, connect_to: Connect) -> None:
    proxy.delay_s = 0.1
    transport = through(connect_to, server, proxy)
    assert transport.run(["echo", "slow"], timeout=60).stdout == b"slow\n"


def test_connecting_is_tried_again_when_the_host_drops_it(
    server: SshServer, proxy: TcpProxy, connect_to: Connect
) -> None:
    """As sshd does beyond MaxStartups."""
    proxy.refuse()
    threading.Timer(0.2, proxy.refuse, args=(False,)).start()
    transport = through(connect_to, server, proxy, connect_timeout_s=30)
    deadline = time.monotonic() + 60
    while True:  # the jitter may spend all attempts in the first 0.2 s
        try:
            transport.connect()
            break
        except ConnectionFailed:
            assert time.monotonic() < deadline
    assert proxy.connections > 1


def test_a_host_that_always_drops_the_connection_is_given_up(
    server: SshServer, proxy: TcpProxy, connect_to: Connect
) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionFailed):
        through(connect_to, server, proxy).connect()
    assert proxy.connections == 4

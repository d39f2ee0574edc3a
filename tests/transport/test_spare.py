"""The session opened ahead: what it saves, and that it costs nobody anything. Real sshds, real connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import paramiko
import pytest
from support.hostrun import wait_until
from support.proxy import TcpProxy

from controller.core.errors import ConnectionFailed
from controller.transport import link
from controller.transport.spare import SpareSession
from controller.transport.ssh import SshTransport
from tools.sshd import SshServer

pytestmark = [pytest.mark.sshd, pytest.mark.only("paramiko")]

Connect = Callable[..., SshTransport]


def spare_of(transport: SshTransport) -> Any:
    """Return the channel of the spare session once it is there."""
    assert transport._link is not None
    spare = transport._link._spare
    wait_until(lambda: not spare._opening, "the host answered")
    return spare._channel


def echo(transport: SshTransport, word: str = "hello") -> bytes:
    return transport.run(["echo", word], timeout=30).stdout


def count_spares(transport: SshTransport) -> list[str]:
    """Return a list that grows by what became of each spare session that the host is asked for."""
    assert transport._link is not None
    spare = transport._link._spare
    outcomes: list[str] = []
    ask = spare._open_channel

    def asking() -> Any:
        try:
            channel = ask()
        except paramiko.ChannelException:
            outcomes.append("refused")
            raise
        outcomes.append("opened")
        return channel

    spare._open_channel = asking
    return outcomes


@pytest.fixture
def proxy(server: SshServer) -> Iterator[TcpProxy]:
    with TcpProxy(server.address, server.port) as relay:
        server.trust(server.known_hosts, port=relay.port)
        yield relay


def test_the_next_command_of_a_row_runs_on_a_session_that_is_there(server: SshServer, connect_to: Connect) -> None:
    transport = connect_to(server.config_block(), server.alias)
    assert echo(transport) == b"hello\n"
    for _ in range(3):
        spare = spare_of(transport)
        process = transport.start(["echo", "again"])
        assert process._channel is spare
        assert process.read(timeout=30) == b"again\n"
        assert process.wait(timeout=30) == 0
        process.close()


def test_where_one_session_is_allowed_every_command_has_it(
    start_server: Callable[..., SshServer], connect_to: Connect
) -> None:
    server = start_server(extra=["MaxSessions 1"])
    transport = connect_to(server.config_block(), server.alias)
    transport.connect()
    asked = count_spares(transport)
    assert [echo(transport, str(n)) for n in range(10)] == [b"%d\n" % n for n in range(10)]
    assert asked[:-1] == ["opened"] * (len(asked) - 1)  # a host that has refused one is not asked again
    process = transport.start(["sleep", "60"])
    spare_of(transport)
    process.close()
    assert asked[-1] == "refused"


def test_a_spare_that_holds_the_only_session_gives_it_up(
    start_server: Callable[..., SshServer], connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the connection was silent for so long that a session would have been asked for."""
    server = start_server(extra=["MaxSessions 1"])
    transport = connect_to(server.config_block(), server.alias)
    transport.connect()
    assert transport._link is not None
    transport._link._spare.prepare()
    spare = spare_of(transport)
    assert spare is not None
    monkeypatch.setattr(link, "FRESH_S", 0.0)
    process = transport.start(["cat"])
    assert process._channel is spare
    with pytest.raises(ConnectionFailed) as failure:
        transport.start(["true"])
    assert failure.value.code == "session-refused"
    process.close_stdin()
    assert process.wait(timeout=30) == 0


def test_a_refusal_that_paramiko_cannot_name_is_one(
    start_server: Callable[..., SshServer], connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two opens that are refused at once share one exception; the other gets a nameless one."""
    server = start_server(extra=["MaxSessions 1"])
    transport = connect_to(server.config_block(), server.alias)
    transport.connect()
    held = transport._link
    assert held is not None
    ask, refused = held._opened, [paramiko.SSHException("Unable to open channel.")]

    def opened() -> Any:
        if refused:
            raise refused.pop()
        return ask()

    monkeypatch.setattr(held, "_opened", opened)
    assert echo(transport) == b"hello\n"
    assert not refused


def test_a_host_that_does_not_answer_has_not_refused(
    server: SshServer, proxy: TcpProxy, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command sent into a silent path on the spare would be lost, and nobody could say whether it ran."""
    transport = connect_to(server.config_block(port=proxy.port), server.alias)
    assert echo(transport) == b"hello\n"
    spare = spare_of(transport)
    monkeypatch.setattr(link, "FRESH_S", 0.0)
    monkeypatch.setattr(link, "OPEN_TIMEOUT_S", 0.5)
    proxy.freeze()
    with pytest.raises(ConnectionFailed) as failure:
        transport.start(["true"])
    assert failure.value.code == "session-refused"
    assert spare_of(transport) is spare
    proxy.thaw()


@pytest.mark.parametrize("fault", ["no thread", "an error of the library"])
def test_a_spare_that_cannot_be_opened_keeps_nobody_waiting(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(fault)

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    if fault == "no thread":
        monkeypatch.setattr(threading.Thread, "start", fail)
    spare = SpareSession(fail)
    spare.prepare()
    wait_until(lambda: not spare._opening, "it was given up")
    assert spare.take() is None


def test_many_commands_at_once_close_to_the_limit_of_sessions(
    start_server: Callable[..., SshServer], connect_to: Connect
) -> None:
    """The spare never takes the place of a command, in whatever order they come and go.

    A session lasts a moment longer than its command; at the very limit a busy host may refuse one for that alone.
    """
    server = start_server(extra=["MaxSessions 5"])
    transport = connect_to(server.config_block(), server.alias)
    transport.connect()
    results: dict[int, list[bytes]] = {}

    def work(number: int) -> None:
        results[number] = [echo(transport, f"{number}-{turn}") for turn in range(15)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {number: [b"%d-%d\n" % (number, turn) for turn in range(15)] for number in range(4)}


def test_a_spare_that_the_host_closed_is_not_used(server: SshServer, connect_to: Connect) -> None:
    transport = connect_to(server.config_block(), server.alias)
    assert echo(transport) == b"hello\n"
    spare = spare_of(transport)
    spare._handle_close(None)  # what a CHANNEL_CLOSE from the host calls
    process = transport.start(["echo", "other"])
    assert process._channel is not spare
    assert process.read(timeout=30) == b"other\n"
    process.close()
    assert spare_of(transport) is not None  # and the next one is opened as ever


def test_on_a_path_that_was_silent_a_session_is_asked_for_first(
    server: SshServer, proxy: TcpProxy, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path dies without a word. A command sent into it would be lost; the question is only asked again."""
    monkeypatch.setattr(link, "FRESH_S", 0.2)
    transport = connect_to(server.config_block(port=proxy.port), server.alias, keepalive_s=10, dead_after_s=2)
    assert echo(transport) == b"hello\n"
    assert spare_of(transport) is not None
    old = transport._link
    assert old is not None
    proxy.freeze()
    time.sleep(0.5)
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(echo(transport, "after")), daemon=True)
    thread.start()
    wait_until(lambda: not old.alive, "the dead path was noticed")
    proxy.thaw()
    thread.join(60)
    assert answers == [b"after\n"]
    assert proxy.connections == 2


def test_after_a_cut_a_new_connection_has_a_spare_of_its_own(
    server: SshServer, proxy: TcpProxy, connect_to: Connect
) -> None:
    transport = connect_to(server.config_block(port=proxy.port), server.alias)
    assert echo(transport) == b"hello\n"
    spare = spare_of(transport)
    old = transport._link
    assert old is not None
    proxy.cut()
    wait_until(lambda: not old.alive, "the cut was noticed")
    assert echo(transport, "two") == b"two\n"
    assert spare_of(transport) not in (None, spare)


def test_closing_while_a_spare_is_being_opened_ends_it(
    server: SshServer, proxy: TcpProxy, connect_to: Connect
) -> None:
    transport = connect_to(server.config_block(port=proxy.port), server.alias)
    transport.connect()
    held = transport._link
    assert held is not None
    proxy.freeze()
    held._spare.prepare()
    assert held._spare._opening
    transport.close()
    wait_until(lambda: not held._spare._opening, "nobody waits for the host any more")
    assert held._spare.take() is None
    proxy.thaw()
    assert echo(transport) == b"hello\n"

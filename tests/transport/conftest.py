from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.transport.ssh import SshTarget, SshTransport
from tools.sshd import SshdUnavailable, SshServer

CONNECT_S = 20.0


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """One sshd for all tests that do not change it."""
    try:
        with SshServer(tmp_path_factory.mktemp("sshd")) as running:
            yield running
    except SshdUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def shared(server: SshServer) -> Iterator[SshTransport]:
    """One connection for all tests that only run commands."""
    with SshTransport(SshTarget(host=server.alias, ssh_config=str(server.ssh_config))) as transport:
        yield transport


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., SshServer]]:
    """Start further servers with options of their own."""
    running: list[SshServer] = []

    def start(name: str = "own", **options: object) -> SshServer:
        try:
            instance = SshServer(tmp_path / name, **options)  # type: ignore[arg-type]
            instance.start()
        except SshdUnavailable as reason:
            pytest.skip(str(reason))
        running.append(instance)
        return instance

    yield start
    for instance in running:
        instance.stop()


@pytest.fixture
def connect_to(tmp_path: Path) -> Iterator[Callable[..., SshTransport]]:
    """Make transports from the text of an ssh config; they are closed at the end."""
    made: list[SshTransport] = []

    def make(
        config: str, host: str, *, port: int | None = None, user: str | None = None, **options: object
    ) -> SshTransport:
        path = tmp_path / f"config-{len(made)}"
        path.write_text(config)
        options.setdefault("connect_timeout_s", CONNECT_S)
        transport = SshTransport(
            SshTarget(host=host, port=port, user=user, ssh_config=str(path)),
            **options,  # type: ignore[arg-type]
        )
        made.append(transport)
        return transport

    yield make
    for transport in made:
        transport.close()

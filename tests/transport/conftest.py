from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.transport.openssh import OpensshTransport
from controller.transport.ssh import SshTarget, SshTransport
from tools.sshd import SshdUnavailable, SshServer

CONNECT_S = 20.0

TRANSPORTS = {"paramiko": SshTransport, "openssh": OpensshTransport}
"""The contract's tests run on both; a test about one of them alone says so with `only`."""

AnyTransport = SshTransport | OpensshTransport


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only(name): the test is about this transport's own ways")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport_class" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("only")
        names = only.args if only else TRANSPORTS
        metafunc.parametrize("transport_class", [TRANSPORTS[name] for name in names], ids=names, scope="session")


@pytest.fixture(scope="session", autouse=True)
def control_sockets() -> Iterator[None]:
    """A folder for control sockets that no other session shares; it has to be short."""
    with tempfile.TemporaryDirectory(prefix="ctl-t-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """One sshd for all tests that do not change it."""
    try:
        with SshServer(tmp_path_factory.mktemp("sshd")) as running:
            yield running
    except SshdUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def shared(server: SshServer, transport_class: type[AnyTransport]) -> Iterator[AnyTransport]:
    """One connection for all tests that only run commands."""
    with transport_class(SshTarget(host=server.alias, ssh_config=str(server.ssh_config))) as transport:
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
def connect_to(tmp_path: Path, transport_class: type[AnyTransport]) -> Iterator[Callable[..., AnyTransport]]:
    """Make transports from the text of an ssh config; they are closed at the end."""
    made: list[AnyTransport] = []

    def make(
        config: str, host: str, *, port: int | None = None, user: str | None = None, **options: object
    ) -> AnyTransport:
        path = tmp_path / f"config-{len(made)}"
        path.write_text(config)
        options.setdefault("connect_timeout_s", CONNECT_S)
        transport = transport_class(
            SshTarget(host=host, port=port, user=user, ssh_config=str(path)),
            **options,  # type: ignore[arg-type]
        )
        made.append(transport)
        return transport

    yield make
    for transport in made:
        transport.close()

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import chaos
from support.proxy import TcpProxy
from support.stubhost import StubHost

from controller.stages import launch, watch
from controller.transport.ssh import SshTarget, SshTransport
from tools.sshd import SshdUnavailable, SshServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    try:
        with SshServer(tmp_path_factory.mktemp("sshd"), extra=["MaxSessions 20"]) as running:
            yield running
    except SshdUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def proxy(server: SshServer) -> Iterator[TcpProxy]:
    with TcpProxy(server.address, server.port) as relay:
        relay.cut_once = True
        server.trust(server.known_hosts, port=relay.port)
        yield relay


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions as for a person, a tenth as long in coming."""
    monkeypatch.setattr(watch, "SILENCE_S", 4.0)
    monkeypatch.setattr(watch, "BACKOFF_S", (0.1, 0.2, 0.5))
    monkeypatch.setattr(launch, "RETRY_PAUSE_S", 0.1)


@pytest.fixture
def site(tmp_path: Path, server: SshServer, proxy: TcpProxy, impatient: None) -> Iterator[chaos.Site]:
    """A host with its payload in place, reached through the proxy."""
    config = tmp_path / "ssh_config"
    config.write_text(server.config_block(port=proxy.port))
    transport = SshTransport(
        SshTarget(host=server.alias, ssh_config=str(config)), connect_timeout_s=8.0, keepalive_s=0.5, dead_after_s=3.0
    )
    host = StubHost(tmp_path / "host", transport=transport)  # type: ignore[arg-type]
    site = chaos.Site(host=host, proxy=proxy, server=server, local=tmp_path / "local")
    yield site
    proxy.calm()
    site.close()
    transport.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The summary of the same job, watched without a network."""
    folder = tmp_path_factory.mktemp("undisturbed")
    site = chaos.Site(host=StubHost(folder / "host"), proxy=None, server=None, local=folder / "local")
    run = site.launch(parts=chaos.FAULTS_A_RUN + 1)
    for part in range(run.parts):
        run.open_gate(part)
    run.watch()
    summary = run.summary()
    shutil.rmtree(folder)
    return summary

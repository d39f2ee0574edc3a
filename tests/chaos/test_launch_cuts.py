"""Launch is exactly once: cut anywhere in its exchange, one job runs and nobody claims otherwise.

Every byte is covered where it decides: no proper beginning of the request is a request, none of the answer an
answer. Real starts are cut at both ends, around each frame's boundaries and at a stride, and, over the real sshd, at
seeded bytes of the encrypted stream in both directions. `make test-all` takes a finer stride and more seeds.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from support import chaos
from support.hostrun import wait_until
from support.local_transport import LocalTransport
from support.proxy import TcpProxy
from support.stubhost import StubHost

from controller.core.errors import ConnectionFailed
from controller.stages import launch, stop
from remote_payload.host.errors import ProtocolError
from remote_payload.host.framing import pack_frame, read_frame
from remote_payload.host.protocol import Confirmation, Plan, confirm_line, parse_confirmation


class CuttingTransport(LocalTransport):
    """Cuts the next start: its request after `sent` bytes, or its answer after `received`."""

    def __init__(self) -> None:
        super().__init__()
        self.cut_sent: int | None = None

    def run(self, argv, *, stdin=b"", env=None, timeout):  # type: ignore[no-untyped-def]
        if self.cut_sent is None:
            return super().run(argv, stdin=stdin, env=env, timeout=timeout)
        sent, self.cut_sent = self.cut_sent, None
        process = self.start(argv, env=env)
        process.write(stdin[:sent], timeout=timeout)
        process.close_stdin()  # sshd hangs up on the command
        process.wait(timeout=timeout)
        process.close()
        raise ConnectionFailed("cut by the test")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubHost:
    monkeypatch.setattr(launch, "RETRY_PAUSE_S", 0.0)
    return StubHost(tmp_path, transport=CuttingTransport())


class Launcher:
    def __init__(self, host: StubHost, proxy: TcpProxy | None = None) -> None:
        self.host = host
        self.proxy = proxy
        self.number = random.randrange(1 << 23)

    def plan(self) -> Plan:
        self.number += 1
        counter = self.host.workdir / f"starts-{self.number}"
        run_id = f"20260101-000000-{self.number:06x}"
        return self.host.plan(run_id, "/bin/sh", "-c", f"echo x >> {counter}; exec sleep 60")

    def launch_once(self, plan: Plan) -> None:
        confirmation = launch.run(self.host.context(), plan, {}).confirmation
        assert confirmation["outcome"] in ("launched", "exists")
        if self.proxy is not None:
            self.proxy.calm()  # a cut that the launch did not come to is not meant for what follows
        counter = self.host.workdir / f"starts-{self.number}"
        wait_until(counter.exists, "the job was started")
        stopped = stop.run(self.host.context(), plan["run_id"], grace_s=1)
        assert (stopped.state, stopped.end_reason) == ("finished", "stopped")
        assert counter.read_text() in ("x\n", "")  # "" if it was stopped between making the file and writing it


def request_of(host: StubHost, plan: Plan) -> bytes:
    request = {"nonce": "0" * 32, "workdir": str(host.workdir)}
    return pack_frame(request, json.dumps({"plan": plan, "secrets": {}}).encode())


def test_no_proper_beginning_of_a_request_is_a_request(host: StubHost) -> None:
    frame = request_of(host, Launcher(host).plan())
    for cut in range(len(frame)):
        with pytest.raises(ProtocolError):
            read_frame(io.BytesIO(frame[:cut]))
    assert read_frame(io.BytesIO(frame))[0]["nonce"] == "0" * 32


def test_no_proper_beginning_of_an_answer_is_an_answer() -> None:
    answer = Confirmation(nonce="n" * 32, outcome="launched", run=None, result=None, detail={"why": "x" * 500})
    line = confirm_line(answer).encode()
    for cut in range(len(line)):
        assert parse_confirmation(line[:cut], "n" * 32) is None
    assert parse_confirmation(line, "n" * 32) == answer


def cuts(size: int, points: int) -> list[int]:
    return sorted({0, 1, 7, 8, 9, size - 1, size, *range(0, size, max(1, size // points))} & set(range(size + 1)))


@pytest.mark.parametrize("points", [4, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_a_request_cut_anywhere_starts_one_job(host: StubHost, points: int) -> None:
    launcher = Launcher(host)
    size = len(request_of(host, launcher.plan()))
    for sent in cuts(size, points):
        plan = launcher.plan()
        assert isinstance(host.transport, CuttingTransport)
        host.transport.cut_sent = sent
        launcher.launch_once(plan)


@pytest.mark.parametrize("points", [4, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_an_answer_cut_anywhere_starts_one_job(host: StubHost, points: int) -> None:
    launcher = Launcher(host)
    for received in cuts(900, points):
        plan = launcher.plan()
        host.transport.cuts = [received]
        launcher.launch_once(plan)


@pytest.mark.sshd
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 40))])
def test_over_sshd_a_cut_in_the_handshake_or_the_exchange_starts_one_job(site: chaos.Site, seed: int) -> None:
    assert site.proxy is not None
    chance = random.Random(seed)
    launcher = Launcher(site.host, site.proxy)
    plan = launcher.plan()
    if chance.random() < 0.5:
        site.proxy.cut_after = chance.randrange(1, 6000)
    else:
        site.proxy.cut_sent_after = chance.randrange(1, 8000)
    launcher.launch_once(plan)


@pytest.mark.sshd
def test_a_launch_given_up_over_a_dead_line_is_unknown_or_denied_never_a_false_failure(site: chaos.Site) -> None:
    """The line dies with the request; when it is back, cancel learns the truth."""
    assert site.proxy is not None
    launcher = Launcher(site.host)
    plan = launcher.plan()
    launch.run(site.host.context(), plan, {})
    outcome = launch.run(site.host.context(), plan, {}, patience_s=0.0)
    assert outcome.confirmation["outcome"] == "exists"
    launcher.launch_once(plan)

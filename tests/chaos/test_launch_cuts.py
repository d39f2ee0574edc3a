"""Launch is exactly once: cut anywhere in its exchange, one job runs and nobody claims otherwise.

Real starts, supervisors and jobs, cut at every byte of the request and of the answer, and then asked again or given
up. In `make test` one run lives through the cuts of all bytes; `make test-all` gives each byte a run of its own.
Over the real sshd the encrypted stream is cut at seeded bytes in both directions.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import chaos, forked_transport
from support.forked_transport import ForkedTransport
from support.hostrun import wait_until
from support.stubhost import StubHost

from controller.core.errors import ConnectionFailed, RefusedError
from controller.stages import launch, stop
from remote_payload.host import main
from remote_payload.host.errors import ProtocolError
from remote_payload.host.framing import pack_frame, read_frame
from remote_payload.host.protocol import Confirmation, Plan, confirm_line, parse_confirmation

UNTIL_ANSWERED_S = 600.0

FOREVER = "sleep 86400"
"""A job that does not end before it is stopped, however long a busy machine takes over the cuts."""

DIGITS = 16
"""Answers of two runs differ by less in length: by what their pids and times need."""

STRIDE = 45
"""Every so many bytes a run of its own in `make test`: some fifty runs."""


@pytest.fixture
def transport() -> Iterator[ForkedTransport]:
    with ForkedTransport() as forks:
        yield forks


@pytest.fixture
def host(tmp_path: Path, transport: ForkedTransport, monkeypatch: pytest.MonkeyPatch) -> StubHost:
    monkeypatch.setattr(launch, "RETRY_PAUSE_S", 0.0)
    return StubHost(tmp_path, transport=transport)  # type: ignore[arg-type]


def test_a_server_that_hangs_is_ended_with_its_verbs() -> None:
    transport = ForkedTransport(deadline_s=0.5)
    with pytest.raises(subprocess.TimeoutExpired), transport:
        os.kill(transport.pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.killpg(transport.pid, 0)


def test_a_verb_whose_answer_has_no_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang() -> int:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)
        return 0

    monkeypatch.setattr(main, "main", hang)
    with pytest.raises(TimeoutError):
        forked_transport.run_verb("start", b"", deadline_s=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


class Launcher:
    """Makes plans of jobs that leave one line for each time they are started, and checks how it went."""

    def __init__(self, host: StubHost) -> None:
        self.host = host
        self.number = random.randrange(1 << 23)
        self.held: list[Plan] = []

    def plan(self, last: str = "true") -> Plan:
        """Return a plan with a lease of its own, so that runs need not wait for each other."""
        self.number += 1
        counter = self.host.workdir / f"starts-{self.number:06x}"
        plan = self.host.plan(
            f"20260101-000000-{self.number:06x}", "/bin/sh", "-c", f"echo x >> {counter}; exec {last}"
        )
        plan["host"]["lease_dir"] = str(self.host.workdir / f"lease-{self.number:06x}")
        return plan

    def starts(self, plan: Plan) -> str:
        counter = self.host.workdir / f"starts-{plan['run_id'][-6:]}"
        return counter.read_text() if counter.exists() else ""

    def folder(self, plan: Plan) -> Path:
        return self.host.workdir / "runs" / plan["run_id"]

    def launch(self, plan: Plan, give_up: threading.Event | None = None) -> str:
        """Launch as the pipeline does, and return the outcome."""
        confirmation = launch.run(self.host.context(give_up), plan, {}, patience_s=UNTIL_ANSWERED_S).confirmation
        assert confirmation["outcome"] in ("launched", "exists")
        self.held.append(plan)
        if len(self.held) >= 16:
            self.settle()
        return confirmation["outcome"]

    def settle(self) -> None:
        """Every run that was held has run its job once and succeeded; then it is removed."""
        for plan in self.held:
            wait_until((self.folder(plan) / "result.json").exists, "the job ran to its end")
            result = json.loads((self.folder(plan) / "result.json").read_bytes())
            assert (result["end_reason"], self.starts(plan)) == ("succeeded", "x\n"), plan["run_id"]
            shutil.rmtree(self.folder(plan))
        self.held = []

    def stop(self, plan: Plan) -> None:
        """End a run whose job goes on until then, and was started once."""
        wait_until(lambda: self.starts(plan), "the job was started")
        stopped = stop.run(self.host.context(), plan["run_id"], grace_s=1)
        assert (stopped.state, stopped.end_reason, self.starts(plan)) == ("finished", "stopped", "x\n")


def request_of(host: StubHost, plan: Plan) -> bytes:
    request = {"nonce": "0" * 32, "workdir": str(host.workdir)}
    return pack_frame(request, json.dumps({"plan": plan, "secrets": {}}).encode())


def answer_size(launcher: Launcher, transport: ForkedTransport) -> int:
    """Return the bytes of a first answer; those of other runs differ from it by a few digits at most."""
    plan = launcher.plan()
    transport.cut_received = [0]
    launcher.launch(plan)
    return len(transport.answers.pop())


# ------------------------------------------------------------------- what counts as a request, and as an answer


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


# ------------------------------------------------------------------------------- every byte, in one launch


def test_one_launch_whose_request_is_cut_at_every_byte_starts_one_job(
    host: StubHost, transport: ForkedTransport
) -> None:
    launcher = Launcher(host)
    plan = launcher.plan()
    size = len(request_of(host, plan))
    transport.cut_sent = list(range(size))
    assert launcher.launch(plan) == "launched"
    assert transport.commands == size + 1
    assert all(json.loads(answer)["error"]["code"] == "protocol" for answer in transport.answers)
    launcher.settle()


def test_one_launch_whose_answer_is_cut_at_every_byte_starts_one_job(
    host: StubHost, transport: ForkedTransport
) -> None:
    launcher = Launcher(host)
    plan = launcher.plan(FOREVER)
    transport.cut_received = list(range(answer_size(launcher, transport) + 200))  # past the end: none is cut there
    assert launch.run(host.context(), plan, {}, patience_s=UNTIL_ANSWERED_S).confirmation["outcome"] == "exists"
    outcomes = [json.loads(answer.split(b" ", 2)[2])["outcome"] for answer in transport.answers]
    assert outcomes == ["launched"] + ["exists"] * (len(outcomes) - 1)
    assert len(outcomes) == len(transport.answers[-1])
    transport.cut_received = []
    launcher.stop(plan)


# -------------------------------------------------------------------------------- a run of its own for each byte


def each_byte(every: Callable[[int], range], size: int) -> list[int]:
    """Return the bytes to cut at: both ends, what is around the frame's own numbers, and those of `every`."""
    return sorted({0, 1, 7, 8, 9, size - 1, *every(size)} & set(range(size)))


def each_byte_of_an_answer(every: Callable[[int], range], size: int) -> list[int]:
    """The same, the last ones counted from the end: another run's answer may be shorter by some digits."""
    return [*each_byte(every, size - DIGITS), *(byte - DIGITS for byte in each_byte(every, DIGITS))]


EVERY = [
    pytest.param(lambda size: range(0, size, STRIDE), id="strided"),
    pytest.param(range, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("every", EVERY)
def test_a_request_that_is_cut_and_repeated_starts_one_job(
    host: StubHost, transport: ForkedTransport, every: Callable[[int], range]
) -> None:
    launcher = Launcher(host)
    for sent in each_byte(every, len(request_of(host, launcher.plan()))):
        transport.cut_sent = [sent]
        assert launcher.launch(launcher.plan()) == "launched"
    launcher.settle()


@pytest.mark.parametrize("every", EVERY)
def test_an_answer_that_is_cut_and_asked_for_again_is_of_one_job(
    host: StubHost, transport: ForkedTransport, every: Callable[[int], range]
) -> None:
    launcher = Launcher(host)
    for received in each_byte_of_an_answer(every, answer_size(launcher, transport)):
        transport.cut_received = [received]
        assert launcher.launch(launcher.plan()) == "exists"
    launcher.settle()


@pytest.mark.parametrize("every", EVERY)
def test_a_launch_given_up_at_a_cut_request_is_denied_and_never_starts_later(
    host: StubHost, transport: ForkedTransport, every: Callable[[int], range]
) -> None:
    launcher = Launcher(host)
    for sent in each_byte(every, len(request_of(host, launcher.plan()))):
        plan, give_up = launcher.plan(), threading.Event()
        transport.cut_sent, transport.on_cut = [sent], give_up.set
        with pytest.raises(ConnectionFailed, match="nothing was started"):
            launcher.launch(plan, give_up)
        with pytest.raises(RefusedError, match="cancelled"):  # what was under way arrives late
            launch.run(host.context(), plan, {})
        assert (launcher.starts(plan), (launcher.folder(plan) / "run.json").exists()) == ("", False)


@pytest.mark.parametrize("every", EVERY)
def test_a_launch_given_up_at_a_cut_answer_is_no_failure(
    host: StubHost, transport: ForkedTransport, every: Callable[[int], range]
) -> None:
    launcher = Launcher(host)
    for received in each_byte_of_an_answer(every, answer_size(launcher, transport)):
        give_up = threading.Event()
        transport.cut_received, transport.on_cut = [received], give_up.set
        assert launcher.launch(launcher.plan(), give_up) == "exists"
    launcher.settle()


# ------------------------------------------------------------------------------------------ over a real sshd


@pytest.mark.sshd
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 40))])
def test_over_sshd_a_cut_in_the_handshake_or_the_exchange_starts_one_job(site: chaos.Site, seed: int) -> None:
    assert site.proxy is not None
    chance = random.Random(seed)
    launcher = Launcher(site.host)
    plan = launcher.plan(FOREVER)
    if chance.random() < 0.5:
        site.proxy.cut_after = chance.randrange(1, 6000)
    else:
        site.proxy.cut_sent_after = chance.randrange(1, 8000)
    assert launch.run(site.host.context(), plan, {}).confirmation["outcome"] in ("launched", "exists")
    site.proxy.calm()  # a cut that the launch did not come to is not meant for what follows
    launcher.stop(plan)


@pytest.mark.sshd
def test_a_launch_given_up_over_a_dead_line_is_unknown_or_denied_never_a_false_failure(site: chaos.Site) -> None:
    """The line dies with the request; when it is back, cancel learns the truth."""
    assert site.proxy is not None
    launcher = Launcher(site.host)
    plan = launcher.plan(FOREVER)
    launch.run(site.host.context(), plan, {})
    outcome = launch.run(site.host.context(), plan, {}, patience_s=0.0)
    assert outcome.confirmation["outcome"] == "exists"
    launcher.stop(plan)

"""Two controllers want the same host at the same moment: one gets it, the other is told who did. Each time."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.hostrun import wait_until
from support.local_transport import LocalTransport
from support.stubhost import StubHost

from controller.core.errors import RefusedError
from controller.stages import launch
from remote_payload.host.lease import list_leases
from remote_payload.host.protocol import Plan

JOB = "echo x >> starts; while ! [ -e release ]; do sleep 0.02; done"

HOSTS = 5
"""Raced for side by side: the loser of a race looks again for a second, in which the machine has nothing to do."""


@pytest.mark.parametrize("races", [10, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_two_controllers_that_race_give_exactly_one_holder_each_time(tmp_path: Path, races: int) -> None:
    """HOSTS times `races`: all 100 with `make test-all`."""

    def race_for(number: int) -> int:
        host = StubHost(tmp_path / str(number))
        with ThreadPoolExecutor(2) as controllers:
            for _ in range(races):
                race(host, controllers)
        return races

    with ThreadPoolExecutor(HOSTS) as hosts:
        assert sum(hosts.map(race_for, range(HOSTS))) == HOSTS * races


def race(host: StubHost, controllers: ThreadPoolExecutor) -> None:
    barrier = threading.Barrier(2)

    def control(plan: Plan) -> str | RefusedError:
        """What one controller does, over a connection of its own; return the id of the run that it holds."""
        context = StubHost(host.workdir, transport=LocalTransport()).context()
        barrier.wait(60)
        try:
            confirmation = launch.run(context, plan, {}).confirmation
        except RefusedError as refused:
            return refused
        assert confirmation["outcome"] == "launched"
        return plan["run_id"]

    plans = [host.plan(f"20260101-000000-{secrets.token_hex(3)}", "/bin/sh", "-c", JOB) for _ in range(2)]
    answers = list(controllers.map(control, plans))
    [held] = [answer for answer in answers if isinstance(answer, str)]
    [refused] = [answer for answer in answers if isinstance(answer, RefusedError)]
    assert (refused.code, refused.data["holder"]["run_id"]) == ("lease-busy", held)
    assert held in refused.what
    settle(host, held)


def settle(host: StubHost, held: str) -> None:
    """Let the holder's job end: it was the only one that was started, and the lease is given back."""
    starts, release = host.workdir / "starts", host.workdir / "release"
    wait_until(starts.exists, "the job runs")
    release.touch()
    wait_until((host.workdir / "runs" / held / "result.json").exists, "the run has ended")
    wait_until(lambda: not list_leases(str(host.workdir / "lease")), "the lease is given back")
    assert starts.read_text() == "x\n"
    starts.unlink()
    release.unlink()

"""Seeded faults between the controller and the host: not a byte of log, not a sample, not an event is lost or twice.

Four runs of five faults here, sixteen more with `make test-all`: 100 faults over 63 MB of log.
"""

from __future__ import annotations

import random

import pytest
from support import chaos

pytestmark = [pytest.mark.sshd, pytest.mark.timeout(600)]

QUICK = 4
ALL = 20


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK, ALL))]
)
def test_seeded_faults_change_nothing(site: chaos.Site, undisturbed: dict[str, object], seed: int) -> None:
    assert site.proxy is not None
    chance = random.Random(seed)
    run = site.launch(parts=chaos.FAULTS_A_RUN + 1)
    thread = run.watch_in_background()
    run.open_gate(0)
    run.wait_log(chaos.PART_BYTES)
    done = []
    for part in range(1, run.parts):
        run.open_gate(part)
        done.append(chaos.inject(site.proxy, chance))
        print("fault:", done[-1])
        run.wait_log((part + 1) * chaos.PART_BYTES)
    outcome = run.finish(thread)
    assert (outcome.ended, outcome.state, outcome.end_reason) == (True, "finished", "succeeded")
    assert outcome.reconnects >= sum(kind in ("cut", "refuse") for kind in done)
    run.check()
    assert run.summary() == undisturbed

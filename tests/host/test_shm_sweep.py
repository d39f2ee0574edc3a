"""What a run sweeps from /dev/shm when it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.hostrun import HostRun, left_by_the_run


@pytest.mark.machine
def test_shared_memory_of_the_job_is_swept_and_that_of_others_is_not(host: HostRun) -> None:
    name = f"psm_test{os.getpid()}"
    mine, other = Path(f"/dev/shm/{name}_job"), Path(f"/dev/shm/{name}_before")
    other.write_text("x")
    try:
        result = host.run(host.plan(host.python(f"open('{mine}', 'w').write('x'); import os; os.abort()")))
        assert left_by_the_run(result) == []
        assert not mine.exists()
        assert other.exists()
    finally:
        other.unlink()
        mine.unlink(missing_ok=True)

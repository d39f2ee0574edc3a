"""How much memory a controller takes does not depend on how long a log is."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import chaos
from support.hostrun import wait_until

from controller.core.errors import ExitCode
from controller.stages import launch
from controller.transport.link import WINDOW_BYTES
from tools.sshd import SshServer

pytestmark = pytest.mark.sshd

MB = 1_000_000

CTL = """
import atexit, pathlib, re, sys
from controller.cli import main
peak, status = pathlib.Path(sys.argv.pop(1)), pathlib.Path("/proc/self/status")
atexit.register(lambda: peak.write_text(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]))
main()
"""
"""A `ctl` that writes down the most memory that it ever had resident, in KiB."""

MOVEMENT = WINDOW_BYTES + 6 * MB
"""How far two peaks may be apart, in bytes: a window may fill up or not, and an allocator has moods of some MB."""


def peak_of_copying(site: chaos.Site, project: chaos.Project, size: int) -> int:
    """Return the peak in bytes of a `ctl attach` that copies a log of `size` bytes and shows it as it comes."""
    run = site.prepare(1)
    line = "step 1234 loss 0.5678 tokens/s 91011 and so on until the line is long"
    run.plan["job"]["steps"] = [
        {"name": "job", "kind": "exec", "argv": ["/bin/sh", "-c", f"yes '{line}' | head -c {size}"]}
    ]
    launch.run(site.host.context(), run.plan, {})
    wait_until((run.folder / "result.json").exists, "the job logged all of it", chaos.DEADLINE_S)
    run_id = run.plan["run_id"]
    peak = project.folder / f"peak-{size}"
    code, _, stderr = project.ctl("attach", run_id, "--host", "stub", program=("-c", CTL, str(peak)))
    assert code == ExitCode.OK, stderr
    held = project.folder / "ctl-runs" / run_id / "log"
    assert sum(path.stat().st_size for path in held.glob("*.log")) == size
    return int(peak.read_text()) * 1024


@pytest.mark.parametrize(
    ("short", "long"),
    [
        pytest.param(32 * MB, 128 * MB, id="128MB"),
        pytest.param(64 * MB, 1000 * MB, id="1GB", marks=pytest.mark.slow),
    ],
)
def test_a_long_log_takes_no_more_memory_than_a_short_one(
    site: chaos.Site, server: SshServer, tmp_path: Path, short: int, long: int
) -> None:
    direct = tmp_path / "direct_config"  # the relay of the other tests would be what limits
    direct.write_text(server.config_block())
    project = site.project(tmp_path / "project", direct)
    assert peak_of_copying(site, project, long) < peak_of_copying(site, project, short) + MOVEMENT

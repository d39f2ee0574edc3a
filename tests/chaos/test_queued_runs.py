"""`--wait` from the command line: the host queues, and the user may go."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support import chaos
from support.hostrun import wait_until

pytestmark = pytest.mark.sshd


def test_ctrl_c_leaves_a_queued_run_queued_and_stop_takes_it_out(site: chaos.Site, tmp_path: Path) -> None:
    project = site.project(tmp_path / "project", tmp_path / "ssh_config")
    code, _, stderr = project.ctl("run", "--host", "stub", "--detach", "--name", "holder", "--", "sleep", "300")
    assert code == 8, stderr

    def rows() -> dict[str, dict[str, str]]:
        _, stdout, stderr = project.ctl("ps", "--host", "stub", "--json")
        return {row["name"]: row for row in json.loads(stdout or stderr)["runs"]}

    waiting = project.start("run", "--host", "stub", "--wait", "--name", "second", "--", "echo", "second")
    wait_until(lambda: rows().get("second", {}).get("state") == "queued" or waiting.poll() is not None, "it queues")
    waiting.send_signal(signal.SIGINT)
    _, stderr = waiting.communicate(timeout=chaos.DEADLINE_S)
    assert waiting.returncode == 8, stderr
    assert rows()["second"]["state"] == "queued"

    code, _, stderr = project.ctl(
        "run", "--host", "stub", "--wait", "--detach", "--name", "third", "--", "echo", "hi"
    )
    assert code == 8, stderr
    code, stdout, stderr = project.ctl("stop", rows()["second"]["run_id"], "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["end_reason"] == "stopped"
    code, _, stderr = project.ctl("run", "--host", "stub", "--", "echo", "no")
    assert code == 3, stderr  # without --wait it is refused as ever

    third = rows()["third"]["run_id"]
    code, _, stderr = project.ctl("stop", rows()["holder"]["run_id"])
    assert code == 0, stderr
    code, _, stderr = project.ctl("attach", third)
    assert code == 0, stderr
    assert project.ctl("logs", third)[1] == b"hi\n"
    assert json.loads(project.ctl("summary", third, "--json")[1])["allowed"] == []  # nobody was asked to allow it

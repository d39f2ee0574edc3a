"""A whole run through the ssh program, which `auto` takes because the ssh configuration asks for it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def test_auto_changes_over_and_says_so(project: Any, tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(project.server.ssh_config.read_text() + "    BindAddress 127.0.0.1\n")
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(
        project.demo.hosts_toml.read_text().replace(
            json.dumps(str(project.server.ssh_config)), json.dumps(str(config))
        )
    )
    with tempfile.TemporaryDirectory(prefix="ctl-e-", dir="/tmp") as runtime:
        env = {"CTL_CONFIG": str(hosts), "XDG_RUNTIME_DIR": runtime}
        done = project.ctl("run", "--host", "demo", "--", "sh", "-c", "seq 100000; exit 7", **env)
        assert done.returncode == 100, done.stderr
        assert "using the ssh program for this host: your ssh configuration sets BindAddress 127.0.0.1" in done.stderr
        logged = project.ctl("logs", "--last", **env)
        assert logged.stdout.split() == [str(number) for number in range(1, 100001)]
        assert project.json("summary", "--last")["end_reason"] == "job-failed"

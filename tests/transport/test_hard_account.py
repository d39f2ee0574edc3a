"""Whole runs by the real `ctl` on an account where everything hurts at once."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from support.accounts import account_on, temporary_folder
from support.chaos import Project

from controller.core.errors import ExitCode
from tools.sshd import SshServer

pytestmark = pytest.mark.sshd

SYSTEM_PYTHON = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), "")
"""One that every account of this machine may run."""

WORKDIR = 'it\'s "a" $(touch pwned) Grüße 日本'

NOISE = "echo 'Welcome to the cluster'\necho 'quota: 80%' 1>&2\numask 077\n"
"""Read by bash and tcsh alike."""


@pytest.mark.parametrize("transport", ["paramiko", "openssh"])
def test_runs_are_launched_watched_and_stopped(
    start_server: Callable[..., SshServer], tmp_path: Path, transport: str
) -> None:
    """An ordinary user without sudo or sftp, with tcsh, a profile that prints and sets umask 077, a banner, one
    session at a time, a home that cannot be written, and a work folder whose name is a trap."""
    shell = shutil.which("tcsh") or "/bin/bash"
    banner = tmp_path / "banner"
    banner.write_text("UNAUTHORISED ACCESS IS FORBIDDEN\n")
    with (
        account_on(start_server, shell=shell, extra=("MaxSessions 1", f"Banner {banner}")) as (server, account),
        temporary_folder(account) as elsewhere,
    ):
        (account.home / (".tcshrc" if "tcsh" in shell else ".bashrc")).write_text(NOISE)
        os.chown(account.home, 0, 0)
        account.home.chmod(0o755)
        workdir = elsewhere / WORKDIR
        project = Project(tmp_path / "project")
        project.folder.mkdir()
        (project.folder / "hosts.toml").write_text(
            f"schema = 1\n[hosts.hard]\naddress = {json.dumps(server.alias)}\n"
            f"ssh_config = {json.dumps(str(server.ssh_config))}\ntransport = {json.dumps(transport)}\n"
            f"python = {json.dumps(SYSTEM_PYTHON)}\nbootstrap_python = {json.dumps(SYSTEM_PYTHON)}\n"
            f'workdir = {json.dumps(str(workdir))}\noutput_roots = ["output"]\naccelerator = "cpu"\n'
            f"lease_dir = {json.dumps(str(elsewhere / 'lease'))}\n"
        )

        code, _, stderr = project.ctl("run", "--host", "hard", "--", "sh", "-c", 'id -u; printf "%s" "$PWD"')
        assert code == ExitCode.OK, stderr.decode()
        assert project.ctl("logs", "--last")[1].decode() == f"{account.uid}\n{workdir}"

        code, _, stderr = project.ctl("run", "--host", "hard", "--detach", "--", "sleep", "300")
        assert code == ExitCode.DETACHED, stderr.decode()
        code, stdout, stderr = project.ctl("stop", "--last", "--json")
        assert code == ExitCode.OK, stderr.decode()
        assert json.loads(stdout)["end_reason"] == "stopped"

        assert sorted(path.name for path in elsewhere.iterdir()) == [WORKDIR, "lease"]
        for path in [workdir, *workdir.rglob("*")]:
            status = path.lstat()
            wanted = 0o700 if stat.S_ISDIR(status.st_mode) else 0o600
            assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (account.uid, wanted), path
